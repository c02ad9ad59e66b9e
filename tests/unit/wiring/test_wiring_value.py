"""The wiring value: names, refusals, comparison, the JSON form."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3.errors import WiringError
from eagle3.wiring import EMBEDDING, Site, Wiring


@st.composite
def wirings(draw: st.DrawFn) -> Wiring:
    num_layers = draw(st.integers(1, 70))
    layers = draw(st.lists(st.integers(0, num_layers - 1), min_size=1, max_size=5, unique=True))
    teacher = draw(st.sampled_from(["final", "final_normed"]))
    return Wiring(tuple(Site(k) for k in layers), teacher, draw(st.sampled_from(["llama", "kimi_k2"])), num_layers, 64)


@settings(max_examples=100, deadline=None)
@given(wirings())
def test_json_form_reads_back_to_the_same_wiring(wiring: Wiring) -> None:
    assert Wiring.from_dict(json.loads(json.dumps(wiring.to_dict()))) == wiring


@given(wirings(), wirings())
@settings(max_examples=100, deadline=None)
def test_differences_are_empty_exactly_for_equal_wirings(one: Wiring, other: Wiring) -> None:
    assert (one.differences(other) == []) == (one == other)


@pytest.mark.parametrize("text", ["3", "layer3", "layer_-1", "hidden_3", "", "layer_3x", "-1"])
def test_a_bare_id_is_no_site(text: str) -> None:
    with pytest.raises(WiringError, match="not a site"):
        Site.parse(text)


def test_layer_0_and_the_embedding_are_one_site() -> None:
    assert Site.parse("layer_0") == Site.parse("embedding") == EMBEDDING
    assert EMBEDDING.name == "embedding"


@pytest.mark.parametrize(
    ("layers", "teacher", "message"),
    [
        ((), "final", "no aux site"),
        ((2, 3, 3), "final", "twice"),
        ((2, 30, 61), "final", "has not"),
        ((2, 30, 58), "logits", "unknown teacher"),
    ],
)
def test_impossible_wirings_are_refused(layers: tuple[int, ...], teacher: str, message: str) -> None:
    with pytest.raises(WiringError, match=message):
        Wiring(tuple(Site(k) for k in layers), teacher, "deepseek_v3", 61, 64)


def test_a_store_leaves_the_embedding_out_and_keeps_the_order() -> None:
    wiring = Wiring((Site(0), Site(3), Site(31)), "final", "deepseek_v3", 61, 7168)
    assert [site.name for site in wiring.stored_sites] == ["layer_3", "layer_31"]
    assert wiring.feature_width == 3 * 7168


def test_another_wiring_is_refused_slot_by_slot_in_one_line() -> None:
    want = Wiring((Site(2), Site(30), Site(58)), "final", "deepseek_v3", 61, 64)
    have = Wiring((Site(3), Site(30), Site(59)), "final_normed", "deepseek_v3", 61, 64)
    with pytest.raises(WiringError) as caught:
        want.check_same(have, where="store", mend="extract again")
    line = str(caught.value)
    assert "\n" not in line
    assert "slot 0 holds layer 3; expected layer 2" in line
    assert "slot 2 holds layer 59; expected layer 58" in line
    assert "slot 1" not in line
    assert "teacher" in line and "extract again" in line


def test_native_is_in_layer_order_and_collides_on_six_layers() -> None:
    assert Wiring.native("llama", 30, 64).names == ["layer_2", "layer_15", "layer_27"]
    with pytest.raises(WiringError, match="twice"):
        Wiring.native("llama", 6, 64)
