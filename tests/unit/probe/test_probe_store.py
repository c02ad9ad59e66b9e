"""The store probe names what each tensor truly is, and the ranks probe compares two servers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from data_prep.capture.sample import CapturedSample
from eagle3.checked_json import read_checked, write_checked
from eagle3.errors import IntegrityError
from eagle3.hf_states import all_site_states
from eagle3.wiring import Wiring
from eval.probe.__main__ import main
from eval.probe.stored import StoreReader

Probe = Callable[..., tuple[int, dict[str, Any]]]
MakeStore = Callable[..., Path]
Wire = Callable[..., Wiring]


def said(verdict: dict[str, Any]) -> str:
    return " ".join([verdict["what"], *verdict["reasons"], verdict["mend"]])


@pytest.mark.parametrize("teacher", ["final", "final_normed"])
def test_true_store_agrees(probe: Probe, target: Path, store: MakeStore, wire: Wire, teacher: str) -> None:
    code, verdict = probe("store", store(wire(0, 2, 5, teacher=teacher)), "--target", target)
    assert code == 0
    assert verdict["facts"]["holds"] == {"layer_2": "layer_2", "layer_5": "layer_5", "final": teacher}
    assert len(verdict["facts"]["records"]) == 3


@pytest.mark.parametrize("codec", ["lossless", "fp8", "int8"])
@pytest.mark.parametrize("swapped", [False, True])
def test_a_store_of_any_codec_is_judged(
    probe: Probe, target: Path, store: MakeStore, wire: Wire, codec: str, swapped: bool
) -> None:
    planted = {"plant": _swap} if swapped else {}
    code, verdict = probe("store", store(wire(2, 5), codec=codec, **planted), "--target", target)
    assert code == int(swapped)
    assert ("layer_2 holds layer_5, 3 layers later" in said(verdict)) == swapped


def test_rounding_to_8_bits_does_not_blur_neighbouring_layers(
    target: Path, store: MakeStore, wire: Wire, model: Any
) -> None:
    """Two sites that differ by less than the codec's error are still told apart: both sides are rounded alike."""
    reader = StoreReader(store(wire(2, 5), codec="fp8"))
    (record,) = reader.spread(1, 100)
    exact = all_site_states(model, record.input_ids)["layer_2"]
    step = torch.randn(exact.shape, generator=torch.Generator().manual_seed(0))
    near = exact + 0.01 * exact.norm(dim=1, keepdim=True) * step / step.norm(dim=1, keepdim=True)
    references = {"layer_2": exact, "layer_3": near}

    def errors(states: dict[str, torch.Tensor]) -> list[float]:
        kept = record.states["layer_2"].float()
        return [((kept - states[name]).norm() / kept.norm()).item() for name in ("layer_2", "layer_3")]

    blurred, sharp = errors(references), errors(reader.as_kept(references))
    assert blurred[0] > 0.015 and blurred[1] < 1.3 * blurred[0]
    assert sharp[0] < 0.003 and sharp[1] > 3 * sharp[0]


def _swap(sample: CapturedSample) -> CapturedSample:
    return replace(sample, sites={"layer_2": sample.sites["layer_5"], "layer_5": sample.sites["layer_2"]})


def test_swapped_names_are_found(probe: Probe, target: Path, store: MakeStore, wire: Wire) -> None:
    code, verdict = probe("store", store(wire(2, 5), plant=_swap), "--target", target)
    assert code == 1 and "layer_2 holds layer_5, 3 layers later" in said(verdict)
    assert "layer_5 holds layer_2, 3 layers earlier" in said(verdict)


@pytest.mark.parametrize(
    ("truly", "words"),
    [
        ("layer_7", "the teacher holds layer_7, and the manifest says final: a layer's input taken for the last"),
        ("final_normed", "training would apply the final norm twice"),
        ("layer_5", "the teacher holds layer_5"),
    ],
)
def test_wrong_teacher_is_found(
    probe: Probe, target: Path, store: MakeStore, wire: Wire, model: Any, truly: str, words: str
) -> None:
    def plant(sample: CapturedSample) -> CapturedSample:
        return replace(sample, final=all_site_states(model, sample.input_ids)[truly].bfloat16())

    code, verdict = probe("store", store(wire(2, 5), plant=plant), "--target", target)
    assert code == 1 and words in said(verdict)


@pytest.mark.parametrize(("step", "words"), [(-1, "one token more"), (1, "one token fewer")])
def test_rows_shifted_by_a_token_are_found(
    probe: Probe, target: Path, store: MakeStore, wire: Wire, step: int, words: str
) -> None:
    def plant(sample: CapturedSample) -> CapturedSample:
        return replace(sample, sites={name: state.roll(step, 0) for name, state in sample.sites.items()})

    code, verdict = probe("store", store(wire(2, 5), plant=plant), "--target", target)
    assert code == 1 and "layer_2 holds layer_2" in said(verdict) and words in said(verdict)


def test_halved_states_are_found(probe: Probe, target: Path, store: MakeStore, wire: Wire) -> None:
    def plant(sample: CapturedSample) -> CapturedSample:
        return replace(sample, sites={name: state / 2 for name, state in sample.sites.items()})

    code, verdict = probe("store", store(wire(2, 5), plant=plant), "--target", target)
    assert code == 1 and "layer_5 is no site" in said(verdict) and "times 1/2" in said(verdict)


def test_noise_cannot_be_told_and_another_target_is_mentioned(
    probe: Probe, target: Path, store: MakeStore, wire: Wire
) -> None:
    def plant(sample: CapturedSample) -> CapturedSample:
        noise = {name: torch.randn(state.shape).bfloat16() for name, state in sample.sites.items()}
        return replace(sample, sites=noise)

    folder = store(wire(2, 5), plant=plant, identity={"weights_fingerprint": "another"})
    code, verdict = probe("store", folder, "--target", target)
    assert code == 2 and "another target: weights_fingerprint differ" in said(verdict)


def test_reader_reads_what_the_writer_wrote(store: MakeStore, wire: Wire) -> None:
    from data_prep.store import Store

    folder = store(wire(2, 5), count=5)
    theirs = Store.open(folder)
    ours = list(StoreReader(folder).spread(5, 1000))
    assert [one.record_id for one in ours] == theirs.record_ids
    for n, record in enumerate(ours):
        sample = theirs[n]
        assert torch.equal(record.input_ids, sample.input_ids) and torch.equal(record.loss_mask, sample.loss_mask)
        assert torch.equal(record.states["final"], sample.final)
        assert all(torch.equal(record.states[name], sample.sites[name]) for name in ("layer_2", "layer_5"))
    cut = next(iter(StoreReader(folder).spread(1, 7)))
    assert len(cut.input_ids) == 7 and cut.states["layer_2"].shape == (7, 64)


def test_records_are_spread_over_the_store(store: MakeStore, wire: Wire) -> None:
    reader = StoreReader(store(wire(2, 5), count=6))
    assert [one.record_id for one in reader.spread(3, 100)] == ["r0", "r2", "r4"]


def test_broken_stores_give_one_line(
    tmp_path: Path, target: Path, store: MakeStore, wire: Wire, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["store", str(tmp_path / "nowhere"), "--target", str(target)]) == 2
    assert capsys.readouterr().err.startswith("error: file not found")
    folder = store(wire(2, 5))
    data = next(folder.glob("*.safetensors"))
    data.write_bytes(data.read_bytes()[:100])
    with pytest.raises(IntegrityError, match="a shard cannot be read"):
        list(StoreReader(folder).spread(1, 9))
    manifest = read_checked(folder / "manifest.json", "")
    write_checked(folder / "manifest.json", manifest | {"version": 7})
    with pytest.raises(IntegrityError, match="version 7"):
        StoreReader(folder)
