"""The layout of Kimi-K2.5's checkpoint: config.json, tensor names, shards. Only the sizes are the miniature's.

Written after the published config.json and the weight list of moonshotai/Kimi-K2.5 (keys, spellings, dtypes, which file
holds what). Left out are `auto_map` entries for modelling code, which no stage of ours and no engine loads.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from kimi import int4
from torch import Tensor

# As the published config.json states it.
ROPE_SCALING: dict[str, Any] = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 64.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
THETA, POSITIONS = 50000.0, 262144
QUANTIZATION: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": int4.GROUP,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "strategy": "group",
                "symmetric": True,
                "type": "int",
            },
        }
    },
    "format": "pack-quantized",
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}
# What the text model is, sizes aside; the same keys train it in transformers.
TEXT_TRAITS: dict[str, Any] = {"rms_norm_eps": 1e-5, "routed_scaling_factor": 2.827, "norm_topk_prob": True}
VISION_WIDTH, VISION_LAYERS, VISION_INNER, PATCH, GRID = 32, 2, 64, 14, 8
LAYERS_A_SHARD = 16
EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")  # as transformers names all of a layer's


def config_json(text: Any, media_token: int) -> dict[str, Any]:
    """The whole config.json for a trained text model.

    Args:
        text: its DeepseekV3Config.
        media_token: id of the token that stands for an image.
    """
    ids = {"bos_token_id": text.bos_token_id, "eos_token_id": text.eos_token_id, "pad_token_id": text.pad_token_id}
    sizes = {
        name: getattr(text, name)
        for name in (
            "hidden_size",
            "intermediate_size",
            "kv_lora_rank",
            "moe_intermediate_size",
            "n_routed_experts",
            "num_attention_heads",
            "num_experts_per_tok",
            "num_hidden_layers",
            "num_key_value_heads",
            "q_lora_rank",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "v_head_dim",
            "vocab_size",
        )
    }
    text_config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "aux_loss_alpha": 0.001,
        **ids,
        "dtype": "bfloat16",
        "ep_size": 1,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": POSITIONS,
        "model_type": "deepseek_v3",
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_shared_experts": 1,
        "num_nextn_predict_layers": 0,
        "pretraining_tp": 1,
        "quantization_config": QUANTIZATION,
        "rope_scaling": ROPE_SCALING,
        "rope_theta": THETA,
        "scoring_func": "sigmoid",
        "seq_aux": True,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "use_cache": True,
        **TEXT_TRAITS,
        **sizes,
    }
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "auto_map": {"AutoConfig": "configuration_kimi_k25.KimiK25Config"},
        **ids,
        "dtype": "bfloat16",
        "ignore_index": -100,
        "media_placeholder_token_id": media_token,
        "model_type": "kimi_k25",
        "text_config": text_config,
        "tie_word_embeddings": False,
        "use_unified_vision_chunk": True,
        "video_placeholder": "<|kimi_k25_video_placeholder|>",
        "vision_config": _vision_config(sizes["hidden_size"]),
    }


def _vision_config(text_width: int) -> dict[str, Any]:
    sizes = {
        "hidden_size": VISION_WIDTH,
        "intermediate_size": VISION_INNER,
        "num_attention_heads": 2,
        "num_hidden_layers": VISION_LAYERS,
    }
    # The real config.json has the `vt_` names alone. SGLang reads the plain ones, whose defaults are the real sizes.
    return {
        **sizes,
        **{f"vt_{name}": size for name, size in sizes.items()},
        "init_pos_emb_height": GRID,
        "init_pos_emb_time": 4,
        "init_pos_emb_width": GRID,
        "merge_kernel_size": [2, 2],
        "merge_type": "sd2_tpool",
        "mm_hidden_size": VISION_WIDTH,
        "mm_projector_type": "patchmerger",
        "model_type": "",
        "patch_size": PATCH,
        "pos_emb_type": "divided_fixed",
        "projector_hidden_act": "gelu",
        "projector_ln_eps": 1e-05,
        "text_hidden_size": text_width,
        "video_attn_type": "spatial_temporal",
    }


def preprocessor_json() -> dict[str, Any]:
    """preprocessor_config.json, for the engines that ask for a processor."""
    return {
        "auto_map": {
            "AutoImageProcessor": "kimi_k25_vision_processing.KimiK25VisionProcessor",
            "AutoProcessor": "kimi_k25_processor.KimiK25Processor",
        },
        "media_proc_cfg": {
            "fixed_output_tokens": None,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "in_patch_limit": 64,
            "in_patch_limit_each_frame": 64,
            "merge_kernel_size": 2,
            "patch_limit_on_one_side": 8,
            "patch_size": PATCH,
            "sample_fps": 2.0,
            "temporal_merge_kernel_size": 4,
        },
    }


def text_tensors(model: Any, experts: dict[str, list[int4.Quantized]]) -> dict[str, Tensor]:
    """A DeepseekV3ForCausalLM's tensors by the checkpoint's names: routed experts packed, the rest in bf16.

    The router's correction bias stays in float32.

    Args:
        model: the trained model.
        experts: for each parameter that ends in one of `EXPERTS`, each expert's weight as quantized.
    """
    named: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        full = f"language_model.{name}"
        if name in experts:
            named |= _expert_tensors(full, experts[name])
        else:
            named[full] = tensor.float() if name.endswith("e_score_correction_bias") else tensor.to(torch.bfloat16)
    return named


def _expert_tensors(name: str, quantized: list[int4.Quantized]) -> dict[str, Tensor]:
    """Split transformers' one parameter for all experts into the checkpoint's one layer each."""
    stem, _, part = name.rpartition(".")
    parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
    named: dict[str, Tensor] = {}
    for number, (values, scale) in enumerate(quantized):
        halves = zip(parts, values.chunk(len(parts)), scale.chunk(len(parts)), strict=True)
        for own, half, factors in halves:
            named |= int4.packed_tensors(f"{stem}.{number}.{own}", half, factors)
    return named


def vision_tensors(text_width: int, seed: int) -> dict[str, Tensor]:
    """A random vision tower and projector, by the checkpoint's names, in bf16."""
    generator = torch.Generator().manual_seed(seed)
    wide, inner, merged = VISION_WIDTH, VISION_INNER, VISION_WIDTH * 4
    shapes: dict[str, tuple[int, ...]] = {
        "vision_tower.patch_embed.pos_emb.weight": (GRID, GRID, wide),
        "vision_tower.patch_embed.proj.weight": (wide, 3, PATCH, PATCH),
        "vision_tower.patch_embed.proj.bias": (wide,),
        "mm_projector.proj.0.weight": (merged, merged),
        "mm_projector.proj.0.bias": (merged,),
        "mm_projector.proj.2.weight": (text_width, merged),
        "mm_projector.proj.2.bias": (text_width,),
    }
    norms = ["vision_tower.encoder.final_layernorm", "mm_projector.pre_norm"]
    for k in range(VISION_LAYERS):
        block = f"vision_tower.encoder.blocks.{k}"
        norms += [f"{block}.norm0", f"{block}.norm1"]
        for name, rows, columns in (
            ("wqkv", 3 * wide, wide),
            ("wo", wide, wide),
            ("mlp.fc0", inner, wide),
            ("mlp.fc1", wide, inner),
        ):
            shapes |= {f"{block}.{name}.weight": (rows, columns), f"{block}.{name}.bias": (rows,)}
    shapes |= {f"{norm}.{part}": (wide,) for norm in norms for part in ("weight", "bias")}
    return {name: (torch.randn(shape, generator=generator) * 0.02).bfloat16() for name, shape in shapes.items()}


def _shard_of(name: str) -> tuple[str, int]:
    parts = name.split(".")
    if parts[:3] == ["language_model", "model", "layers"]:
        return ("a layers", int(parts[3]) // LAYERS_A_SHARD)
    return ("b ends", 0) if parts[0] == "language_model" else ("c vision", 0)


def write_shards(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write the safetensors files and their index: layers in order, then embedding, norm and head, then vision."""
    from safetensors.torch import save_file

    shards: dict[tuple[str, int], dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        shards.setdefault(_shard_of(name), {})[name] = tensor.contiguous()
    placed = {}
    for number, key in enumerate(sorted(shards), start=1):
        file = f"model-{number:05d}-of-{len(shards):06d}.safetensors"
        save_file(shards[key], folder / file, metadata={"format": "pt"})
        (folder / file).chmod(0o644)
        placed |= dict.fromkeys(shards[key], file)
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
