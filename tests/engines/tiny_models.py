"""A tiny Llama and a draft for it that real engines load: heads of 32, the least that vLLM's CPU attention takes."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from data_prep.targets.portable import make_portable
from data_prep.targets.tokenizer import build_tokenizer
from eagle3.checkpoint import save_served
from eagle3.config import DraftConfig
from eagle3.draft import DraftShape
from eagle3.draft_init import fresh_draft
from eagle3.target_weights import TargetWeights
from eagle3.vocab import build_draft_vocab
from eagle3.wiring import Site, Wiring

VOCAB, HIDDEN, LAYERS, POSITIONS = 320, 64, 8, 1024
WIRING = Wiring((Site(2), Site(4), Site(5)), "final", "llama", LAYERS, HIDDEN)


def make_target(path: Path) -> Path:
    """Write a random LlamaForCausalLM in bfloat16 whose text wanders."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=POSITIONS,
        initializer_range=0.08,
        bos_token_id=0,
        eos_token_id=3,
        pad_token_id=2,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=3, pad_token_id=2)
    model.save_pretrained(path)
    build_tokenizer(VOCAB, POSITIONS).save_pretrained(path)
    make_portable(path)
    return path


def make_served(path: Path, target: Path, convention: str, wiring: Wiring = WIRING, draft_vocab: int = 200) -> Path:
    """Write a served folder whose draft starts from the target's own end: it guesses right now and then."""
    weights = TargetWeights(target)
    vocab = build_draft_vocab(torch.arange(VOCAB), draft_vocab)
    shape = DraftShape(
        hidden_size=HIDDEN,
        intermediate_size=128,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        vocab_size=VOCAB,
        draft_vocab_size=draft_vocab,
        num_aux=3,
        rms_norm_eps=1e-6,
        rope={"rope_theta": 10000.0, "rope_scaling": None},
        max_position_embeddings=POSITIONS,
    )
    draft = fresh_draft(
        shape,
        vocab,
        DraftConfig(init_fc="last"),
        embedding=weights.embedding(),
        head=weights.head(),
        final_norm=weights.final_norm(),
        seed=0,
    )
    save_served(path, draft, wiring, target={}, convention_name=convention, vocab=vocab)
    return path
