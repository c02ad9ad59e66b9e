"""Peak memory of training under the real DeepSpeed, beside the arithmetic of `train/memory.py`.

    python -m benchmarks.memory [--hidden 512] [--rows 1024] [--vocab 16384] [--stages 0 1 2 3] [--dtypes float32]

Each case runs in processes of its own. What is measured is the kernel's mark of the resident set (VmHWM, put back to
the present size through /proc/self/clear_refs after the engine is built) over two optimizer steps of two micro-batches,
less the resident size once everything is imported and a tiny job of the same kind has run. So that the C library
gives freed memory back at once, the processes run with MALLOC_MMAP_THRESHOLD_=65536, MALLOC_TRIM_THRESHOLD_=65536 and
MALLOC_ARENA_MAX=1. Linux only.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table

from benchmarks.side_by_side import machine, machine_line, open_device, publish
from eagle3.command_line import Parser, one_line_errors
from eagle3.draft_build import build_draft
from eagle3.draft_shape import DraftShape
from eagle3.errors import RedraftError
from eagle3.ttt import PackedBatch
from train.config import TrainConfig
from train.engine import bucket_elements, build_engine, effective_stage, model_dtype
from train.losses import TeacherHead, step_weights, supervised_counts
from train.memory import PHASES, MemoryPlan, MemorySettings, train_memory
from train.model import Trainee, TrainParts
from train.world import World, free_port, joined

MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
ACCUMULATION, STEPS = 2, 2


EXAMPLES = """
python -m benchmarks.memory
python -m benchmarks.memory --hidden 512 --rows 1024 --vocab 16384 --stages 0 2 --processes 2
"""


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Args:
        kind: "llama" or "mla".
        steps: unrolled steps K.
        rows, documents: rows of a micro-batch, and over how many documents.
        hidden, vocab, draft_vocab: H, V, Vd.
        stage: ZeRO stage asked for.
        dtype: "float32" or "bfloat16".
        processes: how many share the states.
        recompute: activation checkpointing.
        chunk: `train.head_chunk`.
    """

    kind: str
    steps: int
    rows: int
    documents: int
    hidden: int
    vocab: int
    draft_vocab: int
    stage: int
    dtype: str
    processes: int
    recompute: bool
    chunk: int

    def config(self) -> TrainConfig:
        """The settings that training would have."""
        return TrainConfig(
            ttt_steps=self.steps,
            zero_stage=self.stage,
            dtype=self.dtype,
            head_chunk=self.chunk,
            activation_checkpointing="step" if self.recompute else "none",
        )

    def shape(self) -> DraftShape:
        """Heads of 64, an MLP of 2 H; Kimi's proportions for latent attention."""
        heads = self.hidden // 64
        latent: dict[str, Any] = {
            "kind": "mla",
            "q_lora_rank": self.hidden // 4,
            "kv_lora_rank": self.hidden // 8,
            "qk_nope_head_dim": 48,
            "qk_rope_head_dim": 16,
            "v_head_dim": 48,
        }
        return DraftShape(
            hidden_size=self.hidden,
            intermediate_size=2 * self.hidden,
            num_attention_heads=heads,
            num_key_value_heads=heads if self.kind == "mla" else heads // 2,
            head_dim=64,
            vocab_size=self.vocab,
            draft_vocab_size=self.draft_vocab,
            num_aux=3,
            rms_norm_eps=1e-5,
            rope={"rope_theta": 10000.0},
            max_position_embeddings=4096,
            **(latent if self.kind == "mla" else {}),
        )

    def arithmetic(self) -> MemoryPlan:
        """What `train.memory` says of it."""
        shape, dtype = self.shape(), getattr(torch, self.dtype)
        settings = MemorySettings(
            steps=self.steps,
            rows=self.rows,
            world=self.processes,
            stage=effective_stage(self.stage, dtype),
            element=dtype.itemsize,
            chunk=self.chunk,
            accumulation=ACCUMULATION,
            recompute=self.recompute,
            cuda=False,
        )
        parameters = train_memory(shape, settings).parameters
        return train_memory(shape, replace(settings, bucket=bucket_elements(self.config(), parameters)))


def resident(mark: str) -> int:
    """Bytes of this process's resident set: VmRSS now, VmHWM at most since the mark was reset."""
    with open("/proc/self/status", encoding="ascii") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(mark))


def settle() -> None:
    """Drop garbage, give free memory back, and put VmHWM to the present size."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    with open("/proc/self/clear_refs", "w", encoding="ascii") as handle:
        handle.write("5")


def train_here(case: Case, world: World) -> int:
    """Build an engine and train for a few steps; the mark over the steps alone."""
    torch.manual_seed(0)
    shape, dtype = case.shape(), model_dtype(case.dtype, world.device)
    draft = build_draft(shape)
    teacher = TeacherHead(torch.ones(case.hidden), torch.randn(case.vocab, case.hidden), 1e-5)
    cfg = case.config()
    trainee = Trainee(TrainParts(draft, teacher), world.device, dtype, case.chunk, case.recompute)
    del draft, teacher
    engine = build_engine(trainee, cfg, world, case.documents, ACCUMULATION)
    mask = torch.ones(case.rows, dtype=torch.bool)
    batch = PackedBatch(
        features=torch.randn(case.rows, shape.num_aux * case.hidden, dtype=dtype),
        token_ids=torch.randint(0, case.vocab, (case.rows,)),
        teacher=torch.randn(case.rows, case.hidden, dtype=dtype),
        loss_mask=mask,
        doc_lengths=[case.rows // case.documents] * case.documents,
    )
    weights = step_weights(supervised_counts(batch, case.steps), 0.8)
    settle()
    for _ in range(STEPS * ACCUMULATION):
        loss, _ = engine(batch.features, batch.token_ids, batch.teacher, batch.loss_mask, batch.doc_lengths, weights)
        engine.backward(loss)
        del loss
        engine.step()
    peak = resident("VmHWM")
    engine.destroy()
    return peak


def child(case: Case) -> None:
    """One process of a case: prints its peak in bytes above what it had before the case."""
    with joined() as world:
        train_here(replace(case, hidden=128, vocab=512, draft_vocab=256, rows=8 * case.documents), world)
        settle()
        base = resident("VmRSS")
        peak = train_here(case, world)
        print(json.dumps({"peak": peak - base}), flush=True)


def measure(case: Case) -> int:
    """Bytes of the fullest process of a case.

    Raises:
        RedraftError: a process failed.
    """
    shared = {**os.environ, **MALLOC, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared |= {"WORLD_SIZE": str(case.processes), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.memory", "--child", json.dumps(asdict(case))]
    workers = [
        subprocess.Popen(
            command,
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(case.processes)
    ]
    peaks = []
    for worker in workers:
        out, err = worker.communicate()
        if worker.returncode:
            last = (err.strip().splitlines() or ["no word"])[-1]
            raise RedraftError(
                "a measured process failed", where=str(case), why=last, mend="run it alone to see all of its words"
            )
        peaks.append(json.loads(out.strip().splitlines()[-1])["peak"])
    return max(peaks)


def as_table(rows: list[dict[str, Any]], facts: dict[str, Any]) -> Table:
    """One line a case."""
    table = Table(title="peak memory of one training process, MB", title_justify="left", box=box.SIMPLE_HEAD)
    table.caption, table.caption_justify = machine_line(facts), "left"
    for heading in ("kind", "H", "V / Vd", "rows", "K", "dtype", "ZeRO", "processes", "recompute"):
        table.add_column(heading, justify="right")
    for heading in ("predicted", "measured", "ratio", "fullest in"):
        table.add_column(heading, justify="right")
    for row in rows:
        case = Case(**row["case"])
        table.add_row(
            case.kind,
            str(case.hidden),
            f"{case.vocab} / {case.draft_vocab}",
            str(case.rows),
            str(case.steps),
            case.dtype,
            str(case.stage),
            str(case.processes),
            "step" if case.recompute else "none",
            f"{row['predicted'] / 1e6:,.0f}",
            f"{row['measured'] / 1e6:,.0f}",
            f"{row['predicted'] / row['measured']:.3f}",
            row["fullest"],
        )
    return table


def cases(args: argparse.Namespace) -> list[Case]:
    """Every combination asked for."""
    return [
        Case(kind, steps, rows, args.documents, hidden, vocab, vocab // share, stage, dtype, count, again, args.chunk)
        for hidden, vocab, rows in zip(args.hidden, args.vocab, args.rows, strict=True)
        for share in args.vocab_share
        for kind in args.kinds
        for steps in args.steps
        for dtype in args.dtypes
        for count in args.processes
        for stage in args.stages
        for again in args.recompute
    ]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = Parser(
        prog="python -m benchmarks.memory",
        description=(__doc__ or "").splitlines()[0],
        examples=EXAMPLES,
    )
    parser.add_argument("--hidden", type=int, nargs="+", default=[512, 1024], help="one a size")
    parser.add_argument("--vocab", type=int, nargs="+", default=[16384, 16384], help="the target's, one a size")
    parser.add_argument("--rows", type=int, nargs="+", default=[1024, 512], help="of a micro-batch, one a size")
    parser.add_argument("--vocab-share", type=int, nargs="+", default=[4], help="Vd = V / this")
    parser.add_argument("--documents", type=int, default=2, help="of a micro-batch")
    parser.add_argument("--kinds", nargs="+", default=["llama"], choices=["llama", "mla"], help="of draft")
    parser.add_argument("--steps", type=int, nargs="+", default=[4], help="unrolled steps K")
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3], help="train.zero_stage")
    parser.add_argument("--dtypes", nargs="+", default=["float32"], choices=["float32", "bfloat16"], help="train.dtype")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="train.processes")
    parser.add_argument(
        "--recompute", type=int, nargs="+", default=[0], choices=[0, 1], help="compute steps again in backward"
    )
    parser.add_argument("--chunk", type=int, default=1024, help="train.head_chunk")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder for memory.txt and memory.json")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


@one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 2 on an expected failure, told in one line."""
    args = parse(argv)
    if args.child:
        told = json.loads(args.child)
        child(Case(**{**told, "recompute": bool(told["recompute"])}))
        return 0
    facts, rows = machine(open_device("cpu")), []
    for case in cases(args):
        plan, measured = case.arithmetic(), measure(case)
        rows.append(
            {"case": asdict(case), "predicted": plan.peak, "measured": measured, "fullest": plan.fullest}
            | {"phases": {name: plan.phase(name) for name in PHASES}}
        )
        print(f"{case}: predicted {plan.peak / 1e6:,.0f} MB, measured {measured / 1e6:,.0f} MB", flush=True)
    publish(as_table(rows, facts), {"machine": facts, "malloc": MALLOC, "rows": rows}, args.out, "memory")
    return 0


if __name__ == "__main__":
    sys.exit(main())
