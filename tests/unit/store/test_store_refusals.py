"""A reader refuses a store that was made for something else, and says what differs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from data_prep.capture.sample import CapturedSample
from data_prep.standardize import standardize
from data_prep.store import Store, StoreManifest, StoreWriter
from eagle3.checked_json import read_checked, write_checked
from eagle3.errors import IntegrityError, RedraftError, WiringError
from eagle3.wiring import Site, Wiring


@pytest.fixture
def store(tmp_path: Path, manifest: StoreManifest, make_sample: Callable[..., CapturedSample]) -> Path:
    with StoreWriter(tmp_path / "s", manifest, 9) as writer:
        for i in range(4):
            writer.append(make_sample(f"r{i}", 4 + i))
        writer.finalize()
    return tmp_path / "s"


def other(*layers: int, teacher: str = "final", n: int = 6) -> Wiring:
    return Wiring(tuple(Site(k) for k in layers), teacher, "llama", n, 8)


def test_what_fits_opens(store: Path, manifest: StoreManifest) -> None:
    opened = Store.open(
        store,
        wiring=manifest.wiring,
        target=manifest.target,
        tokenizer_hash=manifest.tokenizer_hash,
        template_hash=manifest.template_hash,
    )
    assert len(opened) == 4


def test_another_wiring(store: Path) -> None:
    with pytest.raises(
        WiringError, match=r"slot 0 holds layer 3; expected layer 4.*extract again with this wiring \(docs"
    ):
        Store.open(store, wiring=other(4, 1, 0))
    with pytest.raises(WiringError, match="teacher is 'final'; expected 'final_normed'"):
        Store.open(store, wiring=other(3, 1, 0, teacher="final_normed"))


def test_a_reordered_wiring_is_read_by_name_only_when_asked(store: Path) -> None:
    swapped = other(1, 3)
    with pytest.raises(WiringError, match=r"slot 0 holds layer 3; expected layer 1.*accept_other_wiring=true"):
        Store.open(store, wiring=swapped)
    sample = Store.open(store, wiring=swapped, accept_other_wiring=True)[2]
    row = standardize(sample, swapped).features[0]
    assert torch.equal(row, torch.cat([sample.sites["layer_1"][0], sample.sites["layer_3"][0]]))
    only = Store.open(store, wiring=other(1), accept_other_wiring=True)[2]
    assert list(only.sites) == ["layer_1"]  # nothing is read that is not needed


def test_accepting_another_wiring_has_limits(store: Path) -> None:
    with pytest.raises(WiringError, match=r"lacks a site.*no layer_4; it holds layer_3, layer_1"):
        Store.open(store, wiring=other(4, 1), accept_other_wiring=True)
    for wiring in (other(3, 1, 0, teacher="final_normed"), other(3, 1, 0, n=12)):
        with pytest.raises(WiringError, match="another wiring"):
            Store.open(store, wiring=wiring, accept_other_wiring=True)


def test_another_target_tokenizer_or_template(store: Path, manifest: StoreManifest) -> None:
    with pytest.raises(RedraftError, match=r"another target.*weights_fingerprint is 'aa', expected 'zz'"):
        Store.open(store, target={**manifest.target, "weights_fingerprint": "zz"})
    with pytest.raises(RedraftError, match="quantization is None, expected 'int4'"):
        Store.open(store, target={**manifest.target, "quantization": "int4"})
    with pytest.raises(RedraftError, match=r"another tokenizer.*expected other"):
        Store.open(store, tokenizer_hash="other")
    with pytest.raises(RedraftError, match=r"another chat template.*expected other"):
        Store.open(store, template_hash="other")


def test_no_store_and_unfinished_store(tmp_path: Path, manifest: StoreManifest) -> None:
    with pytest.raises(IntegrityError, match=r"file not found.*run the extract stage"):
        Store.open(tmp_path / "nowhere")
    with StoreWriter(tmp_path, manifest, 9) as writer:
        writer.flush()
    with pytest.raises(RedraftError, match=r"not finished.*0 records so far"):
        Store.open(tmp_path)
    assert len(Store.open(tmp_path, unfinished=True)) == 0


def test_a_store_of_another_version(store: Path) -> None:
    path = store / "manifest.json"
    write_checked(path, {**read_checked(path, ""), "version": 99})
    with pytest.raises(IntegrityError, match="version 99, expected 'redraft-store' 1 or 2"):
        Store.open(store)
