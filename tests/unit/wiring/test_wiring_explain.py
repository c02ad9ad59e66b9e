"""The sentences about a wiring that is served but was not trained."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3.conventions import explain
from eagle3.wiring import Site, Wiring


def kimi(*layers: int, teacher: str = "final", hidden_size: int = 7168) -> Wiring:
    return Wiring(tuple(Site(k) for k in layers), teacher, "deepseek_v3", 61, hidden_size)


def test_same_sites_need_no_explanation_whatever_the_teacher() -> None:
    assert explain(kimi(2, 30, 58), kimi(2, 30, 58, teacher="final_normed")) == []


def test_the_origin_story_is_named() -> None:
    lines = explain(kimi(0, 3, 31), kimi(3, 31, 59))
    assert "slot 0 was trained on the embedding; the server feeds layer 3" in lines
    assert "slot 1 was trained on layer 3; the server feeds layer 31" in lines
    (diagnosis,) = [line for line in lines if "shifted by one slot" in line]
    assert "the embedding is never fed" in diagnosis and "layer 59 is new" in diagnosis


def test_the_shift_the_other_way() -> None:
    (diagnosis,) = [line for line in explain(kimi(3, 31, 59), kimi(0, 3, 31)) if "shifted by one slot" in line]
    assert "layer 59 is never fed" in diagnosis and "the embedding is new" in diagnosis


def test_off_by_one_layer_and_whose_ids_they_were() -> None:
    lines = explain(kimi(3, 31, 59), kimi(2, 30, 58))
    assert any("off by one layer" in line and "earlier" in line for line in lines)
    (mix_up,) = [line for line in lines if "ids [2, 30, 58]" in line]
    writers, readers = mix_up.split(" mean to ")
    assert "sglang-0.5.9," in writers and "sglang-0.5.23" not in writers
    assert "sglang-0.5.23" in readers and "sglang-0.5.9" not in readers
    assert not any("shifted by one slot" in line for line in lines)


def test_missing_ids_are_suspected() -> None:
    lines = explain(kimi(5, 20, 40), kimi(2, 30, 58))
    assert any("when no layer ids are found" in line for line in lines)


def test_another_order_another_count_another_target() -> None:
    assert any("another order" in line for line in explain(kimi(31, 3, 59), kimi(3, 31, 59)))
    assert "the draft was trained on 3 slots; the server feeds 2" in explain(kimi(3, 31, 59), kimi(3, 31))
    assert any("width" in line for line in explain(kimi(3, 31, 59), kimi(3, 31, 59, hidden_size=64)))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=4, unique=True),
    st.lists(st.integers(0, 60), min_size=1, max_size=4, unique=True),
)
def test_every_differing_slot_is_named_and_only_those(trained: list[int], served: list[int]) -> None:
    lines = explain(kimi(*trained), kimi(*served))
    assert (lines == []) == (trained == served)
    for slot, (want, have) in enumerate(zip(trained, served, strict=False)):
        named = any(line.startswith(f"slot {slot} ") for line in lines)
        assert named == (want != have)
