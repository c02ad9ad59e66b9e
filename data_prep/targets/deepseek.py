"""Training of tiny DeepSeek-V3 models of Kimi-K2.5's depth: what `tiny_kimi` and the miniature of Kimi-K2.5 share.

Training 61 layers step by step would be slow on a CPU, so ten layers are trained first as a ten-layer model, then
spread over the full depth among layers that start close to the identity, and the whole is trained a little more. The
trained layers include 2, 30 and 58: the residual stream changes between the input of layer k and of layer k + 1 just
where a wiring that is off by one layer would show.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

ACTIVE = (0, 2, 9, 16, 23, 30, 37, 44, 51, 58)  # layers trained first
LAYERS = 61
BATCH, LENGTH = 8, 96  # sequences a step, tokens a sequence
IDENTITY_SCALE = 0.05  # output projections of the layers added last, against a trained layer's at its start


@dataclass(frozen=True)
class TinyShape:
    """What differs between the tiny models; widths are the same.

    Args:
        vocab: rows of embedding and head.
        positions: `max_position_embeddings`.
        rope: transformers' `rope_parameters`.
        bos, eos, pad: token ids.
        extra: further fields of `DeepseekV3Config`.
    """

    vocab: int
    positions: int
    rope: dict[str, Any]
    bos: int
    eos: int
    pad: int
    extra: dict[str, Any] = field(default_factory=dict)


def new_model(shape: TinyShape, layers: int) -> Any:
    """A fresh DeepseekV3ForCausalLM of `layers` layers, its first one dense, in float32."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, GenerationConfig

    config = DeepseekV3Config(
        vocab_size=shape.vocab,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_shared_experts=1,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=32,
        max_position_embeddings=shape.positions,
        num_mtp_layers=0,
        initializer_range=0.12,
        bos_token_id=shape.bos,
        eos_token_id=shape.eos,
        pad_token_id=shape.pad,
        tie_word_embeddings=False,
        rope_parameters=dict(shape.rope),
        dtype="float32",
        **shape.extra,
    )
    model = DeepseekV3ForCausalLM(config)
    model.set_experts_implementation("eager")
    model.generation_config = GenerationConfig(bos_token_id=shape.bos, eos_token_id=shape.eos, pad_token_id=shape.pad)
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(0.0, 0.3)
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj", "down_proj.weight")):
                weight.mul_(1.0 / math.sqrt(2 * len(ACTIVE)))
            if name.endswith("gate.weight"):
                weight.normal_(0.0, 0.12)
    return model


def spread(shallow: Any, model: Any) -> None:
    """Copy the trained layers to their places; the layers between them start close to the identity."""
    for name in ("embed_tokens", "norm"):
        getattr(model.model, name).load_state_dict(getattr(shallow.model, name).state_dict())
    model.lm_head.load_state_dict(shallow.lm_head.state_dict())
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj", "down_proj.weight")):
                weight.mul_(IDENTITY_SCALE)
    for source, place in enumerate(ACTIVE):
        model.model.layers[place].load_state_dict(shallow.model.layers[source].state_dict())


def batches(stream: Tensor, seed: int) -> Iterator[Tensor]:
    """Endless random windows of the stream `[BATCH, LENGTH + 1]`."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(0, len(stream) - LENGTH, (BATCH,), generator=generator).tolist()
        yield torch.stack([stream[s : s + LENGTH + 1] for s in starts])


def train(
    model: Any, windows: Iterator[Tensor], steps: int, peak: float, advance: Callable[[int], None] | None
) -> None:
    """Plain next-token training: AdamW, ten steps of warm-up, cosine decay to a fiftieth of `peak`."""
    wanted = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(wanted, lr=peak, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    model.train()
    for step in range(steps):
        rate = peak * min(1.0, (step + 1) / 10) * (0.02 + 0.49 * (1 + math.cos(math.pi * step / steps)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        tokens = next(windows)
        logits = model(tokens[:, :-1], use_cache=False).logits  # [BATCH, LENGTH, V]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(wanted, 1.0)
        optimizer.step()
        if advance:
            advance(1)
    model.eval()


@torch.no_grad()
def mean_loss(model: Any, stream: Tensor) -> float:
    """Mean next-token loss over a fixed part of the corpus, in nats a token."""
    windows = stream[: 16 * LENGTH].view(16, LENGTH)
    logits = model(windows[:, :-1], use_cache=False).logits
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()))


def round_to_bf16(model: Any) -> None:
    """Round every weight to a bf16 value and keep it in fp32, so that fp32 and bf16 readers have the same model."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.to(torch.bfloat16))
