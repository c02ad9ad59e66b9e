"""The real SpecForge and speculators (`make peers`) compute the losses and the gradients that we compute."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.peers.cases import Case
from benchmarks.peers.measure import Budget, measure
from benchmarks.peers.sides import OURS, PEERS, environment_of, open_sides

CASE = Case(hidden=128, draft_vocab=384, length=160, steps=4, vocab=1000)


def sides_of(peer: str, *settings: str) -> list:
    if not environment_of(peer).exists():
        pytest.skip(f"{peer} is not set up: run `make peers`")
    return open_sides([peer], [f"{peer}.{setting}" for setting in settings])


@pytest.mark.parametrize("peer", PEERS)
def test_peer_agrees_with_us_on_documents_of_several_lengths(peer: str, tmp_path: Path) -> None:
    result = measure(CASE, sides_of(peer), Budget(1, 1, 1), tmp_path, print)
    assert len(result["documents"]) > 1
    check = result["check"][peer]
    assert check["agrees"] and check["loss_off"] < 1e-4 and check["gradient_off"] < 1e-3 and not check["missing"]
    assert result["ratios"]["fastest_peer"] == peer and result["sides"][OURS]["memory_mib"]["peak"] > 0


@pytest.mark.parametrize(
    ("peer", "setting"),
    [("specforge", "batching=padded"), ("specforge", "compact_teacher=false"), ("speculators", "attention=eager")],
)
def test_every_way_of_a_peer_computes_the_same(peer: str, setting: str, tmp_path: Path) -> None:
    result = measure(replace(CASE, share=1.0), sides_of(peer, setting), Budget(1, 1, 1), tmp_path, print)
    assert result["check"][peer]["agrees"]


def test_a_frozen_head_is_told(tmp_path: Path) -> None:
    result = measure(CASE, sides_of("speculators", "head=frozen"), Budget(1, 1, 1), tmp_path, print)
    assert result["check"]["speculators"]["missing"] == ["lm_head.weight"]
    assert "median_s" in result["sides"]["speculators"]
