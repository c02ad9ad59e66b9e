"""The prepared set and its store in a form that any trainer can read, and foreign weights in ours.

`write_data` writes `train.safetensors` (`lengths [R]`, `input_ids [N]`, `loss_mask [N]`, `aux_hidden_state [N, 3H]`,
`hidden_state [N, H]` after the target's final norm), `ends.safetensors` (`embed_tokens`, `lm_head`, `d2t`, `t2d`) and
`draft.json` (the draft's sizes as a Llama configuration). `read_weights` takes a trained state dict back, its names
checked in both directions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from data_prep.prepare import load_prepared
from eagle3.atomic import replacing, write_json
from eagle3.checkpoint import load_state
from eagle3.draft import Eagle3Draft
from eagle3.draft_build import build_draft
from eagle3.draft_shape import DraftShape
from eagle3.errors import IntegrityError
from eagle3.target_weights import TargetWeights
from eagle3.vocab import DraftVocab
from train.batches import StepPlan
from train.config import TrainConfig
from train.front.source import StoreSource


def write_data(
    folder: Path, source: StoreSource, prepared: Path, weights: TargetWeights, shape: DraftShape, vocab: DraftVocab
) -> None:
    """Write the training split as another trainer's fields; nothing when it is already there.

    Args:
        folder: where.
        source: the training split with its stored states.
        prepared: the prepared set, for tokens and loss masks as they stand in the conversations.
        weights: the target's.
        shape: the draft's sizes.
        vocab: the draft's vocabulary.
    """
    if (folder / "draft.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / "train.safetensors") as path:
        save_file(_fields(source, prepared, weights), path)
    ends = {"embed_tokens": weights.embedding().float(), "lm_head": weights.head().float().clone()}
    with replacing(folder / "ends.safetensors") as path:
        save_file({**ends, "d2t": vocab.d2t, "t2d": vocab.t2d}, path)
    write_json(folder / "draft.json", llama_config(shape, weights))


def _fields(source: StoreSource, prepared: Path, weights: TargetWeights) -> dict[str, Tensor]:
    rows = load_prepared(prepared, "train")
    norm, eps = weights.final_norm().float(), weights.rms_norm_eps
    parts: dict[str, list[Tensor]] = {"aux_hidden_state": [], "hidden_state": []}
    for position in source.positions:
        sample = source.store[position]
        parts["aux_hidden_state"].append(torch.cat([sample.sites[site.name] for site in source.wiring.aux], dim=-1))
        final = F.rms_norm(sample.final.float(), (len(norm),), norm, eps)
        parts["hidden_state"].append(final.to(sample.final.dtype))
    return {
        **{name: torch.cat(tensors) for name, tensors in parts.items()},
        "input_ids": torch.tensor([token for ids in rows["input_ids"] for token in ids]),
        "loss_mask": torch.tensor([int(bit) for mask in rows["loss_mask"] for bit in mask]),
        "lengths": torch.tensor([len(ids) for ids in rows["input_ids"]]),
    }


def llama_config(shape: DraftShape, weights: TargetWeights) -> dict[str, Any]:
    """Keyword arguments of a `LlamaConfig` for a draft of this shape."""
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    return {
        **{name: getattr(shape, name) for name in names},
        "vocab_size": shape.vocab_size,
        "draft_vocab_size": shape.draft_vocab_size,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope["rope_theta"],
        "rope_scaling": shape.rope["rope_scaling"],
        "max_position_embeddings": shape.max_position_embeddings,
        "initializer_range": weights.text_config.get("initializer_range", 0.02),
        "hidden_act": "silu",
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
        "pad_token_id": None,
        "norm_output": True,  # its word for: the head reads normed states
    }


def write_plan(path: Path, conversations: int, cfg: TrainConfig) -> int:
    """Write which conversations make each step, in this project's own order; returns the number of steps."""
    plan = StepPlan(conversations, cfg, world=1, rank=0)
    write_json(path, {"steps": [plan.global_batch(step) for step in range(plan.total_steps)]})
    return plan.total_steps


def read_weights(path: Path, shape: DraftShape, vocab: DraftVocab, embedding: Tensor) -> Eagle3Draft:
    """A trained draft from another trainer's state dict.

    Raises:
        IntegrityError: a name is missing or unknown, a shape differs, or the vocabulary or the frozen embedding is
            not the one it was given.
    """
    state = load_file(path)
    for name, expected in (("d2t", vocab.d2t), ("t2d", vocab.t2d), ("embed_tokens.weight", embedding.float())):
        found = state.get(name)
        if found is None or not torch.equal(found, expected.to(found.dtype)):
            raise IntegrityError(f"the trainer changed {name}", where=str(path), mend="freeze it, and train again")
    del state["embed_tokens.weight"]
    draft = build_draft(shape)
    with torch.no_grad():
        draft.embed_tokens.weight.copy_(embedding)
    load_state(draft, state, str(path))
    return draft
