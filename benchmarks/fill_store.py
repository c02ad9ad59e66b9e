"""One whole extraction into a new store, as a call that can be timed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from datasets import Dataset

from data_prep.capture.hf import HFCapture
from data_prep.extract import extract
from data_prep.store import StoreManifest
from eagle3.errors import RedraftError


class FillStore:
    """A call that fills a new store; `clear` removes it again, off the clock.

    Args:
        codec: of the store.
        capture: the loaded target.
        records: columns `record_id`, `input_ids`, `loss_mask`.
        path: of the store.
        batch_tokens, shard_tokens: as in the configuration.
    """

    def __init__(
        self,
        codec: str,
        capture: HFCapture,
        records: dict[str, list[Any]],
        path: Path,
        batch_tokens: int,
        shard_tokens: int,
    ) -> None:
        self.capture, self.prepared, self.path = capture, Dataset.from_dict(records), path
        self.sizes = (batch_tokens, shard_tokens)
        self.manifest = StoreManifest(capture.wiring, {"name": "benchmark"}, "none", codec=codec, capture=capture.info)

    def __call__(self) -> None:
        done = extract(self.prepared, self.capture, self.path, self.manifest, *self.sizes)
        if not done.complete or done.records != len(self.prepared):
            raise RedraftError(
                "the extraction is not whole",
                why=f"{done.records} of {len(self.prepared)} records",
                mend="run it again",
            )

    def clear(self) -> int:
        """Remove the store; the bytes of its shards."""
        size = sum(path.stat().st_size for path in self.path.rglob("*.safetensors"))
        shutil.rmtree(self.path)
        return size
