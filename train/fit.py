"""Fit training to the memory there is: the settings of `train.memory` for a run, and the ZeRO stage it leads to."""

from __future__ import annotations

import os
from dataclasses import replace

import psutil
import torch

from eagle3.draft_shape import DraftShape
from train.config import TrainConfig
from train.engine import bucket_elements, effective_stage
from train.losses import block_rows
from train.memory import GIB, MemoryPlan, MemorySettings, choose_stage, train_memory, trained_parameters


def memory_settings(
    cfg: TrainConfig, shape: DraftShape, *, world: int, rows: int, accumulation: int, dtype: torch.dtype, cuda: bool
) -> MemorySettings:
    """What the arithmetic needs to know of a run.

    Args:
        cfg: training settings; a stage still to be chosen counts as 0 here.
        shape: the draft.
        world: processes, over all nodes.
        rows: rows of the largest micro-batch of one process.
        accumulation: micro-batches an optimizer step.
        dtype: the draft's in forward.
        cuda: whether training runs on GPUs.
    """
    return MemorySettings(
        steps=cfg.ttt_steps,
        rows=rows,
        world=world,
        stage=effective_stage(max(cfg.zero_stage, 0), dtype),
        element=dtype.itemsize,
        chunk=block_rows(cfg.head_chunk, shape.draft_vocab_size, cuda),
        accumulation=accumulation,
        recompute=cfg.activation_checkpointing == "step",
        offload=cfg.offload_optimizer,
        bucket=bucket_elements(cfg, sum(trained_parameters(shape).values())),
        overlap=cfg.overlap_comm,
        outside=cfg.objective.outside == "drop",
        cuda=cuda,
    )


def memory_limit(cfg: TrainConfig, device: torch.device) -> int:
    """Bytes that one process may plan with: `train.gpu_memory_gib` or what is here, less `train.memory_margin`.

    On a CPU the processes of this machine share its memory.
    """
    if cfg.gpu_memory_gib:
        total = cfg.gpu_memory_gib * GIB
    elif device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
    else:
        total = psutil.virtual_memory().total / int(os.environ.get("LOCAL_WORLD_SIZE") or max(cfg.processes, 1))
    return int(total * (1 - cfg.memory_margin))


def with_stage(
    cfg: TrainConfig, shape: DraftShape, settings: MemorySettings, limit: int, before: int | None = None
) -> tuple[TrainConfig, str]:
    """The settings with the ZeRO stage chosen, and a line that says why; a stage that is set stays.

    Args:
        cfg, shape, settings: the run.
        limit: bytes that one process may take.
        before: stage of the checkpoint to go on from; its files are split by it, so it is kept.

    Raises:
        ConfigError: the stage is to be chosen and none fits `limit` bytes.
    """
    if cfg.zero_stage >= 0:
        return cfg, ""
    if before is not None and before >= 0:
        return replace(cfg, zero_stage=before), f"ZeRO stage {before}, that of the checkpoint"
    chosen, looked_at = choose_stage(shape, settings, limit)
    return replace(cfg, zero_stage=chosen.settings.stage), choice_line(chosen, looked_at, limit)


def choice_line(chosen: MemoryPlan, looked_at: list[MemoryPlan], limit: int) -> str:
    """`ZeRO stage 1: 31.2 of 126.9 GiB a process, ...`."""
    line = (
        f"ZeRO stage {chosen.settings.stage} is the lowest that fits: {chosen.peak / GIB:.1f} GiB of "
        f"{limit / GIB:.1f} a process, fullest in the {chosen.fullest}"
    )
    refused = [f"stage {p.settings.stage} {p.peak / GIB:.1f}" for p in looked_at[:-1]]
    return line + (f" ({', '.join(refused)} GiB)" if refused else "")


def run_memory(cfg: TrainConfig, shape: DraftShape, settings: MemorySettings, limit: int) -> MemoryPlan:
    """The plan of the stage that would run: the one set, or the one chosen.

    Raises:
        ConfigError: as `with_stage`.
    """
    if cfg.zero_stage >= 0:
        return train_memory(shape, settings)
    return choose_stage(shape, settings, limit)[0]
