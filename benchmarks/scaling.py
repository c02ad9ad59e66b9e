"""What 8 GPUs and several nodes should give, by arithmetic, and where it would break.

    python -m benchmarks.scaling [--nodes 1 2 4 8] [--prepared RUN/prepared] [--lengths 700 0.8]

A step is the slowest process's forward and backward, then the sum of the gradients, then the optimizer. No overlap is
counted, because autograd adds up the K steps' gradients of the one layer and hands them over at the end of backward.
The draft is Kimi-K2.5's preset (conf/conf/kimi_k25.yaml); rates are assumptions, each an option.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.flops import Work, step_flops
from benchmarks.gpu.synthetic import KIMI
from benchmarks.imbalance import imbalance, long_tailed
from data_prep.budget import bytes_per_token
from data_prep.store.manifest import TOKEN_BYTES
from eagle3.atomic import write_json
from eagle3.command_line import Parser, one_line_errors
from eagle3.config import STATE_CODECS, require
from eagle3.draft_shape import DraftShape
from eagle3.wiring import Wiring
from train.front.estimate import flops_per_token
from train.front.rounds import prepared_lengths
from train.hardware import HardwareConfig
from train.memory import trained_parameters

STEP_BYTES = (
    30  # a parameter's in AdamW: gradient, master weight and two moments read, the three and the weight written
)


EXAMPLES = """
python -m benchmarks.scaling
python -m benchmarks.scaling --nodes 1 2 4 8 --prepared RUN/prepared --mfu 0.4
"""


@dataclass(frozen=True)
class Links:
    """How fast GPUs reach one another and their own memory: assumptions, in GB/s (10^9 bytes) one way.

    Args:
        nvlink: of one GPU within a node, as reached (450 on the data sheet of H100 and H200).
        cards: network cards of a node.
        card: of one card, as reached (50 on the data sheet of 400 Gb/s).
        hop_us: microseconds that each hop of a ring costs beside its bytes.
        memory: of a GPU's own memory, as reached.
    """

    nvlink: float = 350.0
    cards: int = 8
    card: float = 40.0
    hop_us: float = 10.0
    memory: float = 3500.0

    def ring(self, gpus: int, per_node: int) -> float:
        """GB/s of a ring over all GPUs: within a node NVLink, over nodes the cards of one node together if less."""
        return self.nvlink if gpus <= per_node else min(self.nvlink, self.cards * self.card)


@dataclass(frozen=True)
class StepTime:
    """One optimizer step.

    Args:
        gpus, samples: in all.
        compute: seconds of the process with the mean load.
        uneven: rows of the fullest process over the mean.
        network: seconds of summing gradients and gathering weights.
        optimizer: seconds of AdamW on a process's share.
        tokens: of the step, over all processes.
    """

    gpus: int
    samples: int
    compute: float
    uneven: float
    network: float
    optimizer: float
    tokens: float

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return self.compute * self.uneven + self.network + self.optimizer

    @property
    def efficiency(self) -> float:
        """Share of the time in which the mean process computes."""
        return self.compute / self.seconds

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able form."""
        return {**asdict(self), "seconds": self.seconds, "efficiency": self.efficiency, "tokens_per_second": self.rate}


def moved_bytes(parameters: int, stage: int, gpus: int, steps: int, element: int = 2) -> tuple[float, float]:
    """Bytes that each GPU sends in a step, at least and at most.

    A ring's sum of S bytes sends 2 (n - 1) / n x S: half to reduce each part where it belongs, half to spread the sums.
    Stage 0 sums gradients; 1 and 2 reduce them to their owners and spread the new weights: the same bytes. Stage 3
    reduces them, and gathers the weights for forward and for backward: once each where they are kept from one unrolled
    step to the next, else K times each.
    """
    part = (gpus - 1) / gpus * parameters * element
    return (2 * part, 2 * part) if stage < 3 else (3 * part, (1 + 2 * steps) * part)


def step_time(
    shape: DraftShape,
    steps: int,
    machine: HardwareConfig,
    links: Links,
    lengths: Sequence[int],
    gpus: int,
    samples: int,
    drawn: bool = False,
) -> StepTime:
    """A step at ZeRO 1 or 2.

    Args:
        shape, steps: the draft and K.
        machine, links: assumptions.
        lengths: rows of the conversations.
        gpus: processes.
        samples: of a step, over all of them.
        drawn: conversations handed out in the order drawn, instead of dealt by length.
    """
    mean = sum(lengths) / len(lengths)
    count = sum(trained_parameters(shape).values())
    compute = flops_per_token(shape, steps)[0] * mean * samples / gpus / (machine.gpu_tflops * 1e12 * machine.train_mfu)
    sent = moved_bytes(count, 1, gpus, steps)[1]
    hops = 2 * (gpus - 1) * links.hop_us * 1e-6
    return StepTime(
        gpus=gpus,
        samples=samples,
        compute=compute,
        uneven=imbalance(lengths, gpus, samples, drawn=drawn).mean if gpus > 1 else 1.0,
        network=sent / (links.ring(gpus, machine.gpus_per_node) * 1e9) + (hops if gpus > 1 else 0.0),
        optimizer=count * STEP_BYTES / gpus / (links.memory * 1e9),
        tokens=mean * samples,
    )


def _table(title: str, headings: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left", no_wrap=True)
    return table


def speed_table(title: str, rows: Sequence[tuple[StepTime, StepTime]], token_bytes: int, per_node: int) -> Table:
    """One line a number of GPUs; the last columns with conversations handed out in the order drawn."""
    headings = [
        "GPUs",
        "samples",
        "compute",
        "uneven",
        "network",
        "AdamW",
        "tok/s",
        "efficiency",
        "GB/s a node",
        "as drawn",
    ]
    table = _table(title, [*headings, "tok/s"])
    for found, drawn in rows:
        node = found.rate * token_bytes / max(1, found.gpus / per_node) / 1e9
        cells = [f"{found.samples:,}", f"{1000 * found.compute:,.0f} ms", f"x {found.uneven:.2f}"]
        cells += [f"{1000 * found.network:.1f} ms", f"{1000 * found.optimizer:.1f} ms", f"{found.rate:,.0f}"]
        cells += [f"{found.efficiency:.0%}", f"{node:.1f}", f"{drawn.efficiency:.0%}", f"{drawn.rate:,.0f}"]
        table.add_row(str(found.gpus), *cells)
    return table


def share_table(steps: Sequence[int], rows: Sequence[int]) -> Table:
    """What a step at Kimi-K2.5's sizes is made of, by operations; every row of one document supervised."""
    parts = ("fc", "layer", "words", "attention", "head", "teacher")
    table = _table("shares of a step's operations", ["rows, K, Vd", "GFLOP a row", *parts])
    for length in rows:
        for count in steps:
            for words in KIMI.draft_vocabs:
                flops = step_flops(KIMI.shape(draft_vocab=words), whole_work(length, count))
                cells = [
                    f"{flops['total'] / length / 1e9:.1f}",
                    *(f"{flops[part] / flops['total']:.0%}" for part in parts),
                ]
                table.add_row(f"{length:,}, {count}, {words:,}", *cells)
    return table


def whole_work(rows: int, steps: int) -> Work:
    """Of one document whose every row asks in every step, its end apart."""
    every = (rows,) * steps
    return Work(rows, every, (rows * (rows + 1) // 2,) * steps, every, rows, rows, rows)


def stage_table(parameters: int, steps: int, machine: HardwareConfig, links: Links, gpus: Sequence[int]) -> Table:
    """What each ZeRO stage sends."""
    table = _table("a GPU sends each step, and how long that takes", ["GPUs", "ZeRO 0, 1, 2", "", "ZeRO 3", ""])
    for count in gpus:
        if count == 1:
            continue
        ring, cells = links.ring(count, machine.gpus_per_node) * 1e9, []
        for stage in (1, 3):
            least, most = moved_bytes(parameters, stage, count, steps)
            same = least == most
            cells += [f"{least / 1e9:.1f}" + ("" if same else f"-{most / 1e9:.1f}") + " GB"]
            cells += [f"{1000 * least / ring:.0f}" + ("" if same else f"-{1000 * most / ring:.0f}") + " ms"]
        table.add_row(str(count), *cells)
    return table


def codec_table(found: StepTime, wiring: Wiring, machine: HardwareConfig) -> Table:
    """What a node's loader must read under each codec, to keep up with one whole node."""
    table = _table("what one node must read", ["codec", "B a token", "GB/s", f"of {machine.disk_read_gbps:g}"])
    for codec in STATE_CODECS:
        size = bytes_per_token(wiring, codec).high + TOKEN_BYTES
        need = found.rate * size / 1e9
        table.add_row(codec, f"{size:,}", f"{need:.2f}", f"{need / machine.disk_read_gbps:.0%}")
    return table


def extraction_table(wiring: Wiring, machine: HardwareConfig, active: float, nodes: Sequence[int]) -> Table:
    """Workers share nothing but claims, so tokens grow with nodes until the disks do not."""
    headings = ["nodes", "tok/s", "raw, GB/s", "int8, GB/s", f"in {machine.disk_write_gbps:g} GB/s"]
    table = _table("extraction by several nodes", headings)
    each = machine.gpus_per_node * machine.gpu_tflops * 1e12 * machine.prefill_mfu / (2 * active)
    for count in nodes:
        sizes = [bytes_per_token(wiring, codec).high * each * count / 1e9 for codec in ("raw", "int8")]
        fits = (
            "yes"
            if sizes[0] <= machine.disk_write_gbps
            else ("as int8" if sizes[1] <= machine.disk_write_gbps else "no")
        )
        table.add_row(str(count), f"{each * count:,.0f}", *(f"{size:.2f}" for size in sizes), fits)
    return table


def uneven_table(named: dict[str, Sequence[int]], cases: Sequence[tuple[int, int]]) -> Table:
    """Rows of the fullest process over the mean of all."""
    headings = ["GPUs, samples a step", *(heading for name in named for heading in (name, "as drawn"))]
    table = _table("rows of the fullest process over the mean: over steps (95th percentile)", headings)
    for gpus, samples in cases:
        cells = []
        for lengths in named.values():
            for found in (imbalance(lengths, gpus, samples, drawn=drawn) for drawn in (False, True)):
                cells.append(f"{found.mean:.2f} ({found.high:.2f})")
        table.add_row(f"{gpus}, {samples}", *cells)
    return table


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    machine, links = HardwareConfig(), Links()
    parser = Parser(
        prog="python -m benchmarks.scaling",
        description=(__doc__ or "").splitlines()[0],
        examples=EXAMPLES,
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 4, 8], help="numbers of machines")
    parser.add_argument("--steps", type=int, default=4, help="unrolled steps K")
    parser.add_argument("--draft-vocab", type=int, default=KIMI.draft_vocabs[0], help="draft.vocab_size")
    parser.add_argument("--samples", type=int, default=8, help="samples of a step for each GPU")
    parser.add_argument("--batch", type=int, default=64, help="samples of a step where the global batch stays")
    parser.add_argument(
        "--lengths", type=float, nargs=2, default=[700.0, 0.8], help="median and spread of random lengths"
    )
    parser.add_argument("--longest", type=int, default=2048, help="where random lengths are cut")
    parser.add_argument("--prepared", type=Path, help="take the lengths of this prepared set as well")
    parser.add_argument("--gpus-per-node", type=int, default=machine.gpus_per_node, help="of one machine")
    parser.add_argument("--tflops", type=float, default=machine.gpu_tflops, help="of one GPU, by its data sheet")
    parser.add_argument("--mfu", type=float, default=machine.train_mfu, help="share of it that training reaches")
    parser.add_argument("--read-gbps", type=float, default=machine.disk_read_gbps, help="GB/s that a node reads")
    parser.add_argument("--nvlink", type=float, default=links.nvlink, help="GB/s of a GPU within a node")
    parser.add_argument("--cards", type=int, default=links.cards, help="network cards of a node")
    parser.add_argument("--card", type=float, default=links.card, help="GB/s of a card")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder for scaling.json")
    return parser.parse_args(argv)


def reckon(args: argparse.Namespace) -> tuple[list[Table], dict[str, Any]]:
    """Every table, and the step times as JSON."""
    machine = HardwareConfig(
        gpus_per_node=args.gpus_per_node, gpu_tflops=args.tflops, train_mfu=args.mfu, disk_read_gbps=args.read_gbps
    )
    machine.validate()
    links = Links(nvlink=args.nvlink, cards=args.cards, card=args.card)
    shape, wiring = KIMI.shape(draft_vocab=args.draft_vocab), Wiring.native("kimi_k25", 61, KIMI.hidden)
    count = sum(trained_parameters(shape).values())
    lengths = long_tailed(100_000, args.lengths[0], args.lengths[1], args.longest)
    per_node = machine.gpus_per_node
    gpus = [1, *(per_node * nodes for nodes in args.nodes)]

    def both(size: int, samples: int) -> tuple[StepTime, StepTime]:
        told = (shape, args.steps, machine, links, lengths, size, samples)
        return step_time(*told), step_time(*told, drawn=True)

    raw = bytes_per_token(wiring, "raw").high + TOKEN_BYTES
    grows = [both(size, args.samples * size) for size in gpus]
    stays = [both(size, args.batch) for size in gpus if args.batch % size == 0]
    named: dict[str, Sequence[int]] = {"random lengths": lengths}
    if args.prepared:
        named["prepared"] = prepared_lengths(args.prepared, "train")
    node = next((pair[0] for pair in grows if pair[0].gpus == per_node), grows[-1][0])
    cases = [(size, args.samples * size) for size in gpus if size > 1] + [
        (size, args.batch) for size in gpus if size > 1
    ]
    tables = [
        speed_table(f"{args.samples} samples a GPU: the global batch grows", grows, raw, per_node),
        speed_table(f"{args.batch} samples a step, however many GPUs", stays, raw, per_node),
        stage_table(count, args.steps, machine, links, gpus),
        codec_table(node, wiring, machine),
        uneven_table(named, [case for case in dict.fromkeys(cases) if case[1] % case[0] == 0]),
        extraction_table(wiring, machine, 32e9, args.nodes),
        share_table(KIMI.steps, (2048, 4096, 16384)),
    ]
    told = {
        "assumptions": {**asdict(machine), **asdict(links), "lengths": args.lengths, "longest": args.longest},
        "draft": {"parameters": count, "flops_per_token": flops_per_token(shape, args.steps)[0], "K": args.steps},
        "grows": [[one.to_dict() for one in pair] for pair in grows],
        "stays": [[one.to_dict() for one in pair] for pair in stays],
    }
    return tables, told


@one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 2 on an expected failure, told in one line."""
    args = parse(argv)
    for name in ("nodes", "samples", "batch", "steps"):
        value = getattr(args, name)
        positive = min(value if isinstance(value, list) else [value]) > 0
        require(positive, f"--{name}", value, "positive integers")
    tables, told = reckon(args)
    console = Console(width=130, highlight=False)
    for table in tables:
        console.print(table)
        console.print()
    write_json(args.out / "scaling.json", told)
    print(f"written: {args.out / 'scaling.json'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
