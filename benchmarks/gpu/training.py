"""The training step as a run has it, forward, backward and optimizer, on random weights and states."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from benchmarks.flops import needed_work, step_flops
from benchmarks.gpu.engines import open_engine
from benchmarks.gpu.rates import wait
from benchmarks.gpu.synthetic import Sizes, random_batch, random_parts
from benchmarks.gpu.timebox import Clock
from eagle3.errors import RedraftError
from train.config import TrainConfig
from train.engine import model_dtype
from train.fit import memory_settings
from train.losses import step_weights, supervised_counts
from train.memory import train_memory
from train.model import Trainee
from train.world import World

WARM_UP = 2


@dataclass(frozen=True)
class StepCase:
    """One training case.

    Args:
        kind: of draft.
        intermediate, draft_vocab: of the draft.
        steps: unrolled steps K.
        documents, length: of the batch.
        recompute: activation checkpointing of each step.
        supervised: share of each document's rows to be learnt, its last ones.
    """

    kind: str
    intermediate: int
    draft_vocab: int
    steps: int
    documents: int
    length: int
    recompute: bool = False
    supervised: float = 1.0

    @property
    def name(self) -> str:
        """Unique among the cases."""
        batch = f"{self.documents} x {self.length:,}"
        name = f"{self.kind}, I {self.intermediate:,}, Vd {self.draft_vocab:,}, K {self.steps}, {batch}"
        name += ", recompute" if self.recompute else ""
        return name + (f", {self.supervised:.0%} supervised" if self.supervised < 1 else "")


def measure(
    case: StepCase,
    sizes: Sizes,
    world: World | None,
    device: torch.device,
    rate: Callable[[], float | None],
    clock: Clock,
) -> dict[str, Any]:
    """Time and memory of one case.

    Args:
        case, sizes: what is trained.
        world: DeepSpeed's, or None.
        device: where.
        rate: the measured matrix rate in TFLOP/s; None where it is not known.
        clock: fewer steps are timed when it runs out.

    Returns:
        seconds (median, smallest, largest step), tokens a second (supervised rows), operations needed, their rate and
        share of the matrix rate, peak memory measured and predicted, the loss.

    Raises:
        RedraftError: the loss is not a number.
    """
    cfg = TrainConfig(
        ttt_steps=case.steps,
        activation_checkpointing="step" if case.recompute else "none",
        zero_stage=1 if device.type == "cuda" else 0,
    )
    shape = sizes.shape(case.kind, case.intermediate, case.draft_vocab)
    dtype = model_dtype(cfg.dtype, device)
    trainee = Trainee(random_parts(shape, device, dtype), device, dtype, cfg.head_chunk, case.recompute)
    engine = open_engine(trainee, cfg, world, case.documents, device)
    batch = random_batch(shape, [case.length] * case.documents, device, dtype, case.supervised)
    weights = step_weights(supervised_counts(batch, case.steps), cfg.step_decay)
    inputs = (batch.features, batch.token_ids, batch.teacher, batch.loss_mask, batch.doc_lengths, weights)
    loss = math.nan

    def step() -> None:
        nonlocal loss
        out, _ = engine(*inputs)
        engine.backward(out)
        loss = float(out.detach())
        engine.step()

    try:
        for _ in range(WARM_UP):
            step()
        with peak_memory(device) as peak:
            seconds = _timed_steps(step, sizes.repeats, device, clock)
    finally:
        engine.destroy()
    if not math.isfinite(loss):
        raise RedraftError(
            "the loss is not a finite number",
            where=case.name,
            why=f"found {loss}",
            mend="see gpu.txt for the device and dtype",
        )
    work = needed_work(batch, case.steps)
    flops = step_flops(shape, work)
    settings = memory_settings(
        cfg, shape, world=1, rows=batch.rows, accumulation=1, dtype=dtype, cuda=device.type == "cuda"
    )
    settings = replace(settings, asked=work.asked[0])
    median, tokens = statistics.median(seconds), int(supervised_counts(batch, 1)[0])
    tflops, best = flops["total"] / median / 1e12, rate()
    return {
        "case": asdict(case),
        "seconds": {"median": median, "least": min(seconds), "most": max(seconds), "steps": len(seconds)},
        "supervised_tokens": tokens,
        "tokens_per_second": tokens / median,
        "needed_flops": flops,
        "tflops": tflops,
        "mfu": tflops / best if best else None,
        "memory": {**peak, "predicted": train_memory(shape, settings).peak},
        "loss": loss,
    }


def _timed_steps(step: Callable[[], None], repeats: int, device: torch.device, clock: Clock) -> list[float]:
    seconds = []
    for _ in range(repeats):
        wait(device)
        start = time.perf_counter()
        step()
        wait(device)
        seconds.append(time.perf_counter() - start)
        if clock.over:
            break
    return seconds


@contextlib.contextmanager
def peak_memory(device: torch.device) -> Iterator[dict[str, int]]:
    """Bytes at the fullest moment of the block, as torch's allocator on a GPU counts them; nothing on a CPU."""
    found: dict[str, int] = {}
    if device.type != "cuda":
        yield found
        return
    torch.cuda.reset_peak_memory_stats(device)
    yield found
    found["allocated"] = torch.cuda.max_memory_allocated(device)
    found["reserved"] = torch.cuda.max_memory_reserved(device)
