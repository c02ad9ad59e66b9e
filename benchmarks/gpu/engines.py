"""What steps the trainee: DeepSpeed's engine as training builds it, or AdamW with float32 masters without it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from train.config import TrainConfig
from train.engine import build_engine
from train.model import Trainee
from train.world import World, joined


class MasterAdamW:
    """One process's ZeRO-1 by hand: gradients in the weights' dtype, master weights and moments in float32.

    It has the calls of DeepSpeed's engine that a step makes.
    """

    def __init__(self, module: nn.Module, cfg: TrainConfig, device: torch.device) -> None:
        self.module, self.clip = module, cfg.grad_clip
        self.weights = [p for p in module.parameters() if p.requires_grad]
        self.masters = [p.detach().float() if p.dtype != torch.float32 else p for p in self.weights]
        betas = (cfg.betas[0], cfg.betas[1])
        self.optimizer = torch.optim.AdamW(
            self.masters, lr=cfg.lr, betas=betas, weight_decay=cfg.weight_decay, fused=device.type == "cuda"
        )

    def __call__(self, *args: Any) -> tuple[Tensor, Tensor]:
        """The module's forward."""
        return self.module(*args)

    def backward(self, loss: Tensor) -> None:
        """Gradients of `loss`, added to those there are."""
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        """Clip, step the masters, round them into the weights, forget the gradients."""
        for weight, master in zip(self.weights, self.masters, strict=True):
            if master is not weight:
                master.grad, weight.grad = None if weight.grad is None else weight.grad.float(), None
        if self.clip:
            torch.nn.utils.clip_grad_norm_(self.masters, self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for weight, master in zip(self.weights, self.masters, strict=True):
                if master is not weight:
                    weight.copy_(master)

    def destroy(self) -> None:
        """Nothing to undo."""


@contextlib.contextmanager
def process_group(device: torch.device) -> Iterator[tuple[World | None, str]]:
    """DeepSpeed's world of this process alone, and a line that says so; None where it cannot be had.

    DeepSpeed takes the GPU where there is one, so a run on the CPU beside a GPU goes without it.
    """
    with contextlib.ExitStack() as stack:
        world, said = None, ""
        if device.type == "cuda" or not torch.cuda.is_available():
            try:
                world = stack.enter_context(joined())
            except Exception as err:  # not installed, or no build of its own for this machine: measured without it
                said = f" ({type(err).__name__}: {str(err).splitlines()[0] if str(err) else ''})"
        yield world, "DeepSpeed" if world is not None else f"AdamW with float32 masters, no DeepSpeed{said}"


def open_engine(trainee: Trainee, cfg: TrainConfig, world: World | None, documents: int, device: torch.device) -> Any:
    """The engine of one training case."""
    if world is not None:
        return build_engine(trainee, cfg, world, documents, 1)
    return MasterAdamW(trainee, cfg, device)
