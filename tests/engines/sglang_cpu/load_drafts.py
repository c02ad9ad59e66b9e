"""Load served folders into SGLang's own draft classes, in one process without a server, and say what went where.

Run by SGLang's interpreter: `load_drafts.py REPORT TARGET FOLDER... -- SERVER_FLAGS...`. Each model's parameters are
NaN before its `load_weights` reads the folder; the report gives each parameter's values afterwards.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch

POSITIONS = (1, 8192)


def publish(target: str, draft: str, flags: list[str]) -> Any:
    """The configuration and process groups that a scheduler process has before it builds a model."""
    from sglang.srt.distributed import bootstrap
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils.network import get_free_port

    speculation = ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", draft]
    args = prepare_server_args(["--model-path", target, "--dtype", "float32", *speculation, *flags])
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=0, gpu_id=0))
    bootstrap.init_parallel_runtime(server_args=args, device="cpu", dist_port=get_free_port())
    return args


def load(args: Any, folder: str) -> Any:
    """The draft model that SGLang builds for the folder, after its own loader."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader.loader import DefaultModelLoader, _initialize_model
    from sglang.srt.model_loader.utils import set_default_torch_dtype

    config = ModelConfig.from_server_args(args, model_path=folder, is_draft_model=True)
    loader = DefaultModelLoader(LoadConfig())
    with set_default_torch_dtype(torch.float32), torch.no_grad():
        model = _initialize_model(config, loader.load_config)
        for parameter in model.parameters():
            parameter.fill_(math.nan)
        model.load_weights(loader._get_all_weights(config, model))
    return model


def values(tensor: torch.Tensor) -> list[float | None]:
    """Different values in a tensor, None for NaN."""
    found = {None if math.isnan(value) else round(value, 6) for value in tensor.float().flatten().tolist()}
    return sorted(found, key=lambda value: (value is not None, value or 0.0))


def describe(model: Any) -> dict[str, Any]:
    """Values by parameter, the token map, the rotary table and the scale of the scores."""
    layer = model.model.midlayer if hasattr(model.model, "midlayer") else model.model.layers[0]
    attention = layer.self_attn
    rotary = attention.rotary_emb
    return {
        "class": type(model).__name__,
        "parameters": {name: values(parameter) for name, parameter in model.named_parameters()},
        "folded": {name: values(getattr(attention, name)) for name in ("w_kc", "w_vc") if hasattr(attention, name)},
        "token_map": None if model.hot_token_id is None else model.hot_token_id.tolist(),
        "norm_output": bool(model.model.norm_output),
        "pairs": not rotary.is_neox_style,
        "scale": float(attention.scaling),
        "table": {str(at): rotary.cos_sin_cache[at].float().tolist() for at in POSITIONS},
    }


def main(arguments: list[str]) -> None:
    """Write the report."""
    cut = arguments.index("--")
    report, target, *folders = arguments[:cut]
    args = publish(target, folders[0], arguments[cut + 1 :])
    Path(report).write_text(json.dumps({folder: describe(load(args, folder)) for folder in folders}))


if __name__ == "__main__":
    main(sys.argv[1:])
