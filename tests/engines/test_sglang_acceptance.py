"""Acceptance in the real SGLang against the local engine, on a DeepSeek-V3 target: MLA, yarn, experts, 61 layers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from acceptance import LENGTH, STEPS, Bench, make_bench, run
from drafts import tiny_kimi_run

from eval.engines.base import Session


@pytest.fixture(scope="module")
def bench(
    sglang_python: Path,
    sglang_env: dict[str, str],
    sglang_args: list[str],
    tiny_kimi_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Bench:
    work, served = tmp_path_factory.mktemp("sglang"), tiny_kimi_run(tiny_kimi_path) / "served"
    return make_bench(tiny_kimi_path, served, work, sglang_python, sglang_env, sglang_args)


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
    made = run(chain, bench.asks, concurrency)
    for ask, one, text in zip(bench.asks, made, plain, strict=True):
        assert bench.same_text(ask, list(one.tokens), text), ask.id
    bench.check_acceptance(made)


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
