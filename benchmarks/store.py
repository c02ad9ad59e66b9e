"""What each codec of the store costs and saves on real hidden states: bytes, speed, error, the teacher's distribution.

    python -m benchmarks.store --store RUN/store --target PATH

The states are those of a store whose codec is raw or lossless. Each codec writes them to a shard and reads every record
back, in turns with raw. Errors compare what is read with what was stored. KL is that of the teacher's distribution from
what is read, relative to that from what was stored, both through the target's own norm and head.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table
from torch import Tensor

from benchmarks.side_by_side import Pair, machine, machine_line, publish, take_turns
from data_prep.capture.sample import CapturedSample
from data_prep.store import Store
from data_prep.store.shard import Shard, write_shard
from eagle3.command_line import Parser, one_line_errors
from eagle3.config import require
from eagle3.errors import RedraftError
from eagle3.shard_file import ShardFile
from eagle3.state_codec import CODECS, state_bytes
from eagle3.target_weights import TargetWeights

KIMI = (4, 7168)  # states a token and their width, for Kimi-K2.5's three layers and the teacher


EXAMPLES = """
python -m benchmarks.store --store RUN/store --target TARGET --tokens 3000
"""


@dataclass(frozen=True)
class Error:
    """How far what is read is from what was stored.

    Args:
        row: mean relative error of a row, over all states.
        worst_row: its largest.
        worst_channel: the largest relative error of a channel, over all rows of one state.
    """

    row: float
    worst_row: float
    worst_channel: float


class Trial:
    """One codec on one set of records.

    Args:
        codec: its name.
        samples: the records.
        folder: where shards are written.
    """

    def __init__(self, codec: str, samples: Sequence[CapturedSample], folder: Path) -> None:
        self.codec, self.samples, self.folder = codec, samples, folder
        self.sites = list(samples[0].sites)
        self.dtype = str(samples[0].final.dtype).removeprefix("torch.")
        self.shard: Shard | None = None

    def write(self) -> None:
        """Write the shard, flushed to disk, over the last one."""
        path = self.folder / f"shard-{self.codec}.json"
        self.shard = write_shard(path, self.samples, self.sites, self.dtype, self.codec)

    def read(self) -> list[dict[str, Tensor]]:
        """Read every record's states."""
        assert self.shard is not None
        file = ShardFile(self.shard)
        return [file.record(place, [*self.sites, "final"])[2] for place in range(len(self.samples))]

    @property
    def ratio(self) -> float:
        """Bytes of the records over those of raw; the header apart."""
        assert self.shard is not None
        raw = sum((len(s.sites) + 1) * s.final.numel() * s.final.element_size() + 5 * s.tokens for s in self.samples)
        return (self.shard.bytes - self.shard.header_bytes) / raw


def error(samples: Sequence[CapturedSample], read: Sequence[dict[str, Tensor]]) -> Error:
    """Of all states of all records."""
    rows, channels = [], []
    for name in read[0]:
        stored = torch.cat([s.final if name == "final" else s.sites[name] for s in samples]).float()  # [N, H]
        off = torch.cat([states[name] for states in read]).float() - stored  # [N, H]
        rows.append(off.norm(dim=1) / stored.norm(dim=1).clamp_min(1e-30))
        channels.append((off.norm(dim=0) / stored.norm(dim=0).clamp_min(1e-30)).max().item())
    every = torch.cat(rows)
    return Error(every.mean().item(), every.max().item(), max(channels))


class Teacher:
    """The target's distribution from its teacher state."""

    def __init__(self, weights: TargetWeights, normed: bool) -> None:
        self.norm = None if normed else weights.final_norm().float()
        self.head, self.eps = weights.head().float(), weights.rms_norm_eps

    def log_probs(self, state: Tensor) -> Tensor:
        """[T, H] -> [T, V]."""
        x = state.float()
        if self.norm is not None:
            x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.norm
        return (x @ self.head.T).log_softmax(-1)

    def compare(self, samples: Sequence[CapturedSample], read: Sequence[dict[str, Tensor]]) -> dict[str, float]:
        """Mean and 99th percentile of KL in nats a token, and the share of tokens whose most likely token stays."""
        divergence, same = [], []
        for sample, states in zip(samples, read, strict=True):
            before, after = self.log_probs(sample.final), self.log_probs(states["final"])
            divergence.append((before.exp() * (before - after)).sum(-1))
            same.append(before.argmax(-1) == after.argmax(-1))
        every = torch.cat(divergence)
        return {
            "mean": every.mean().item(),
            "p99": every.quantile(0.99).item(),
            "top1": torch.cat(same).float().mean().item(),
        }


def choose(store: Store, tokens: int) -> list[CapturedSample]:
    """The longest records, up to `tokens` tokens and at least one."""
    chosen: list[CapturedSample] = []
    for index in sorted(range(len(store)), key=lambda i: (-store.lengths[i], i)):
        if chosen and sum(sample.tokens for sample in chosen) + store.lengths[index] > tokens:
            break
        chosen.append(store[index])
    return chosen


def measure(samples: Sequence[CapturedSample], teacher: Teacher | None, rounds: int, folder: Path) -> dict[str, Any]:
    """Every codec's figures."""
    raw, cpu = Trial("raw", samples, folder), torch.device("cpu")
    raw.write()
    figures: dict[str, Any] = {}
    for codec in CODECS:
        trial = Trial(codec, samples, folder / codec)
        trial.write()
        read = trial.read()
        figures[codec] = {
            "ratio": trial.ratio,
            "error": asdict(error(samples, read)),
            "kl": teacher.compare(samples, read) if teacher else None,
            "write": take_turns(trial.write, raw.write, rounds, cpu).to_dict(),
            "read": take_turns(trial.read, raw.read, rounds, cpu).to_dict(),
        }
    return figures


def kimi_bytes(codec: str, ratio: float) -> int:
    """Bytes a token at Kimi-K2.5's dimensions, id and mask apart: exact, but for lossless, where `ratio` is taken."""
    states, width = KIMI
    exact = states * state_bytes(codec, "bfloat16", width)
    return round(exact * ratio) if codec == "lossless" else exact


def as_table(result: dict[str, Any]) -> Table:
    """One line a codec."""
    title = f"store codecs: {result['store']}, {result['records']} records, {result['tokens']:,} tokens"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False)
    rates = ", ".join(f"{side} {rate / 1e6:,.0f} MB/s" for side, rate in result["raw_bytes_per_s"].items())
    table.caption = f"raw: {rates}; {machine_line(result['machine'])}"
    table.caption_justify = "left"
    headings = ("", "of raw", "Kimi B/tok", "write", "read", "row err", "channel", "KL", "top 1")
    for heading in headings:
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for codec, one in result["codecs"].items():
        off, kl = one["error"], one["kl"] or {}
        cells = [f"{one['ratio']:.3f}", f"{kimi_bytes(codec, one['ratio']):,}"]
        cells += [f"{one[side]['ratio']:.2f} x" for side in ("write", "read")]
        cells += [f"{off[name]:.2%}" for name in ("row", "worst_channel")]
        cells += [f"{kl['mean']:.1e}", f"{kl['top1']:.1%}"] if kl else ["-"] * 2
        table.add_row(codec, *cells)
    return table


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = Parser(
        prog="python -m benchmarks.store",
        description=(__doc__ or "").splitlines()[0],
        examples=EXAMPLES,
    )
    parser.add_argument("--store", required=True, help="a store, raw or lossless, whose states are taken")
    parser.add_argument("--target", type=Path, help="its target, for the teacher's distribution")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens taken, longest records first")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder for store.txt and store.json")
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, and say on what."""
    require(args.rounds > 0, "--rounds", args.rounds, "a positive integer")
    store = Store.open(args.store, unfinished=True)
    if store.manifest.codec not in ("raw", "lossless"):
        why = f"its codec is {store.manifest.codec}"
        raise RedraftError("the store's states are rounded already", where=args.store, why=why, mend="give a raw one")
    facts, samples = machine(torch.device("cpu")), choose(store, args.tokens)
    normed = store.manifest.wiring.teacher == "final_normed"
    teacher = Teacher(TargetWeights(args.target), normed) if args.target else None
    args.out.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".store-", dir=args.out))  # the disk that a run would use
    try:
        figures = measure(samples, teacher, args.rounds, folder)
    finally:
        shutil.rmtree(folder)
    return {
        "machine": facts,
        "store": str(store.manifest.target.get("name", args.store)),
        "sites": store.sites,
        "records": len(samples),
        "tokens": sum(sample.tokens for sample in samples),
        "raw_bytes_per_s": _rates(figures["raw"], samples),
        "codecs": figures,
    }


def _rates(raw: dict[str, Any], samples: Sequence[CapturedSample]) -> dict[str, float]:
    size = sum((len(s.sites) + 1) * s.final.numel() * s.final.element_size() for s in samples)
    return {side: size / Pair(raw[side]["a"], raw[side]["b"]).medians[0] for side in ("write", "read")}


@one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 2 on an expected failure, told in one line."""
    args = parse(argv)
    result = run(args)
    publish(as_table(result), result, args.out, "store")
    return 0


if __name__ == "__main__":
    sys.exit(main())
