"""What a node's training takes from its disk and its processors, by the plan's arithmetic and a measured rate."""

from __future__ import annotations

from typing import Any

from hydra import compose, initialize_config_dir

from data_prep.store.manifest import TOKEN_BYTES
from eagle3.state_codec import state_bytes
from train.front.config import PROJECT_ROOT, RedraftConfig, register, typed
from train.front.draft_shape import declared_shape
from train.front.estimate import PUBLISHED_GPU_HOURS, PUBLISHED_TOKENS, flops_per_token

LOSSLESS = 0.68  # bytes beside raw, docs/benchmarks.md#store


def preset() -> RedraftConfig:
    """Kimi-K2.5 on a node of 8 H200."""
    register()
    with initialize_config_dir(version_base="1.3", config_dir=str(PROJECT_ROOT / "conf")):
        return typed(compose(config_name="config", overrides=["conf=kimi_k25", "+hardware=h200"]))


def rows_per_second(config: RedraftConfig) -> float:
    """Rows a second that one GPU trains on, by the plan's arithmetic."""
    machine = config.hardware
    each, _ = flops_per_token(declared_shape(config), config.train.ttt_steps)
    return machine.gpu_tflops * 1e12 * machine.train_mfu / each


def published_rows_per_second() -> float:
    """Rows a second and GPU of the published run, extraction and all."""
    return PUBLISHED_TOKENS / PUBLISHED_GPU_HOURS / 3600


def needs(config: RedraftConfig, rates: dict[str, float]) -> list[dict[str, Any]]:
    """For each codec what 8 GPUs need: GB/s from the disk, GB/s of states, processors that do nothing else.

    Args:
        config: the preset.
        rates: codec -> bytes of states that a second of a processor gave here, at best.
    """
    states, width = len(config.build_wiring().stored_sites) + 1, config.target.hidden_size
    raw = states * state_bytes("raw", "bfloat16", width)
    found = []
    for codec in ("raw", "lossless", "fp8", "int8"):
        stored = LOSSLESS * raw if codec == "lossless" else states * state_bytes(codec, "bfloat16", width)
        for source, rate in (("plan", rows_per_second(config)), ("published", published_rows_per_second())):
            gpus = config.hardware.gpus_per_node
            found.append(
                {
                    "codec": codec,
                    "source": source,
                    "rows_per_s": rate * gpus,
                    "disk_gb_s": gpus * rate * (stored + TOKEN_BYTES) / 1e9,
                    "states_gb_s": gpus * rate * raw / 1e9,
                    "workers": gpus * rate * raw / rates[codec] if rates.get(codec) else None,
                }
            )
    return found
