"""The measure on a real tiny target: what is served, compared, counted and logged."""

from __future__ import annotations

import pytest
from eval_models import make_tokenizer, make_wiring

from eagle3.errors import WiringError
from eval.accept import compare_with_plain, count_generations, measure, served_wirings
from eval.config import EvalConfig
from eval.engines.base import Generation
from eval.engines.local import LocalEngine
from eval.prompts import Prompt, PromptSet

SETS = [
    PromptSet(
        "chat", [Prompt(str(i), [{"role": "user", "content": text}]) for i, text in enumerate(["a b", "c"])], "k1"
    ),
    PromptSet("list", [Prompt("0", [{"role": "user", "content": "d d a"}])], "k2"),
]


def config(**changes: object) -> EvalConfig:
    return EvalConfig(**{"prompt_sets": ["unused"], "max_new_tokens": 12, "num_steps": 2, **changes})  # type: ignore[arg-type]


def test_both_ways_of_serving(target, draft, wiring) -> None:
    seen, logged, ticks = [], [], []

    def factory(served):  # type: ignore[no-untyped-def]
        seen.append(served)
        return LocalEngine(target, draft, served)

    cfg = config(serve=["matched", "native"])
    result = measure(
        factory,
        SETS,
        cfg,
        tokenizer=make_tokenizer(),
        trained=wiring,
        predicted_acceptance=[0.5, 0.5, 0.5],
        commands=["make it"],
        advance=ticks.append,
        log=logged.append,
    )
    assert [w.names for w in seen] == [["embedding", "layer_4", "layer_2"], ["layer_2", "layer_4", "layer_5"]]
    matched, native = result.served
    assert (matched.mode, matched.differences) == ("matched", [])
    assert native.mode == "native"
    assert any("slot 0" in line and "embedding" in line for line in native.differences)
    assert [one.summary.prompts for one in matched.sets] == [2, 1]
    assert matched.overall.verifies == sum(one.summary.verifies for one in matched.sets)
    for served in result.served:
        assert served.overall.same_tokens == 3  # greedy text is the target's own, whatever feeds the draft
        assert served.overall.baseline_tokens_per_second
        assert all(prompt.text for one in served.sets for prompt in one.prompts)
    assert result.predicted_tau == pytest.approx(1.75)
    assert sum(ticks) == count_generations(SETS, cfg, wiring) == 9
    assert logged[0]["eval/matched/all/tau"] == matched.overall.tau
    assert logged[0]["eval/native/chat/acceptance_0"] == native.sets[0].summary.acceptance[0]
    assert set(result.engine_ids) >= {"vllm"}


def test_counts_are_those_of_the_engine(target, draft, wiring) -> None:
    engine = LocalEngine(target, draft, wiring)
    result = measure(lambda _: engine, SETS, config(baseline=False), tokenizer=make_tokenizer(), trained=wiring)
    prompt = result.served[0].sets[1].prompts[0]
    direct = engine.generate([0, 6, 6, 3, 1], 12, 2)  # <user> d d a <assistant>
    assert (prompt.verifies, prompt.correct_histogram) == (direct.verifies, direct.correct_histogram)
    assert prompt.baseline is None
    assert result.served[0].overall.speedup is None


def test_sampled_texts_are_not_compared(target, draft, wiring) -> None:
    engine = LocalEngine(target, draft, wiring)
    result = measure(lambda _: engine, SETS[1:], config(temperature=1.0), tokenizer=make_tokenizer(), trained=wiring)
    assert result.served[0].overall.same_tokens is None
    assert result.served[0].overall.speedup is not None


def test_native_is_left_out_where_it_is_the_trained_wiring() -> None:
    assert list(served_wirings(make_wiring(2, 4, 5), ["matched", "native"])) == ["matched"]
    with pytest.raises(WiringError, match="twice"):
        served_wirings(make_wiring(1, 2, 4, layers=6), ["native"])


def test_a_text_that_leaves_plain_decoding_is_found_with_its_margin(target, draft, wiring) -> None:
    engine = LocalEngine(target, draft, wiring)
    plain = engine.baseline([1, 2], 6)
    wrong = [*plain.tokens[:3], (plain.tokens[3] + 1) % 7, *plain.tokens[4:]]
    row = compare_with_plain(engine, [1, 2], Generation(wrong), plain, greedy=True)
    assert (row.same_tokens, row.first_difference) == (False, 3)
    assert row.top_gap == pytest.approx(engine.top_gap([1, 2, *plain.tokens[:3]]))
    short = compare_with_plain(engine, [1, 2], Generation(plain.tokens[:4]), plain, greedy=True)
    assert (short.same_tokens, short.first_difference) == (False, 4)
    assert compare_with_plain(engine, [1, 2], plain, plain, greedy=True).same_tokens is True
