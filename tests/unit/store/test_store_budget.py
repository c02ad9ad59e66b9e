"""The plan's numbers are those that the run then costs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from data_prep.budget import bytes_per_token, check_space, state_bytes_per_token
from data_prep.capture.sample import CapturedSample
from data_prep.store import StoreManifest, StoreWriter
from data_prep.store.manifest import TOKEN_BYTES
from eagle3.errors import RedraftError
from eagle3.sizes import size_text
from eagle3.state_codec import CODECS
from eagle3.wiring import Site, Wiring


def kimi(*layers: int) -> Wiring:
    return Wiring(tuple(Site(k) for k in layers), "final", "kimi_k25", 61, 7168)


def test_kimi_matches_the_published_cost() -> None:
    assert state_bytes_per_token(kimi(3, 31, 59)) == 57344
    assert state_bytes_per_token(kimi(0, 3, 31)) == 43008  # the embedding costs nothing
    assert size_text(bytes_per_token(kimi(3, 31, 59)).high * 2048 * 100_000) == "11.74 TB"  # published: 11.7


def test_the_store_is_as_large_as_planned(
    tmp_path: Path, manifest: StoreManifest, make_sample: Callable[..., CapturedSample]
) -> None:
    lengths = [5, 9, 40, 3]
    with StoreWriter(tmp_path, manifest, 1000) as writer:
        for i, tokens in enumerate(lengths):
            writer.append(make_sample(f"r{i}", tokens))
        writer.finalize()
    data = (tmp_path / "shard-0-00000.safetensors").read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    assert sum(lengths) * (bytes_per_token(manifest.wiring).high + TOKEN_BYTES) == len(data) - header


def test_too_small_a_disk_is_refused(tmp_path: Path) -> None:
    check_space(tmp_path, 0)
    with pytest.raises(RedraftError, match=r"not enough disk space.*11\.70 TB still to be written"):
        check_space(tmp_path / "later", 11_700_000_000_000)


@pytest.mark.parametrize("codec", ["raw", "fp8"])
def test_bytes_a_token_under_a_codec_are_those_it_writes(codec: str) -> None:
    wiring = Wiring((Site(1), Site(2)), "final", "llama", 6, 256)
    told = bytes_per_token(wiring, codec)
    written = sum(part.nbytes for part in CODECS[codec].encode(torch.randn(10, 256).bfloat16()))
    assert told.low == told.high == 3 * written // 10


def test_bytes_a_token_of_kimi() -> None:
    raw, fp8, lossless = (bytes_per_token(kimi(3, 31, 59), codec) for codec in ("raw", "fp8", "lossless"))
    assert raw.high == 57_344 and raw.formula == "4 x 7,168 x 2"
    assert fp8.high == 4 * (7168 + 2 * 7168 // 128)
    assert fp8.high < lossless.low < lossless.high < raw.high
