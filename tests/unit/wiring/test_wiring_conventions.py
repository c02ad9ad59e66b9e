"""Conventions: worked examples read from the engines' sources, and inverse functions over random wirings."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3.conventions import CONVENTIONS, Shape, convention, parse_all, sglang_convention
from eagle3.errors import WiringError
from eagle3.wiring import Site, Wiring

KIMI = Shape("kimi_k25", 61, 7168)
LLAMA = Shape("llama", 30, 576)
MODEL_TYPES = ["llama", "qwen3", "qwen3_moe", "deepseek_v3", "kimi_k2", "kimi_k25"]


def wiring(shape: Shape, *layers: int) -> Wiring:
    return Wiring(tuple(Site(k) for k in layers), "final", shape.model_type, shape.num_layers, shape.hidden_size)


def layers_of(name: str, ids: list[int] | None, shape: Shape) -> list[int]:
    return [site.layer for site in convention(name).parse_like(ids, shape).aux]


# --- worked examples ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "ids"),
    [
        ("sglang-0.5.9", [2, 30, 58]),
        ("sglang-0.5.9-patched", [2, 30, 58]),
        ("sglang-0.5.23", [3, 31, 59]),
        ("vllm", [3, 31, 59]),
        ("hf", [3, 31, 59]),
        ("torchspec", [2, 30, 58]),
        ("model-optimizer", [2, 30, 58]),
        ("speculators", [3, 31, 59]),
    ],
)
@pytest.mark.parametrize("model_type", ["kimi_k25", "kimi_k2", "deepseek_v3"])
def test_kimi_layers_3_31_59(name: str, ids: list[int], model_type: str) -> None:
    shape = Shape(model_type, 61, 7168)
    assert convention(name).render(wiring(shape, 3, 31, 59)) == ids
    assert layers_of(name, ids, shape) == [3, 31, 59]


def test_the_ids_of_old_builds_feed_one_layer_earlier_on_new_ones() -> None:
    assert layers_of("sglang-0.5.9", [2, 30, 58], KIMI) == [3, 31, 59]
    assert layers_of("sglang-0.5.23", [2, 30, 58], KIMI) == [2, 30, 58]


def test_minus_one_is_the_embedding_on_a_patched_build_only() -> None:
    assert layers_of("sglang-0.5.9-patched", [-1, 2, 30], KIMI) == [0, 3, 31]
    assert convention("sglang-0.5.9-patched").render(wiring(KIMI, 0, 3, 31)) == [-1, 2, 30]
    for name in ("sglang-0.5.9", "sglang-0.5.13", "sglang-0.5.14", "sglang-0.5.23", "vllm"):
        with pytest.raises(WiringError):
            layers_of(name, [-1, 2, 30], KIMI)


def test_a_native_draft_means_the_same_patched_and_unpatched() -> None:
    for build in ("sglang-0.5.9", "sglang-0.5.13", "sglang-0.5.14", "sglang-0.5.23"):
        for ids in ([2, 30, 58], [1, 29, 57], [3, 31, 59], [29, 1, 57], None):
            assert layers_of(build, ids, KIMI) == layers_of(f"{build}-patched", ids, KIMI)
        for layers in ([2, 30, 58], [3, 31, 59], [1, 20, 40]):
            want = wiring(KIMI, *layers)
            assert convention(build).render(want) == convention(f"{build}-patched").render(want)


@pytest.mark.parametrize("name", ["sglang-0.5.13-patched", "sglang-0.5.14-patched", "sglang-0.5.23-patched"])
def test_minus_one_on_a_patched_new_build_counts_the_other_ids_as_outputs(name: str) -> None:
    one = convention(name)
    assert layers_of(name, [-1, 2, 30], KIMI) == [0, 3, 31]
    assert layers_of(name, [2, -1, 30], KIMI) == [0, 3, 31]
    assert layers_of(name, [-1, 1, 29], KIMI) == [0, 2, 30]
    assert layers_of(name, [-1, 0, 5], KIMI) == [0, 1, 6]
    assert layers_of(name, [-1], KIMI) == [0]
    assert one.render(wiring(KIMI, 0, 3, 31)) == [-1, 2, 30]
    assert one.render(wiring(KIMI, 0, 1, 2)) == [-1, 0, 1]
    assert one.render(wiring(KIMI, 3, 31, 59)) == [3, 31, 59]
    assert one.render(wiring(KIMI, 1, 20, 40)) == [20, 40, 1]


def test_id_0_on_patched_new_builds_is_what_it_was_before_the_patch() -> None:
    assert layers_of("sglang-0.5.23-patched", [0, 3, 31], KIMI) == [0, 3, 31]
    with pytest.raises(WiringError, match="id 0 stops this build"):
        layers_of("sglang-0.5.13-patched", [0, 3, 31], KIMI)


@pytest.mark.parametrize("shape", [LLAMA, Shape("qwen3", 30, 576), Shape("glm4_moe_lite", 47, 2048)])
@pytest.mark.parametrize("ids", [[-1, 2, 20], [2, 10, 20], [1, 10, 20], [0, 3, 21], None])
def test_the_patch_of_the_deepseek_file_leaves_other_models_alone(shape: Shape, ids: list[int] | None) -> None:
    found = [parse_all(ids, shape)[name] for name in ("sglang-0.5.23", "sglang-0.5.23-patched")]
    if isinstance(found[0], WiringError):
        assert isinstance(found[1], WiringError)
    else:
        assert found[0] == found[1]


def test_new_deepseek_builds_feed_the_embedding_for_id_0() -> None:
    assert convention("sglang-0.5.23").render(wiring(KIMI, 0, 3, 31)) == [0, 3, 31]
    with pytest.raises(WiringError, match="cannot feed the embedding"):
        convention("sglang-0.5.13").render(wiring(KIMI, 0, 3, 31))
    with pytest.raises(WiringError, match="cannot feed the embedding"):
        convention("sglang-0.5.9").render(wiring(KIMI, 0, 3, 31))
    with pytest.raises(WiringError, match="cannot feed the embedding"):
        convention("vllm").render(wiring(KIMI, 0, 3, 31))


def test_a_first_id_of_1_shifts_all_on_new_deepseek_builds() -> None:
    assert layers_of("sglang-0.5.23", [1, 29, 57], KIMI) == [2, 30, 58]
    assert layers_of("sglang-0.5.23", [29, 1, 57], KIMI) == [1, 29, 57]
    assert layers_of("sglang-0.5.23", [1, -1, 29], KIMI) == [0, 2, 30]


def test_a_wiring_that_begins_with_layer_1_is_written_with_1_last() -> None:
    ids = convention("sglang-0.5.23").render(wiring(KIMI, 1, 20, 40))
    assert ids == [20, 40, 1]
    assert layers_of("sglang-0.5.23", ids, KIMI) == [1, 20, 40]
    with pytest.raises(WiringError, match="layer 1 alone"):
        convention("sglang-0.5.23").render(wiring(KIMI, 1))


def test_llama_on_sglang_always_adds_one() -> None:
    assert layers_of("sglang-0.5.23", [1, 14, 26], LLAMA) == [2, 15, 27]
    assert layers_of("sglang-0.5.23", [2, 15, 27], LLAMA) == [3, 16, 28]
    assert layers_of("sglang-0.5.23", [-1, 15, 27], LLAMA) == [0, 16, 28]
    with pytest.raises(WiringError, match="cannot feed the embedding"):
        layers_of("sglang-0.5.9", [-1, 15, 27], LLAMA)
    assert layers_of("sglang-0.5.9", [-1, 15, 27], Shape("qwen3_moe", 30, 576)) == [0, 16, 28]
    assert layers_of("sglang-0.5.23", [-1, 15, 27], Shape("qwen3", 30, 576)) == [0, 16, 28]


@pytest.mark.parametrize("name", [n for n in CONVENTIONS if n not in ("hf",)])
def test_no_ids_mean_the_native_triple_to_everyone(name: str) -> None:
    for shape in (LLAMA, KIMI):
        native = Wiring.native(shape.model_type, shape.num_layers, shape.hidden_size)
        assert convention(name).parse_like(None, shape) == native
        assert convention(name).render_default_ok(native)
        assert not convention(name).render_default_ok(wiring(shape, 3, 15, 27))


def test_hf_has_no_default_and_its_last_entry_is_no_site() -> None:
    with pytest.raises(WiringError, match="no default"):
        layers_of("hf", None, LLAMA)
    with pytest.raises(WiringError, match="past the last"):
        layers_of("hf", [2, 15, 30], LLAMA)


def test_shallow_targets_collide() -> None:
    for name in ("sglang-0.5.23", "vllm", "specforge", "eagle"):
        with pytest.raises(WiringError, match="twice"):
            layers_of(name, None, Shape("llama", 6, 64))
    assert layers_of("model-optimizer", None, Shape("llama", 6, 64)) == [2, 3]


@pytest.mark.parametrize(
    "ids", [[], [2, 2, 5], [2, 30, 61], [2, 99], [-5, 2, 3], [True, 2, 3], ["2", 3], [2.0, 3], "23"]
)
@pytest.mark.parametrize("name", list(CONVENTIONS))
def test_bad_ids_are_refused_by_all_in_one_line(name: str, ids: list[int]) -> None:
    with pytest.raises(WiringError) as caught:
        layers_of(name, ids, KIMI)
    assert "\n" not in str(caught.value)
    assert name in str(caught.value)


def test_ids_in_another_order_feed_the_same_slots_where_the_engine_sorts() -> None:
    assert layers_of("sglang-0.5.23", [27, 2, 15], LLAMA) == [3, 16, 28]
    assert layers_of("vllm", [27, 2, 15], LLAMA) == [2, 15, 27]
    assert layers_of("hf", [27, 2, 15], LLAMA) == [27, 2, 15]
    with pytest.raises(WiringError, match="layer order"):
        convention("vllm").render(wiring(LLAMA, 27, 2, 15))


def test_models_whose_code_was_not_read_are_refused_by_sglang() -> None:
    with pytest.raises(WiringError, match="unknown id convention for this model"):
        convention("sglang-0.5.23").render(wiring(Shape("mystery", 30, 64), 2, 15, 27))


def test_programs_of_three_slots_refuse_two() -> None:
    for name in ("specforge", "torchspec"):
        with pytest.raises(WiringError, match="exactly 3"):
            convention(name).render(wiring(LLAMA, 2, 15))


def test_specforge_follows_the_sglang_it_pins() -> None:
    assert convention("specforge").render(wiring(LLAMA, 2, 15, 27)) == [1, 14, 26]
    assert convention("specforge").render(wiring(KIMI, 3, 31, 59)) == [3, 31, 59]
    with pytest.raises(WiringError, match="embedding"):
        convention("specforge").render(wiring(LLAMA, 0, 15, 27))


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(WiringError) as caught:
        convention("sglang")
    assert all(name in str(caught.value) for name in CONVENTIONS)


@pytest.mark.parametrize(
    ("version", "patched", "name"),
    [
        ("0.5.6.post2", False, "sglang-0.5.9"),
        ("0.5.9", True, "sglang-0.5.9-patched"),
        ("0.5.10", True, "sglang-0.5.9-patched"),
        ("0.5.12", False, "sglang-0.5.9"),
        ("0.5.13", True, "sglang-0.5.13-patched"),
        ("0.5.14", True, "sglang-0.5.14-patched"),
        ("0.5.23", True, "sglang-0.5.23-patched"),
        ("0.5.13", False, "sglang-0.5.13"),
        ("v0.5.20", False, "sglang-0.5.14"),
        ("0.5.23", False, "sglang-0.5.23"),
        ("0.6.1", False, "sglang-0.5.23"),
    ],
)
def test_sglang_releases(version: str, patched: bool, name: str) -> None:
    assert sglang_convention(version, patched=patched).name == name


@pytest.mark.parametrize(("version", "patched"), [("0.4.9", False), ("main", False), ("0.5.5", True)])
def test_sglang_releases_without_a_rule_are_refused(version: str, patched: bool) -> None:
    with pytest.raises(WiringError):
        sglang_convention(version, patched=patched)


def test_notes_on_old_builds() -> None:
    assert "no EAGLE-3 capture setter" in convention("sglang-0.5.9").note("kimi_k25")
    for model_type in ("kimi_k25", "llama"):
        assert "CUDA graphs" in convention("sglang-0.5.9").note(model_type)
    assert convention("sglang-0.5.23").note("llama") == ""


def test_parse_all_shows_the_disagreement() -> None:
    found = parse_all([2, 30, 58], KIMI)
    assert set(found) == set(CONVENTIONS)
    readings = {one.aux for one in found.values() if isinstance(one, Wiring)}
    assert readings == {wiring(KIMI, 2, 30, 58).aux, wiring(KIMI, 3, 31, 59).aux}


# --- the engines' loops, acted out ----------------------------------------------------------------------------------
# Small stand-ins written from the description of each loop, not from the rules under test: they keep a set of capture
# points, walk the layers once, and join what they meet. None = the program stops or has the wrong number of slots.


def walk(num_layers: int, points: Iterable[int], slots: int, layer_0_works: bool) -> list[int] | None:
    captured = []
    chosen = set(points)
    for layer in range(num_layers):
        if layer in chosen:
            if layer == 0 and not layer_0_works:
                return None
            captured.append(layer)
    return captured if len(captured) == slots else None


def act_sglang(name: str, ids: list[int], shape: Shape) -> list[int] | None:
    deepseek = shape.model_type in ("deepseek_v3", "kimi_k2", "kimi_k25")
    build = name.removesuffix("-patched")
    old = build == "sglang-0.5.9"
    if deepseek and name.endswith("patched") and (old or -1 in ids):
        rest = walk(shape.num_layers, [v + 1 for v in ids if v >= 0], sum(v >= 0 for v in ids), False)
        if rest is None:
            return None
        joined = ([0] if -1 in ids else []) + rest
        return joined if len(joined) == len(ids) else None
    if deepseek and not old:
        points = [v + 1 for v in ids] if ids[0] == 1 else ids
        return walk(shape.num_layers, points, len(ids), build != "sglang-0.5.13")
    copies = build == "sglang-0.5.23" or shape.model_type == "qwen3_moe"
    return walk(shape.num_layers, [v + 1 for v in ids], len(ids), copies)


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from([name for name in CONVENTIONS if name.startswith("sglang")]),
    st.sampled_from(MODEL_TYPES),
    st.integers(1, 12),
    st.lists(st.integers(-3, 13), min_size=1, max_size=4),
)
def test_parse_agrees_with_the_acted_loop_on_any_ids(name: str, model: str, num_layers: int, ids: list[int]) -> None:
    shape = Shape(model, num_layers, 8)
    acted = act_sglang(name, ids, shape)
    try:
        parsed: list[int] | None = layers_of(name, ids, shape)
    except WiringError:
        parsed = None
    if acted is not None and any(v > num_layers - 1 or v < -1 for v in ids):
        acted = None  # ids that name no layer are refused even if the engine would skip them
    assert parsed == acted


# --- inverse functions ----------------------------------------------------------------------------------------------


@st.composite
def random_wirings(draw: st.DrawFn) -> Wiring:
    num_layers = draw(st.integers(1, 70))
    layers = draw(st.lists(st.integers(0, min(num_layers - 1, 5)) | st.integers(0, num_layers - 1),
                           min_size=1, max_size=5, unique=True))  # fmt: skip
    if draw(st.booleans()):
        layers = sorted(layers)
    teacher = draw(st.sampled_from(["final", "final_normed"]))
    shape = Shape(draw(st.sampled_from(MODEL_TYPES)), num_layers, 64)
    return Wiring(tuple(Site(k) for k in layers), teacher, shape.model_type, num_layers, 64)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(list(CONVENTIONS)), random_wirings())
def test_what_render_writes_parse_reads_back(name: str, want: Wiring) -> None:
    one = convention(name)
    try:
        ids = one.render(want)
    except WiringError as err:
        assert "\n" not in str(err)
        return
    assert one.parse_like(ids, want, want.teacher) == want


def can_express(name: str, want: Wiring) -> bool:
    """What each program can feed, said once more and plainly."""
    layers = [site.layer for site in want.aux]
    deepseek = want.model_type in ("deepseek_v3", "kimi_k2", "kimi_k25")
    if name != "hf" and name != "torchspec" and layers != sorted(layers):
        return False
    if name in ("specforge", "torchspec") and len(layers) != 3:
        return False
    if name == "eagle":
        return layers == sorted({2, want.num_layers // 2, want.num_layers - 3}) and len(layers) == 3
    build = name.removesuffix("-patched")
    if deepseek and layers == [1] and build in ("sglang-0.5.13", "sglang-0.5.14", "sglang-0.5.23"):
        return False
    if 0 not in layers or name == "hf":
        return True
    if name in ("torchspec", "model-optimizer"):
        return False
    if name == "specforge":
        return deepseek
    if deepseek:
        return name.endswith("-patched") or name in ("sglang-0.5.14", "sglang-0.5.23")
    return want.model_type == "qwen3_moe" or build in ("sglang-0.5.23", "vllm", "speculators")


@settings(max_examples=600, deadline=None)
@given(st.sampled_from(list(CONVENTIONS)), random_wirings())
def test_render_refuses_exactly_what_cannot_be_fed(name: str, want: Wiring) -> None:
    try:
        convention(name).render(want)
        rendered = True
    except WiringError:
        rendered = False
    assert rendered == can_express(name, want)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(list(CONVENTIONS)),
    st.sampled_from(MODEL_TYPES),
    st.integers(4, 70),
    st.lists(st.integers(-2, 72), min_size=1, max_size=4),
)
def test_ids_that_parse_can_be_rendered_to_the_same_meaning(name: str, model: str, n: int, ids: list[int]) -> None:
    one = convention(name)
    shape = Shape(model, n, 64)
    try:
        meant = one.parse_like(ids, shape)
    except WiringError:
        return
    try:
        again = one.render(meant)
    except WiringError:
        assert [site.layer for site in meant.aux] == [1]  # the one thing reachable by no second way
        return
    assert one.parse_like(again, shape) == meant
