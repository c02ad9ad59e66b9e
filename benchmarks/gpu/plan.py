"""Which tasks the script has, the most telling ones first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import numerics, rates, training, writes
from benchmarks.gpu.synthetic import KIMI, SMALL, Sizes
from benchmarks.gpu.timebox import Clock, Task
from benchmarks.gpu.training import StepCase
from eagle3.config import STATE_CODECS
from train.world import World

# Kimi's head widths on a narrow draft: the kernels see what they will see, the reference's matrices stay small.
NARROW = replace(
    SMALL, hidden=256, head_dim=KIMI.head_dim, latent={**KIMI.latent, "q_lora_rank": 64, "kv_lora_rank": 32}
)
LENGTHS = [37, 1, 128, 5, 300, 64]  # whole documents, their borders at odd places
SECTIONS = ("rates", "numerics", "step", "extract", "copy")


class Plan:
    """The tasks of one run, in order; they share what the first ones find.

    Args:
        sizes: what is measured at.
        device: where.
        world: DeepSpeed's, or None.
        folder: on the disk that extraction writes to.
    """

    def __init__(self, sizes: Sizes, device: torch.device, world: World | None, folder: Path) -> None:
        self.sizes, self.device, self.world, self.folder = sizes, device, world, folder
        # Without a GPU the checks are to show that they work: a CPU multiplies bfloat16 slowly.
        on_gpu = device.type == "cuda"
        self.check, self.lengths = (NARROW, LENGTHS) if on_gpu else (sizes, [length // 4 + 1 for length in LENGTHS])
        self.rate: float | None = None  # TFLOP/s, once it is measured
        self.seconds = 1.0 if device.type == "cuda" else 0.2  # a scale for what tasks take at least

    def tasks(self, sections: tuple[str, ...] = SECTIONS) -> list[Task]:
        """The tasks of these sections: of each section the most telling first, then the rest."""
        groups = {
            "rates": [self._task("matrix rate", "products of the step's shapes", 3, self._rates)],
            "numerics": self._numerics(),
            "step": [self._step(case) for case in step_cases(self.sizes)],
            "extract": self._extract(),
            "copy": [self._task("copy", "a packed batch", 3, self._copies)],
        }
        first = {"rates": 1, "numerics": 3, "step": 3, "extract": 1, "copy": 1}
        wanted = [name for name in SECTIONS if name in sections]
        head = [task for name in wanted for task in groups[name][: first[name]]]
        tail = [task for name in wanted for task in groups[name][first[name] :]]
        return head + tail

    def _task(self, section: str, name: str, least: float, run: Callable[[Clock], dict[str, Any]]) -> Task:
        return Task(section, name, least * self.seconds, run)

    def _rates(self, clock: Clock) -> dict[str, Any]:
        found = rates.matrix_rate(self.sizes, self.device, clock)
        self.rate = found["best"]
        return found

    def _copies(self, clock: Clock) -> dict[str, Any]:
        return rates.copy_rates(self.sizes, self.device, clock)

    def _numerics(self) -> list[Task]:
        few, many = self.sizes.steps
        half, single = torch.bfloat16, torch.float32
        order = [("llama", many, half), ("mla", many, half), ("llama", many, single), ("mla", many, single)]
        order += [(kind, few, dtype) for kind in ("llama", "mla") for dtype in (half, single)]
        return [self._numeric(*one) for one in order]

    def _numeric(self, kind: str, steps: int, dtype: torch.dtype) -> Task:
        name = f"{kind}, K {steps}, {str(dtype).removeprefix('torch.')}"
        run = lambda _clock: numerics.check(self.check, self.lengths, kind, steps, dtype, self.device)  # noqa: E731
        return self._task("numerics", name, 2, run)

    def _step(self, case: StepCase) -> Task:
        def run(clock: Clock) -> dict[str, Any]:
            return training.measure(case, self.sizes, self.world, self.device, lambda: self.rate, clock)

        return self._task("training step", case.name, 8, run)

    def _extract(self) -> list[Task]:
        return [self._task("extraction", codec, 20, self._write(codec)) for codec in STATE_CODECS]

    def _write(self, codec: str) -> Callable[[Clock], dict[str, Any]]:
        return lambda clock: writes.measure(self.sizes, codec, self.device, self.folder, clock)


def step_cases(sizes: Sizes) -> list[StepCase]:
    """The preset's draft first, alone and packed, then the other sizes, recomputation, latent attention, prompts."""
    (narrow, wide), (few_words, all_words), (few, many) = sizes.intermediates, sizes.draft_vocabs, sizes.steps
    one = StepCase("llama", narrow, few_words, few, 1, sizes.length)
    packed = replace(one, documents=sizes.packed[0], length=sizes.packed[1])
    grid = [
        replace(one, intermediate=inner, draft_vocab=words, steps=steps)
        for inner in (wide, narrow)
        for words in (all_words, few_words)
        for steps in (few, many)
    ]
    cases = [one, replace(one, steps=many), packed, *grid]
    cases += [replace(one, steps=many, recompute=True), replace(packed, steps=many, recompute=True)]
    cases += [replace(one, kind="mla", steps=steps) for steps in (few, many)]
    cases += [replace(packed, supervised=0.5), replace(packed, steps=many)]
    cases += [replace(case, recompute=True) for case in grid]
    return list(dict.fromkeys(cases))
