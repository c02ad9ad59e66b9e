"""What an extracting process of the crash tests runs; importable, so that a fork server can start it quickly."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from datasets import load_from_disk

from data_prep.capture.hf import HFCapture
from data_prep.capture.sample import CapturedSample
from data_prep.extract import Extracted, Sharing, extract
from data_prep.store import StoreManifest
from eagle3.wiring import Site, Wiring

WIRING = Wiring((Site(0), Site(2), Site(4)), "final", "llama", 6, 16)


class Slowed:
    """The real capture, with a pause before each batch so that a test can strike in the middle."""

    def __init__(self, capture: HFCapture, pause: float) -> None:
        self.capture, self.pause = capture, pause

    def run(self, batch: Any) -> list[CapturedSample]:
        time.sleep(self.pause)
        return self.capture.run(batch)


def run(model: Path, prepared: Path, store: Path, pause: float = 0.0, sharing: Sharing | None = None) -> Extracted:
    torch.set_num_threads(1)
    capture = HFCapture(model, WIRING, device="cpu")
    manifest = StoreManifest(WIRING, {"name": "tiny"}, "tok", "tpl", capture=capture.info)
    rows = load_from_disk(str(prepared))
    return extract(rows, Slowed(capture, pause), store, manifest, 64, 128, sharing=sharing or Sharing(poll_s=0.05))
