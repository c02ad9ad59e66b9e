"""Acceptance in the real SGLang against the local engine, on a DeepSeek-V3 target: MLA, yarn, experts, 61 layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from drafts import ROOT, tiny_kimi_run
from transformers import AutoTokenizer

from eagle3.checkpoint import load_served
from eagle3.hf_model import load_target
from eagle3.target_weights import TargetWeights
from eagle3.wiring import Wiring
from eval.engines.base import Ask, Generation, Session
from eval.engines.local import LocalEngine
from eval.engines.server_config import ServerConfig
from eval.engines.sglang import SGLangEngine
from eval.prompts import encode_prompt, read_prompt_set

STEPS, LENGTH, PROMPTS = 3, 24, 5
ROUNDING = 1e-3  # two logits this close may swap places between two implementations


@dataclass
class Bench:
    """The target, its draft, the prompts, and the local engine that serves them."""

    target: Path
    served: Path
    trained: Wiring
    asks: list[Ask]
    local: LocalEngine
    config: dict[str, Any]
    work: Path

    def engine(self, **changes: Any) -> SGLangEngine:
        cfg = ServerConfig(**{**self.config, **changes})
        return SGLangEngine(self.target, self.served, self.trained, STEPS, cfg, self.work)

    def same_text(self, ask: Ask, made: list[int], expected: list[int]) -> bool:
        """Equal, or parted where the target's first two logits tie."""
        if made == expected:
            return True
        place = next((k for k, (a, b) in enumerate(zip(made, expected, strict=False)) if a != b), len(expected))
        return self.local.top_gap([*ask.prompt_ids, *expected[:place]]) < ROUNDING


@pytest.fixture(scope="module")
def bench(
    sglang_python: Path,
    sglang_env: dict[str, str],
    sglang_args: list[str],
    tiny_kimi_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Bench:
    run = tiny_kimi_run(tiny_kimi_path)
    weights = TargetWeights(tiny_kimi_path)
    draft, trained, _ = load_served(run / "served", weights.embedding())
    target = load_target(tiny_kimi_path, "cpu", torch.float32, False, with_head=True)
    tokenizer = AutoTokenizer.from_pretrained(tiny_kimi_path)
    prompts = read_prompt_set(ROOT / "data" / "eval" / "chat.jsonl", PROMPTS).prompts
    asks = [Ask(one.id, encode_prompt(tokenizer, one)) for one in prompts]
    config = {
        "python": str(sglang_python),
        "env": sglang_env,
        "extra_args": sglang_args,
        "dtype": "float32",
        "start_timeout_s": 600.0,
    }
    local = LocalEngine(target, draft, trained)
    return Bench(tiny_kimi_path, run / "served", trained, asks, local, config, tmp_path_factory.mktemp("sglang"))


def run(session: Session, asks: list[Ask], concurrency: int, temperature: float = 0.0) -> list[Generation]:
    batch = session.run(asks, max_new_tokens=LENGTH, temperature=temperature, concurrency=concurrency)
    assert not batch.failures
    return [made for made in batch.generations if made is not None]


@pytest.fixture(scope="module")
def plain(bench: Bench) -> list[list[int]]:
    """What the server writes without a draft."""
    with bench.engine().serve(None) as session:
        return [list(made.tokens) for made in run(session, bench.asks, 1)]


@pytest.fixture(scope="module")
def chain(bench: Bench) -> Iterator[Session]:
    """A server with the draft, proposing a chain."""
    with bench.engine().serve(bench.trained) as session:
        yield session


def test_plain_decoding_is_the_local_engines(bench: Bench, plain: list[list[int]]) -> None:
    for ask, text in zip(bench.asks, plain, strict=True):
        assert bench.same_text(ask, text, bench.local.baseline(ask.prompt_ids, LENGTH).tokens), ask.id


@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_draft_changes_no_token_and_accepts_as_locally(
    bench: Bench, chain: Session, plain: list[list[int]], concurrency: int
) -> None:
    """Batch 1 and a batch: the texts are plain decoding's, and every verify keeps what the local engine's keeps."""
    totals = [0, 0, 0, 0]
    for ask, made, text in zip(bench.asks, run(chain, bench.asks, concurrency), plain, strict=True):
        here = bench.local.generate(ask.prompt_ids, LENGTH, STEPS)
        assert bench.same_text(ask, list(made.tokens), text), ask.id
        if list(made.tokens) == here.tokens:
            totals = [
                a + b for a, b in zip(totals, (made.correct, made.verifies, here.correct, here.verifies), strict=True)
            ]
    correct, verifies, local_correct, local_verifies = totals
    assert local_correct > 0, "the draft accepts nothing, so nothing is compared"
    assert abs(correct / verifies - local_correct / local_verifies) < 0.03


def test_the_server_says_what_it_was_started_with(bench: Bench, chain: Session) -> None:
    assert chain.facts["convention"] == "sglang-0.5.23"
    assert chain.facts["ids"] == [site.layer for site in bench.trained.aux]
    assert chain.facts["resolved"]["speculative_num_steps"] == STEPS
    assert chain.facts["resolved"]["speculative_num_draft_tokens"] == STEPS + 1


def test_sampling_still_ends_and_counts(bench: Bench, chain: Session) -> None:
    """The CPU build verifies greedily whatever the temperature; the counts must hold all the same."""
    for made in run(chain, bench.asks[:2], 2, temperature=0.7):
        assert made.tokens and sum(made.correct_histogram) == made.verifies


def test_a_tree_of_proposals_changes_no_token_and_keeps_at_least_the_chain(
    bench: Bench, chain: Session, plain: list[list[int]]
) -> None:
    kept_by_chain = sum(made.correct / made.verifies for made in run(chain, bench.asks, 1))
    with bench.engine(topk=4, draft_tokens=10).serve(bench.trained) as session:
        made = run(session, bench.asks, 4)
    for ask, one, text in zip(bench.asks, made, plain, strict=True):
        assert bench.same_text(ask, list(one.tokens), text), ask.id
    assert sum(one.correct / one.verifies for one in made) >= kept_by_chain
