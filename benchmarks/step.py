"""Time and memory of one training step (forward and backward), beside the plain way of writing it.

    python -m benchmarks.step [--steps 3 7] [--lengths 256 512] [--device cuda]

Both sides get the same weights and data, and their losses must agree before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table

from benchmarks.plain_step import plain_loss
from benchmarks.side_by_side import Pair, machine, machine_line, open_device, publish, take_turns
from eagle3.command_line import Parser, one_line_errors
from eagle3.config import require
from eagle3.draft import DraftShape, Eagle3Draft
from eagle3.errors import RedraftError
from eagle3.ttt import PackedBatch
from eagle3.vocab import build_draft_vocab
from train.losses import TeacherHead, step_weights, supervised_counts, ttt_loss

TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 2e-2}  # relative, on the loss
SIDES = ("plain", "redraft")


EXAMPLES = """
python -m benchmarks.step
python -m benchmarks.step --steps 3 7 --lengths 256 512 --device cuda
"""


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Args:
        steps: unrolled steps K.
        length, documents: rows of a document, documents of a batch.
        hidden, vocab, draft_vocab: H, V, Vd.
        supervised: share of each document's rows to be learnt: its last ones, as an answer follows its prompt.
        device, dtype: where and in what both sides run.
        seed: of weights and data.
    """

    steps: int
    length: int
    documents: int
    hidden: int
    vocab: int
    draft_vocab: int
    supervised: float
    device: str
    dtype: str
    seed: int = 0

    def __post_init__(self) -> None:
        require(self.hidden > 0 and self.hidden % 128 == 0, "--hidden", self.hidden, "a multiple of 128")
        require(0 < self.supervised <= 1, "--supervised", self.supervised, "a share in (0, 1]")
        require(0 < self.draft_vocab <= self.vocab, "--draft-vocab", self.draft_vocab, f"1 to {self.vocab}")
        require(self.length > self.steps > 0, "--steps", self.steps, "positive and below the length of a document")


def random_draft(case: Case) -> Eagle3Draft:
    """A random draft: heads of 64, two query heads a key head, an MLP of 3 H, three aux sites."""
    heads = case.hidden // 64
    draft = Eagle3Draft(
        DraftShape(
            hidden_size=case.hidden,
            intermediate_size=3 * case.hidden,
            num_attention_heads=heads,
            num_key_value_heads=heads // 2,
            head_dim=64,
            vocab_size=case.vocab,
            draft_vocab_size=case.draft_vocab,
            num_aux=3,
            rms_norm_eps=1e-5,
            rope={"rope_theta": 10000.0},
            max_position_embeddings=4096,
        )
    )
    if not draft.shape.full_vocab:
        vocab = build_draft_vocab(torch.randint(0, 100, (case.vocab,)), case.draft_vocab)
        draft.d2t.copy_(vocab.d2t)
        draft.t2d.copy_(vocab.t2d)
    return draft.to(case.device, getattr(torch, case.dtype))


def random_teacher(case: Case, draft: Eagle3Draft) -> TeacherHead:
    """A random head that seldom prefers a token outside the draft's vocabulary, as a real one."""
    head = torch.randn(case.vocab, case.hidden) / case.hidden**0.5
    head[~draft.t2d.cpu()] *= 0.1
    return TeacherHead(torch.ones(case.hidden), head, 1e-5).to(case.device, getattr(torch, case.dtype))


def random_batch(case: Case) -> PackedBatch:
    """Documents of one length, their last rows supervised (but the very last, which has nothing to predict)."""
    rows = case.documents * case.length
    mask = torch.zeros(case.documents, case.length, dtype=torch.bool)
    mask[:, case.length - max(2, round(case.supervised * case.length)) : -1] = True
    batch = PackedBatch(
        features=torch.randn(rows, 3 * case.hidden),
        token_ids=torch.randint(0, case.vocab, (rows,)),
        teacher=torch.randn(rows, case.hidden),
        loss_mask=mask.flatten(),
        doc_lengths=[case.length] * case.documents,
    )
    return batch.to(case.device, getattr(torch, case.dtype))


def make_sides(case: Case) -> tuple[dict[str, Callable[[], float]], int]:
    """Both sides on the same weights and data, each a call that returns its loss; and the supervised tokens."""
    torch.manual_seed(case.seed)
    draft = random_draft(case)
    teacher, batch = random_teacher(case, draft), random_batch(case)
    counts = supervised_counts(batch, case.steps)
    weights = step_weights(counts, 0.8)

    def run(loss_of: Callable[[], torch.Tensor]) -> float:
        draft.zero_grad()
        loss = loss_of()
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    arranged = teacher.arranged(draft)  # as training does, once
    return {
        "plain": lambda: run(lambda: plain_loss(draft, batch, teacher, weights)[0]),
        "redraft": lambda: run(lambda: ttt_loss(draft, batch, arranged, weights).loss),
    }, int(counts[0])


def compare(case: Case, rounds: int) -> tuple[Pair, int, float]:
    """Check that the losses agree, then time; returns plain/redraft seconds, supervised tokens, the loss.

    Raises:
        RedraftError: the losses differ.
    """
    sides, tokens = make_sides(case)
    plain, ours = (sides[name]() for name in SIDES)  # also warms both up
    if not math.isclose(plain, ours, rel_tol=TOLERANCE[case.dtype]):
        raise RedraftError(
            "the two sides' losses differ",
            where=f"{case.steps} steps, documents of {case.length}",
            why=f"plain {plain:.6f}, redraft {ours:.6f}",
            mend="run the tests in tests/unit/draft; nothing was timed",
        )
    return take_turns(sides["plain"], sides["redraft"], rounds, torch.device(case.device)), tokens, ours


def own_memory(case: Case, side: str) -> dict[str, float]:
    """Run one step of one side in this process: its peak in MiB, and how far the step itself raised the mark."""
    run = make_sides(case)[0][side]
    before = _peak(case.device)
    run()
    after = _peak(case.device)
    return {"peak": after, "step": after - before}


def _peak(device: str) -> float:
    """MiB: the process's peak resident size, or on a GPU the peak of what torch has allocated."""
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def memory(case: Case, side: str) -> dict[str, float]:
    """`own_memory` in a process of its own.

    Call it before this process has grown: Linux lets a child start with its parent's mark.

    Raises:
        RedraftError: the process failed.
    """
    command = [sys.executable, "-m", "benchmarks.step", "--memory-of", side, "--case", json.dumps(asdict(case))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise RedraftError(
            "the memory run failed",
            where=f"{side}, {case.steps} steps",
            why=last,
            mend="run it alone to see all of its words",
        )
    return json.loads(done.stdout.splitlines()[-1])


def measure(cases: list[Case], rounds: int) -> list[dict[str, Any]]:
    """Memory of every case first, then the times."""
    peaks = []
    for case in cases:
        print(f"memory: {case.steps} steps, documents of {case.length}", flush=True)
        peaks.append({side: memory(case, side) for side in SIDES})
    rows = []
    for case, peak in zip(cases, peaks, strict=True):
        print(f"time: {case.steps} steps, documents of {case.length}", flush=True)
        pair, tokens, loss = compare(case, rounds)
        rates = {side: tokens / seconds for side, seconds in zip(SIDES, pair.medians, strict=True)}
        rows.append(
            {
                "case": asdict(case),
                "supervised_tokens": tokens,
                "loss": loss,
                "seconds_plain_redraft": pair.to_dict(),
                "tokens_per_second": rates,
                "memory_mib": peak,
            }
        )
    return rows


def as_table(rows: list[dict[str, Any]], facts: dict[str, Any]) -> Table:
    """One line a case."""
    case = rows[0]["case"]
    title = (
        f"training step: hidden {case['hidden']}, vocabulary {case['vocab']}, draft {case['draft_vocab']},\n"
        f"{case['documents']} documents, {case['supervised']:.0%} supervised, {case['dtype']}"
    )
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False)
    table.caption = machine_line(facts) + "\nMiB: peak of a process of its own (of it, added by the step)"
    table.caption_justify = "left"
    for heading in ("K", "length", "tok/s\nplain", "tok/s\nredraft", "times as fast", "MiB\nplain", "MiB\nredraft"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        pair, rates, mib = row["seconds_plain_redraft"], row["tokens_per_second"], row["memory_mib"]
        low, high = pair["spread"]
        table.add_row(
            str(row["case"]["steps"]),
            str(row["case"]["length"]),
            *(f"{rates[side]:,.0f}" for side in SIDES),
            f"{pair['ratio']:.2f} ({low:.2f}-{high:.2f})",
            *(f"{mib[side]['peak']:,.0f} (+{mib[side]['step']:,.0f})" for side in SIDES),
        )
    return table


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = Parser(
        prog="python -m benchmarks.step",
        description=(__doc__ or "").splitlines()[0],
        examples=EXAMPLES,
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--dtype", default="auto", choices=["auto", *TOLERANCE], help="auto: bfloat16 on a GPU")
    parser.add_argument("--steps", type=int, nargs="+", default=[3, 7], help="unrolled steps K")
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 512], help="rows of a document")
    parser.add_argument("--documents", type=int, default=2, help="documents of a batch")
    parser.add_argument("--hidden", type=int, default=256, help="width of the target")
    parser.add_argument("--vocab", type=int, default=16384, help="the target's vocabulary")
    parser.add_argument("--draft-vocab", type=int, default=4096, help="tokens the draft knows")
    parser.add_argument("--supervised", type=float, default=0.5, help="share of the rows to be learnt")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder for step.txt and step.json")
    parser.add_argument("--memory-of", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


@one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 2 on an expected failure, told in one line."""
    args = parse(argv)
    if args.memory_of:
        print(json.dumps(own_memory(Case(**json.loads(args.case)), args.memory_of)))
        return 0
    require(args.rounds > 0, "--rounds", args.rounds, "a positive integer")
    device = open_device(args.device)
    dtype = args.dtype if args.dtype != "auto" else ("bfloat16" if device.type == "cuda" else "float32")
    shared = (args.documents, args.hidden, args.vocab, args.draft_vocab, args.supervised, args.device, dtype)
    cases = [Case(k, length, *shared) for length in args.lengths for k in args.steps]
    facts = machine(device)
    rows = measure(cases, args.rounds)
    publish(as_table(rows, facts), {"machine": facts, "rounds": args.rounds, "rows": rows}, args.out, "step")
    return 0


if __name__ == "__main__":
    sys.exit(main())
