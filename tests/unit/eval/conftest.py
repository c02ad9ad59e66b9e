"""Fixtures of the eval tests: a tiny random target, a random draft, and drafts that know the text."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from eval_models import ToldDraft, fill, make_shape, make_target, make_wiring
from transformers import LlamaForCausalLM

from eagle3.conventions import explain
from eagle3.draft import Eagle3Draft
from eagle3.wiring import Wiring
from eval.accept import engine_ids, environment, native_wiring
from eval.engines.base import Generation, chain_counts
from eval.results import AcceptResult, Baseline, Served, SetResult, prompt_result, summarize
from eval.training import Training, training_of


@pytest.fixture(autouse=True)
def few_threads() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def target() -> LlamaForCausalLM:
    return make_target(7)


@pytest.fixture
def draft(target: LlamaForCausalLM) -> Eagle3Draft:
    return fill(Eagle3Draft(make_shape(7, 4)), target, ids=[1, 2, 4, 6])


@pytest.fixture
def wiring() -> Wiring:
    return make_wiring(0, 4, 2)


@pytest.fixture
def told() -> Callable[..., ToldDraft]:
    def make(target: LlamaForCausalLM, text: list[int], wrong: set[int] | frozenset[int] = frozenset()) -> ToldDraft:
        vocab = target.config.vocab_size
        draft = fill(ToldDraft(make_shape(vocab, vocab)), target)
        draft.text, draft.wrong = text, frozenset(wrong)
        return draft  # type: ignore[return-value]

    return make


@pytest.fixture
def accept_result() -> AcceptResult:
    """Results as `measure` makes them, of invented counts: served as trained, and by the engine's default."""
    trained = make_wiring(0, 4, 2)
    served = []
    for mode, wiring, kept in (("matched", trained, [2, 1, 2, 0]), ("native", native_wiring(trained), [0, 1, 0, 0])):
        sets = []
        for name in ("chat", "list"):
            rows = [prompt_result(f"p{i}", _invented(kept), Baseline(8, 2.0, True), f"text {i} <&>") for i in range(2)]
            sets.append(SetResult(summarize(name, rows), f"key {name}", rows))
        overall = summarize("all", [row for one in sets for row in one.prompts])
        served.append(Served(mode, wiring.to_dict(), explain(trained, wiring), sets, overall))
    return AcceptResult(
        title="tiny",
        engine="local",
        num_steps=2,
        temperature=0.0,
        max_new_tokens=12,
        seed=0,
        trained=trained.to_dict(),
        engine_ids=engine_ids(trained),
        predicted_acceptance=[0.6, 0.4],
        served=served,
        commands=["python train/run.py conf=x a='<b>'"],
        environment=environment(),
        target="tiny target",
    )


@pytest.fixture
def trained() -> Training:
    """A training with two domains, one of them covered too little."""
    steps = [
        {
            "kind": "train",
            "step": k,
            "losses": [6 / k + 2, 7 / k + 2],
            "acc": [1 - 1 / k, 0.9 - 0.8 / k],
            "supervised": 9,
        }
        for k in range(1, 41)
    ]
    check = {"kind": "val", "step": 40, "losses": [2.1, 2.3], "acc": [0.9, 0.8], "supervised": 9}
    counts = {"train": {"records": 147, "tokens": 12079, "supervised_tokens": 5672}, "read": 161, "skipped": 14}
    group = {"records": 16, "tokens": 534, "coverage": 0.91}
    whole = {"records": 147, "tokens": 5672, "coverage": 0.99}
    report = {"vocab_size": 640, "target_vocab_size": 1280, "min_coverage": 0.95, "all": whole}
    report |= {"domain": {"chat": {**whole, "tokens": 5138}, "code": group}, "language": {"(none)": whole}}
    return training_of([*steps, check], counts, report)


def _invented(kept: list[int]) -> Generation:
    histogram = [kept.count(c) for c in range(3)]
    tried, right = chain_counts(histogram)
    tokens = list(range(1 + sum(kept) + len(kept)))
    return Generation(tokens, len(kept), sum(kept), 2 * len(kept), histogram, tried, right, 2.0, 0.5, 0.2)
