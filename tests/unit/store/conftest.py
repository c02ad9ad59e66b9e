from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from data_prep.capture.sample import CapturedSample
from data_prep.store import StoreManifest
from eagle3.wiring import Site, Wiring

H = 8


@pytest.fixture
def wiring() -> Wiring:
    return Wiring((Site(3), Site(1), Site(0)), "final", "llama", 6, H)


@pytest.fixture
def manifest(wiring: Wiring) -> StoreManifest:
    target = {"name": "Tiny", "weights_fingerprint": "aa", "num_layers": 6}
    return StoreManifest(wiring, target, "tok" * 8, "tpl" * 8, capture={"backend": "hf", "compute_dtype": "float32"})


@pytest.fixture
def make_sample() -> Callable[..., CapturedSample]:
    def make(record_id: str, tokens: int = 5, seed: int = 0) -> CapturedSample:
        gen = torch.Generator().manual_seed(seed + sum(record_id.encode()) * 1000 + tokens)
        state = {name: torch.randn(tokens, H, generator=gen).bfloat16() for name in ("layer_3", "layer_1", "final")}
        ids = torch.randint(0, 64, (tokens,), generator=gen)
        mask = torch.rand(tokens, generator=gen) > 0.5
        return CapturedSample(record_id, ids, mask, state, state.pop("final"), "final")

    return make
