"""Where a prompt set's records come from: a JSON lines file (plain or gzipped), or an HF dataset."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3.errors import DataError
from eval.benchmarks import BENCHMARKS, Benchmark

MAX_BYTES = 1 << 30  # of a file of prompts, once decompressed
PUBLISHED_NAMES = {"test", "train", "question", "data", "prompts"}  # file names that say nothing of the set


@dataclass(frozen=True)
class Source:
    """One entry of `eval.prompt_sets`: `FILE`, `SET:FILE` or `SET:hf:NAME` (a saved folder, or a name on the hub).

    Args:
        entry: as written.
        benchmark: the published form it is in; None = our own, `{"id", "messages"}`.
        hub: `place` is an HF dataset rather than a file.
        place: file, folder or name.
    """

    entry: str
    benchmark: Benchmark | None
    hub: bool
    place: str

    @classmethod
    def parse(cls, entry: str) -> Source:
        """Take an entry apart; a path that happens to begin with a set's name and a colon is not one."""
        head, colon, rest = entry.partition(":")
        benchmark = BENCHMARKS.get(head.lower()) if colon else None
        if benchmark is None:
            return cls(entry, None, False, entry)
        hub = rest.startswith("hf:")
        return cls(entry, benchmark, hub, rest.removeprefix("hf:"))

    @property
    def name(self) -> str:
        """The set's name in tables: the file's stem, with the benchmark's name in front where the stem lacks it."""
        stem = Path(self.place.rstrip("/")).name.removesuffix(".gz").removesuffix(".jsonl").removesuffix(".json")
        if self.benchmark is None:
            return Path(self.place).stem
        if stem.lower() in PUBLISHED_NAMES:
            return self.benchmark.name
        plain = "".join(letter for letter in stem.lower() if letter.isalnum())
        return stem if self.benchmark.name in plain else f"{self.benchmark.name}-{stem}"

    def records(self) -> Iterator[tuple[str, int, Any]]:
        """`(where, number from 1, record)`, one by one.

        Raises:
            DataError: the place cannot be read, or a line is not JSON; naming file and line.
        """
        return self._dataset_records() if self.hub else self._file_records()

    def _file_records(self) -> Iterator[tuple[str, int, Any]]:
        for number, line in enumerate(self._lines(), start=1):
            if not line.strip():
                continue
            where = f"{self.place}, line {number}"
            try:
                yield where, number, _decoded(line)
            except (ValueError, RecursionError) as err:
                raise DataError("not a JSON line", where=where, why=str(err), mend=f"write {self.shape}") from None

    @property
    def shape(self) -> str:
        """What a line must look like."""
        if self.benchmark is not None:
            return f"{self.benchmark.shape} on one line"
        return '{"id": "...", "messages": [{"role": "user", "content": "..."}]} on one line'

    def _lines(self) -> list[str]:
        path = Path(self.place)
        try:
            opened = gzip.open if path.suffix == ".gz" else open
            with opened(path, "rb") as handle:
                raw = handle.read(MAX_BYTES + 1)
            if len(raw) > MAX_BYTES:
                raise OSError(f"it holds more than {MAX_BYTES >> 20:,} MiB of prompts")
            return raw.decode("utf-8").split("\n")
        except (OSError, EOFError, zlib.error, UnicodeDecodeError) as err:
            mend = "check eval.prompt_sets"
            head = self.entry.partition(":")[0]
            if self.benchmark is None and ":" in self.entry and "/" not in head:
                mend += f"; sets known by name are {', '.join(BENCHMARKS)}, as SET:FILE or SET:hf:NAME"
            raise DataError("cannot read the prompt set", where=self.entry, why=str(err), mend=mend) from None

    def _dataset_records(self) -> Iterator[tuple[str, int, Any]]:
        for number, record in enumerate(self._dataset(), start=1):
            yield f"{self.place}, record {number}", number, record

    def _dataset(self) -> Any:
        from datasets import DatasetDict, load_dataset, load_from_disk

        assert self.benchmark is not None
        split = self.benchmark.split
        try:
            if Path(self.place).is_dir():
                found = load_from_disk(self.place)
                return found[split] if isinstance(found, DatasetDict) else found
            return load_dataset(self.place, self.benchmark.config, split=split)
        except Exception as err:  # datasets raises its own, the hub's and the network's errors
            raise DataError(
                "cannot load the prompt set",
                where=self.entry,
                why=str(err).strip("'"),
                mend=f"give a saved folder or a hub name with split {split!r} (HF_HUB_OFFLINE=0 lets it be fetched), "
                f"or the published file as {self.benchmark.name}:FILE",
            ) from None


def _decoded(line: str) -> Any:
    """The JSON value of a line. Raises ValueError, of a lone surrogate too, and RecursionError."""
    value = json.loads(line)
    json.dumps(value, ensure_ascii=False).encode("utf-8")
    return value
