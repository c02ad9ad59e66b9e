"""How fast a store is filled when the states cost nothing: what the writers of an extraction can take.

    python -m benchmarks.writers [--store RUN/store] [--writers 1 2 4]

A stand-in for the target hands out the same states again and again, under new names; everything after it is
`data_prep.extract`: checks, encoding, checksums, shards flushed to disk, the seal. A target that makes fewer bytes a
second than this, on cores of its own, does not wait for its writers.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from datasets import Dataset
from rich import box
from rich.table import Table

from benchmarks.side_by_side import machine, machine_line, publish
from data_prep.capture.sample import CapturedSample
from data_prep.extract import Writing, extract
from data_prep.store import Store, StoreManifest
from eagle3.command_line import Parser, one_line_errors
from eagle3.config import STATE_CODECS, require
from eagle3.wiring import Wiring

EXAMPLES = """
python -m benchmarks.writers
python -m benchmarks.writers --store RUN/store --documents 40 --writers 1 2 4
"""


def random_samples(documents: int, tokens: int, hidden: int) -> tuple[Wiring, list[CapturedSample]]:
    """States with channels of unlike size, as residual streams have; they compress about as real ones do."""
    wiring = Wiring.native("llama", 32, hidden)
    generator = torch.Generator().manual_seed(0)
    scale = torch.randn(hidden, generator=generator).exp()
    samples = []
    for i in range(documents):
        states = {
            name: (torch.randn(tokens, hidden, generator=generator) * scale).bfloat16()
            for name in (*(site.name for site in wiring.stored_sites), "final")
        }
        mask = torch.ones(tokens, dtype=torch.bool)
        samples.append(CapturedSample(f"s{i}", torch.arange(tokens), mask, states, states.pop("final"), wiring.teacher))
    return wiring, samples


def stored_samples(path: Path, documents: int) -> tuple[Wiring, list[CapturedSample]]:
    """The first records of a store."""
    store = Store.open(path)
    return store.manifest.wiring, [store[i] for i in range(min(documents, len(store)))]


class Ready:
    """A capture backend whose states are there already.

    Args:
        samples: handed out in turns.
        copies: how often each is, under names of its own.
    """

    def __init__(self, samples: Sequence[CapturedSample], copies: int) -> None:
        self.samples = {f"{sample.record_id}/{copy}": sample for copy in range(copies) for sample in samples}

    def rows(self) -> Dataset:
        """The prepared records that it answers for."""
        return Dataset.from_dict(
            {
                "record_id": list(self.samples),
                "input_ids": [sample.input_ids.tolist() for sample in self.samples.values()],
                "loss_mask": [sample.loss_mask.tolist() for sample in self.samples.values()],
            }
        )

    def run(self, batch: Sequence[Any]) -> list[CapturedSample]:
        """The samples of these records."""
        return [replace(self.samples[name], record_id=name) for name, _, _ in batch]


def seconds(ready: Ready, rows: Dataset, manifest: StoreManifest, writers: int, args: argparse.Namespace) -> float:
    """Seconds to fill a new store, which is removed again."""
    with tempfile.TemporaryDirectory(prefix=".writers-", dir=args.out) as folder:
        start = time.perf_counter()
        writing = Writing(writers, args.ahead_mib)
        extract(rows, ready, Path(folder) / "store", manifest, args.shard_tokens, args.shard_tokens, writing=writing)
        taken = time.perf_counter() - start
        shutil.rmtree(Path(folder) / "store")
    return taken


def as_table(result: dict[str, Any]) -> Table:
    """One line a codec, one column a count of writers."""
    title = f"writers: {result['states']}, {result['mib']:,.0f} MiB of states, shards of {result['shard_mib']:.1f} MiB"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False)
    table.caption, table.caption_justify = machine_line(result["machine"]), "left"
    table.add_column("MB/s of captured states")
    for writers in result["writers"]:
        table.add_column(f"{writers} writer{'s' if writers > 1 else ''}", justify="right")
    for codec, rates in result["rates"].items():
        cells = [f"{median(one):,.0f} ({min(one):,.0f}-{max(one):,.0f})" for one in rates]
        table.add_row(codec, *cells)
    return table


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = Parser(
        prog="python -m benchmarks.writers",
        description=(__doc__ or "").splitlines()[0],
        examples=EXAMPLES,
    )
    parser.add_argument("--store", type=Path, help="a store whose states are written; random ones without it")
    parser.add_argument("--hidden", type=int, default=2048, help="width of random states")
    parser.add_argument("--documents", type=int, default=16, help="different records")
    parser.add_argument("--copies", type=int, default=2, help="how often each is written")
    parser.add_argument("--tokens", type=int, default=256, help="of a random record")
    parser.add_argument("--shard-tokens", type=int, default=1024, help="tokens a shard, and a batch")
    parser.add_argument("--ahead-mib", type=int, default=1024, help="states that may wait")
    parser.add_argument("--codecs", nargs="+", default=list(STATE_CODECS), choices=STATE_CODECS, help="of the store")
    parser.add_argument("--writers", nargs="+", type=int, default=[1, 2, 4], help="shards written at a time")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds, the cases in turns")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder for writers.txt and writers.json")
    return parser.parse_args(argv)


@one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 2 on an expected failure, told in one line."""
    args = parse(argv)
    for name in ("hidden", "documents", "copies", "tokens", "shard_tokens", "rounds"):
        require(getattr(args, name) > 0, f"--{name.replace('_', '-')}", getattr(args, name), "a positive integer")
    require(min(args.writers) > 0, "--writers", args.writers, "positive integers")
    facts = machine(torch.device("cpu"))
    random = lambda: random_samples(args.documents, args.tokens, args.hidden)  # noqa: E731
    wiring, samples = stored_samples(args.store, args.documents) if args.store else random()
    ready = Ready(samples, args.copies)
    rows = ready.rows()
    args.out.mkdir(parents=True, exist_ok=True)
    token = (len(wiring.stored_sites) + 1) * wiring.hidden_size * 2
    size = sum(sample.tokens for sample in ready.samples.values()) * token
    manifests = {codec: StoreManifest(wiring, {"name": "none"}, "none", codec=codec) for codec in args.codecs}
    rates: dict[str, list[list[float]]] = {codec: [[] for _ in args.writers] for codec in args.codecs}
    for number in range(args.rounds + 1):  # the first is not counted
        for codec, manifest in manifests.items():
            for place, writers in enumerate(args.writers):
                taken = seconds(ready, rows, manifest, writers, args)
                if number:
                    rates[codec][place].append(size / taken / 1e6)
    result = {
        "machine": facts,
        "states": args.store.name if args.store else f"random states, hidden {args.hidden}",
        "mib": size / 2**20,
        "shard_mib": args.shard_tokens * token / 2**20,
        "writers": args.writers,
        "rates": rates,
    }
    publish(as_table(result), result, args.out, "writers")
    return 0


if __name__ == "__main__":
    sys.exit(main())
