"""What the device itself gives: its matrix rate at the step's own shapes, and how fast a batch reaches it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.synthetic import Sizes
from benchmarks.gpu.timebox import Clock
from train.losses import BLOCK, COLUMNS

WARM_UP, ROUNDS = 3, 5


def seconds_of(run: Callable[[], Any], device: torch.device, clock: Clock, least: float = 0.05) -> float:
    """Median seconds of one call over rounds of as many calls as fill `least` seconds."""
    for _ in range(WARM_UP):
        run()
    once = _timed(run, 1, device)
    calls = max(1, min(1000, int(least / max(once, 1e-9))))
    rounds = []
    for _ in range(ROUNDS):
        rounds.append(_timed(run, calls, device) / calls)
        if clock.over:
            break
    return statistics.median(rounds)


def _timed(run: Callable[[], Any], calls: int, device: torch.device) -> float:
    wait(device)
    start = time.perf_counter()
    for _ in range(calls):
        run()
    wait(device)
    return time.perf_counter() - start


def wait(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def products(sizes: Sizes) -> dict[str, tuple[int, int, int]]:
    """The step's large products as (m, k, n): `[m, k] @ [k, n]`; those of backward have the same sides, turned."""
    n, h = sizes.length, sizes.hidden
    heads, inner, words = sizes.heads * sizes.head_dim, sizes.intermediates[0], sizes.draft_vocabs[0]
    block = min(BLOCK, n)
    return {
        "square": (sizes.square,) * 3,
        "a half of queries, keys, values": (n, h, heads),
        "output": (n, heads, h),
        "gate, up": (n, h, inner),
        "down": (n, inner, h),
        "gate's gradient": (h, n, inner),
        "fused states": (n, 3 * h, h),
        "draft's head, a block": (block, h, words),
        "its gradient": (words, block, h),
        "teacher's head, a piece": (block, h, min(COLUMNS, sizes.vocab)),
    }


def matrix_rate(sizes: Sizes, device: torch.device, clock: Clock) -> dict[str, Any]:
    """TFLOP/s of bfloat16 products of the step's shapes on random numbers; `best` is what MFU is measured by.

    On a CPU the products are in float32, as training is there.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rates: dict[str, float] = {}
    for name, (m, k, n) in products(sizes).items():
        a, b = torch.randn(m, k, device=device, dtype=dtype), torch.randn(k, n, device=device, dtype=dtype)
        out = torch.empty(m, n, device=device, dtype=dtype)
        seconds = seconds_of(lambda a=a, b=b, out=out: torch.mm(a, b, out=out), device, clock)  # type: ignore[misc]
        rates[name] = 2.0 * m * k * n / seconds / 1e12
        if clock.over:
            break
    return {"dtype": str(dtype).removeprefix("torch."), "tflops": rates, "best": max(rates.values())}


def copy_rates(sizes: Sizes, device: torch.device, clock: Clock) -> dict[str, Any]:
    """GB/s at which a packed batch's states reach the device, from pageable and from pinned memory.

    Without a GPU the copy is from memory to memory and there is nothing to pin.
    """
    rows = sizes.packed[0] * sizes.packed[1]
    states = torch.randn(rows, sizes.hidden).bfloat16().repeat(1, 4)  # [N, 4 H]: three aux states and the teacher's
    there = torch.empty_like(states, device=device)
    sources = {"pageable": states}
    if device.type == "cuda":
        sources["pinned"] = states.pin_memory()
    size, found = states.numel() * states.element_size(), {}
    for name, source in sources.items():
        seconds = seconds_of(lambda s=source: there.copy_(s, non_blocking=True), device, clock)  # type: ignore[misc]
        found[name] = {"seconds": seconds, "gb_per_s": size / seconds / 1e9}
    return {"rows": rows, "bytes": size, "copies": found}
