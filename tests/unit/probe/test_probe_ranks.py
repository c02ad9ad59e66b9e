"""The ranks probe: the same target on 1 rank and on n, from servers or from files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from probe_fakes import FakeServer, partial_sum, record_ids
from torch import Tensor, nn

from eagle3.errors import IntegrityError
from eval.probe.dump import Dump, load_dump, save_dump

Probe = Callable[..., tuple[int, dict[str, Any]]]
NAMES = ("layer_2", "layer_4", "layer_5")


def said(verdict: dict[str, Any]) -> str:
    return " ".join([verdict["what"], *verdict["reasons"], verdict["mend"]])


@pytest.fixture
def dump(tmp_path: Path, states: Callable[[Sequence[int]], dict[str, Tensor]]) -> Callable[..., Path]:
    """A dump of the three sites on a few prompts, rounded to bfloat16, with `plant` applied to each prompt's rows."""

    def make(
        name: str, ranks: int, plant: Callable[[Tensor, list[int]], Tensor] = lambda rows, _ids: rows, count: int = 3
    ) -> Path:
        prompts = record_ids(count, 20)
        rows = []
        for ids in prompts:
            own = states(ids)
            rows.append(plant(torch.cat([own[site] for site in NAMES], dim=-1), ids).bfloat16().float())
        path = tmp_path / f"{name}.safetensors"
        save_dump(path, Dump(name, ranks, "0.5.23", 64, [torch.tensor(ids) for ids in prompts], rows))
        return path

    return make


def _rounding(rows: Tensor, _ids: list[int]) -> Tensor:
    return rows * (1 + 0.01 * torch.randn(rows.shape, generator=torch.Generator().manual_seed(1)))


def _halved(rows: Tensor, _ids: list[int]) -> Tensor:
    return torch.cat([rows[:, :64], rows[:, 64:128] / 2, rows[:, 128:]], dim=-1)


def _mixed(rows: Tensor, _ids: list[int]) -> Tensor:
    out = rows.clone()
    out[:4] = rows[4:8]
    return out


def test_rounding_agrees(probe: Probe, dump: Callable[..., Path]) -> None:
    code, verdict = probe("ranks", "--dump", dump("one", 1), "--dump", dump("two", 2, _rounding))
    assert code == 0 and all(row["same"] == "yes" and row["error"] > 0 for row in verdict["rows"])


def test_a_slot_scaled_by_the_ranks_is_a_partial_sum(probe: Probe, dump: Callable[..., Path]) -> None:
    one, two = dump("one", 1), dump("two", 2, _halved)
    for sides in ((one, two), (two, one)):  # the side on fewer ranks is trusted, whatever the order
        code, verdict = probe("ranks", "--dump", sides[0], "--dump", sides[1])
        assert code == 1 and "slot 1 on" in said(verdict) and "is 1/2 times" in said(verdict)
        assert "partial sum of one of 2 ranks" in said(verdict) and "trust the side with 1 rank" in verdict["mend"]
        assert [row["same"] for row in verdict["rows"]] == ["yes", "no", "yes"]


def test_true_partial_sums_are_named(probe: Probe, dump: Callable[..., Path], model: nn.Module) -> None:
    part = partial_sum(model, 4, 2)

    def plant(rows: Tensor, ids: list[int]) -> Tensor:
        return torch.cat([rows[:, :64], part(ids), rows[:, 128:]], dim=-1)

    code, verdict = probe("ranks", "--dump", dump("one", 1), "--dump", dump("two", 2, plant))
    assert code == 1 and verdict["what"] == "1 of 3 slots differ: partial sums on one side"
    assert "before the 2 ranks' parts were summed" in said(verdict)


def test_some_rows_of_other_requests_are_noticed(probe: Probe, dump: Callable[..., Path]) -> None:
    code, verdict = probe("ranks", "--dump", dump("one", 1), "--dump", dump("two", 2, _mixed))
    assert code == 1 and "20% of the rows differ" in said(verdict)


def test_other_layers_are_no_partial_sum(probe: Probe, dump: Callable[..., Path]) -> None:
    swapped = dump("two", 1, lambda rows, _ids: rows.roll(64, dims=1))
    code, verdict = probe("ranks", "--dump", dump("one", 1), "--dump", swapped)
    assert code == 1 and "partial" not in verdict["what"] and "holds another tensor" in said(verdict)


def test_equal_ranks_are_said_to_prove_little(probe: Probe, dump: Callable[..., Path]) -> None:
    code, verdict = probe("ranks", "--dump", dump("one", 1), "--dump", dump("two", 1))
    assert code == 0 and "says nothing about the sum over ranks" in said(verdict)


def test_sides_that_cannot_be_compared_are_refused(probe: Probe, dump: Callable[..., Path], tmp_path: Path) -> None:
    one = dump("one", 1)
    code, verdict = probe("ranks", "--dump", one, "--dump", dump("two", 2, count=2))
    assert code == 2 and "the prompts are not the same" in said(verdict)
    whole = load_dump(one)
    fewer = tmp_path / "fewer.safetensors"
    save_dump(fewer, replace(whole, states=[rows[:, :128].clone() for rows in whole.states]))
    code, verdict = probe("ranks", "--dump", one, "--dump", fewer)
    assert code == 2 and "3 and 2 slots" in said(verdict)
    assert probe("ranks", "--dump", one)[0] == 2


def test_dump_reads_back_and_a_broken_one_is_refused(dump: Callable[..., Path], tmp_path: Path) -> None:
    path = dump("one", 4)
    read = load_dump(path)
    assert (read.ranks, read.version, read.hidden_size) == (4, "0.5.23", 64)
    assert [ids.tolist() for ids in read.prompts] == record_ids(3, 20)
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(IntegrityError, match="not a dump"):
        load_dump(path)


def test_live_saves_what_ranks_reads(
    serve: Callable[..., FakeServer], probe: Probe, target: Path, tmp_path: Path, model: nn.Module
) -> None:
    serve(url="http://one:1")
    saved = tmp_path / "one.safetensors"
    asked = ("--target", target, "--prompts", 2, "--max-tokens", 16)
    assert probe("live", "--url", "http://one:1", *asked, "--save", saved)[0] == 0
    part = partial_sum(model, 4, 2)

    def feed(states: dict[str, Tensor], ids: list[int]) -> Tensor:
        return torch.cat([states["layer_2"], part(ids), states["layer_5"]], dim=-1)

    serve(url="http://two:2", info={"tp_size": 2})
    assert probe("ranks", "--dump", saved, "--url", "http://two:2")[0] == 0
    assert probe("ranks", "--url", "http://one:1", "--url", "http://two:2", *asked)[0] == 0
    serve(url="http://two:2", info={"tp_size": 2}, feed=feed)
    code, verdict = probe("ranks", "--dump", saved, "--url", "http://two:2")
    assert code == 1 and "partial sums" in verdict["what"]
