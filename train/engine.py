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


def effective_stage(stage: int, dtype: torch.dtype) -> int:
    """The ZeRO stage that runs for a setting: stage 0 is not run in bfloat16.

    DeepSpeed's unpartitioned bfloat16 optimizer clips otherwise than all its others; stage 1 agrees with float32.
    """
    return 1 if dtype == torch.bfloat16 and stage == 0 else stage


def zero_config(cfg: TrainConfig, stage: int, parameters: int, cuda: bool) -> dict[str, Any]:
    """DeepSpeed's `zero_optimization` section.

    Sources: deepspeed.ai/docs/config-json and deepspeed/runtime/zero/config.py of 0.19. `contiguous_gradients` copies
    gradients into a bucket as they are produced, against fragmentation. `overlap_comm` reduces one bucket on a stream
    of its own while backward fills the other, so it takes two buckets; without a GPU there are no streams. A bucket
    is allocated whole, so it is never made larger than the gradients there are (DeepSpeed's default, 5e8 elements, is
    1 GB in bfloat16 for the smallest draft).

    Args:
        cfg: `overlap_comm`, `bucket_elements` and `offload_optimizer` are used.
        stage: 0 to 3.
        parameters: trained parameters in all.
        cuda: whether training runs on GPUs.
    """
    bucket = bucket_elements(cfg, parameters)
    zero: dict[str, Any] = {
        "stage": stage,
        "contiguous_gradients": True,
        "overlap_comm": cfg.overlap_comm and cuda,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
    }
    if stage == 3:
        # One gathered layer is used K times a step: partition all of it rather than keeping small weights whole.
        zero["stage3_param_persistence_threshold"] = 0
    if cfg.offload_optimizer and stage:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": cuda}
    return zero


def bucket_elements(cfg: TrainConfig, parameters: int) -> int:
    """Elements of one gradient bucket: an even number (DeepSpeed aligns on two), not above what there is to reduce."""
    return 2 * -(-min(cfg.bucket_elements, parameters) // 2)


def engine_config(
    cfg: TrainConfig, dtype: torch.dtype, micro: int, accumulation: int, world: int, parameters: int, cuda: bool
) -> dict[str, Any]:
    """DeepSpeed's configuration of a run.

    Args:
        cfg: clipping, ZeRO stage and communication are used.
        dtype: bfloat16 keeps float32 master weights in the optimizer.
        micro: conversations a process takes per forward pass.
        accumulation: micro-batches per optimizer step.
        world: processes.
        parameters: trained parameters in all.
        cuda: whether training runs on GPUs.
    """
    return {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": micro * accumulation * world,
        "gradient_clipping": cfg.grad_clip,
        "zero_optimization": zero_config(cfg, effective_stage(cfg.zero_stage, dtype), parameters, cuda),
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
    cuda = world.device.type == "cuda"
    optimizer = torch.optim.AdamW(
        parameters, lr=cfg.lr, betas=(cfg.betas[0], cfg.betas[1]), weight_decay=cfg.weight_decay, fused=True
    )
    dtype, count = model_dtype(cfg.dtype, world.device), sum(p.numel() for p in parameters)
    config = engine_config(cfg, dtype, micro, accumulation, world.size, count, cuda)
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    engine.checkpoint_engine = SafeCheckpointEngine()
    if world.size == 1 and not engine.zero_optimization():
        engine.enable_backward_allreduce = False  # nothing to add up, and it would copy every gradient into one buffer
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
