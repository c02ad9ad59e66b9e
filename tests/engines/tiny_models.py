"""A tiny Llama and a draft for it that real engines load: heads of 32, the least that vLLM's CPU attention takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from data_prep.targets.portable import make_portable
from data_prep.targets.tokenizer import build_tokenizer
from eagle3.checkpoint import load_served, save_served
from eagle3.config import DraftConfig
from eagle3.draft_init import fresh_draft
from eagle3.draft_shape import DraftShape
from eagle3.target_weights import TargetWeights
from eagle3.vocab import build_draft_vocab
from eagle3.wiring import Site, Wiring
from eval.engines.local import LocalEngine

VOCAB, HIDDEN, LAYERS, POSITIONS = 320, 64, 8, 1024
WIRING = Wiring((Site(1), Site(4), Site(6)), "final", "llama", LAYERS, HIDDEN)  # not the engines' default, 2/4/5


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


def make_served(
    path: Path,
    target: Path,
    convention: str,
    wiring: Wiring = WIRING,
    draft_vocab: int = 280,
    stir: float = 0.0,
    **changes: Any,
) -> Path:
    """Write a served folder whose draft guesses right now and then, and whose guesses hang on every slot.

    Args:
        path, target: folders of the draft and of its target.
        convention: the engine build it is written for.
        wiring: what it is fed.
        draft_vocab: its vocabulary.
        stir: spread of the layer's random outputs; at 0 the layer adds nothing, so that no guess hangs on attention.
        changes: to `DraftShape`.
    """
    weights = TargetWeights(target)
    vocab = build_draft_vocab(torch.arange(VOCAB, 0, -1), draft_vocab)
    sizes: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "rope": {"rope_theta": 10000.0, "rope_scaling": None},
        "max_position_embeddings": POSITIONS,
    }
    shape = DraftShape(
        vocab_size=VOCAB, draft_vocab_size=draft_vocab, num_aux=3, rms_norm_eps=1e-6, **(sizes | changes)
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
    with torch.no_grad():
        mix = torch.cat([share * torch.eye(HIDDEN) for share in (0.6, -0.4, 1.0)], dim=1)  # [H, 3H]
        draft.fc.weight.copy_(mix)
        if stir:
            random = torch.Generator().manual_seed(1)
            for name, parameter in draft.midlayer.named_parameters():
                output = name.endswith(("o_proj.weight", "down_proj.weight"))
                if parameter.dim() == 2:
                    parameter.normal_(0.0, stir if output else 2 * parameter.shape[1] ** -0.5, generator=random)
    save_served(path, draft, wiring, target={}, convention_name=convention, vocab=vocab)
    card = "---\nbase_model: tiny\ntags: [eagle3]\n---\n# A model card, which no engine reads\n"
    (path / "README.md").write_text(card, encoding="utf-8")
    return path


def local_engine(target: Path, served: Path, wiring: Wiring) -> LocalEngine:
    """The reference: the same target and draft in this process, in float32, fed `wiring`."""
    draft, _, _ = load_served(served, TargetWeights(target).embedding())
    return LocalEngine(target, draft, wiring)
