"""A tiny Llama with random weights, for tests that need a real Hugging Face folder and no sense in its answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from data_prep.targets.corpus import CORPUS
from data_prep.targets.folder import building, is_built
from data_prep.targets.portable import make_portable
from data_prep.targets.tokenizer import build_tokenizer
from eagle3.atomic import sha256_file

VOCAB, POSITIONS = 320, 2048


def recipe(seed: int) -> dict[str, Any]:
    """What decides the content of the folder; the key of its cache."""
    here = Path(__file__)
    files = {path.name: sha256_file(path) for path in (here, here.with_name("tokenizer.py"), CORPUS)}
    return {"maker": "tiny_llama", "seed": seed, "files": files}


def make_tiny_llama(path: Path, *, seed: int = 0) -> Path:
    """Write a random LlamaForCausalLM (hidden 64, 8 layers, 4/2 heads of 16, vocabulary 320, untied, fp32) to `path`.

    Returns:
        `path`; at once when this very recipe stands there.
    """
    path = Path(path)
    if is_built(path, recipe(seed)):
        return path
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=POSITIONS,
        initializer_range=0.08,
        bos_token_id=0,
        eos_token_id=3,
        pad_token_id=2,
        tie_word_embeddings=False,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=3, pad_token_id=2)
    tokenizer = build_tokenizer(VOCAB, POSITIONS)
    with building(path, recipe(seed)) as tmp:
        model.save_pretrained(tmp)
        tokenizer.save_pretrained(tmp)
        make_portable(tmp)
    return path
