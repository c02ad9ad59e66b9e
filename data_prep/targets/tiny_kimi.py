"""A tiny model of Kimi-K2.5's architecture: 61 layers, MLA, mixture of experts, yarn, a Kimi-like chat template.

It answers questions in the style of `corpus.txt`, so that a draft has something to learn and a wiring something to
matter to. `deepseek.py` says how it is trained.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_prep.targets.corpus import CORPUS, read_corpus
from data_prep.targets.deepseek import (
    ACTIVE,
    LAYERS,
    TinyShape,
    batches,
    mean_loss,
    new_model,
    round_to_bf16,
    spread,
    train,
)
from data_prep.targets.folder import building, is_built
from data_prep.targets.portable import make_portable
from data_prep.targets.tokenizer import build_tokenizer
from eagle3.atomic import sha256_file

STEPS = 400  # optimizer steps of the ten-layer phase
VOCAB = 1024
POSITIONS = 8192
ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 50000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 1024,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
# Keys that engines read from config.json and transformers 5 drops on saving.
ENGINE_KEYS = {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
SHAPE = TinyShape(VOCAB, POSITIONS, ROPE, bos=0, eos=3, pad=2)


def recipe(steps: int, seed: int) -> dict[str, Any]:
    """What decides the content of the folder; the key of its cache."""
    code = sorted(Path(__file__).parent / name for name in ("tiny_kimi.py", "deepseek.py", "tokenizer.py", "corpus.py"))
    files = {path.name: sha256_file(path) for path in (*code, CORPUS)}
    return {"maker": "tiny_kimi", "steps": steps, "seed": seed, "files": files}


def make_tiny_kimi(
    path: Path, *, steps: int = STEPS, seed: int = 0, advance: Callable[[int], None] | None = None
) -> Path:
    """Train the model and write it to `path` (12 MB, fp32 holding bf16 values) unless this very recipe stands there.

    Args:
        path: the folder: config.json, safetensors, tokenizer, chat template, `training.json` with the losses.
        steps: optimizer steps of the ten-layer phase; the full depth gets a fortieth of them.
        seed: of initialization and of the order of text.
        advance: called with 1 after each step.

    Returns:
        `path`.
    """
    path = Path(path)
    wanted = recipe(steps, seed)
    if is_built(path, wanted):
        return path
    tokenizer = build_tokenizer(VOCAB, POSITIONS)
    stream = _token_stream(tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        shallow = new_model(SHAPE, len(ACTIVE))
        before = mean_loss(shallow, stream)
        train(shallow, batches(stream, seed), steps, 4e-3, advance)
        model = new_model(SHAPE, LAYERS)
        spread(shallow, model)
        train(model, batches(stream, seed + 1), steps // 40, 5e-4, advance)
    round_to_bf16(model)
    with building(path, wanted) as tmp:
        model.save_pretrained(tmp)
        tokenizer.save_pretrained(tmp)
        make_portable(tmp, ENGINE_KEYS)
        losses = {"loss_before": before, "loss_after": mean_loss(model, stream), "unit": "nats a token, on the corpus"}
        (tmp / "training.json").write_text(json.dumps(losses, indent=2) + "\n", encoding="utf-8")
    return path


def _token_stream(tokenizer: Any) -> Tensor:
    """The corpus through the chat template, one conversation after another `[T]`."""
    ids: list[int] = []
    for conversation in read_corpus():
        ids += tokenizer.apply_chat_template(conversation, return_dict=False)
    return torch.tensor(ids)
