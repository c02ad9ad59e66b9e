"""The DeepSpeed engine around the trainee: configuration, optimizer, gathered weights."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn

from train.config import TrainConfig
from train.world import World, import_deepspeed


def model_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype that `train.dtype` names; "auto" is bfloat16 on a GPU and float32 on a CPU."""
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def engine_config(cfg: TrainConfig, dtype: torch.dtype, micro: int, accumulation: int, world: int) -> dict[str, Any]:
    """DeepSpeed's configuration of a run.

    Args:
        cfg: clipping and ZeRO stage are used.
        dtype: bfloat16 keeps float32 master weights in the optimizer.
        micro: conversations a process takes per forward pass.
        accumulation: micro-batches per optimizer step.
        world: processes.
    """
    stage = cfg.zero_stage
    if dtype == torch.bfloat16 and stage == 0:
        # DeepSpeed's unpartitioned bfloat16 optimizer clips otherwise than all its others; stage 1 agrees with float32.
        stage = 1
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:
        # One gathered layer is used K times a step: partition all of it rather than keeping small weights whole.
        zero["stage3_param_persistence_threshold"] = 0
    return {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": micro * accumulation * world,
        "gradient_clipping": cfg.grad_clip,
        "zero_optimization": zero,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**12,
        "wall_clock_breakdown": False,
    }


def build_engine(module: nn.Module, cfg: TrainConfig, world: World, micro: int, accumulation: int) -> Any:
    """Wrap `module` in a DeepSpeed engine with AdamW over its trainable parameters.

    The engine averages gradients over micro-batches and processes; a loss that is already a share of the global
    sum must be multiplied by `accumulation * world.size` first.
    """
    deepspeed = import_deepspeed()
    from train.safe_checkpoint import SafeCheckpointEngine  # imports DeepSpeed: only once its accelerator is chosen

    parameters = [p for p in module.parameters() if p.requires_grad]
    fused = world.device.type == "cuda"
    optimizer = torch.optim.AdamW(
        parameters, lr=cfg.lr, betas=(cfg.betas[0], cfg.betas[1]), weight_decay=cfg.weight_decay, fused=fused
    )
    config = engine_config(cfg, model_dtype(cfg.dtype, world.device), micro, accumulation, world.size)
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    engine.checkpoint_engine = SafeCheckpointEngine()
    return engine


def set_learning_rate(engine: Any, rate: float) -> None:
    """Give the coming optimizer step its learning rate."""
    for group in engine.optimizer.param_groups:
        group["lr"] = rate


def gradient_norm(engine: Any, module: nn.Module) -> float | None:
    """Norm of the averaged gradients before `engine.step()`, at stage 0; None elsewhere (known after the step)."""
    if engine.zero_optimization():
        return None
    return float(torch.nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None]))


def gathered_state(engine: Any, module: nn.Module) -> dict[str, Tensor]:
    """`module`'s state dict with whole tensors on the CPU (rank 0; other ranks get an empty dict).

    Under ZeRO-3 one parameter at a time is gathered, so that no process ever holds the whole model twice.
    Every process must call it.
    """
    deepspeed = import_deepspeed()
    first = torch.distributed.get_rank() == 0
    state: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=engine.zero_optimization_partition_weights()):
            if first:
                state[name] = parameter.detach().cpu().clone().contiguous()
    if first:
        state.update({name: buffer.cpu().clone().contiguous() for name, buffer in module.named_buffers()})
    return state
