"""The latent-attention draft against transformers' own DeepSeek-V3 attention, and against what an engine computes."""

from __future__ import annotations

import math

import torch
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from eagle3.draft import DraftCache
from eagle3.draft_build import build_draft
from eagle3.draft_shape import DraftShape
from eagle3.mla_draft import LatentAttention

YARN = {
    "rope_type": "yarn",
    "factor": 64.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
LATENT = {"q_lora_rank": 10, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 6}


def shape_of(**changes):
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "kind": "mla", **LATENT}
    rope = {"rope_theta": 50000.0, "rope_scaling": YARN}
    plain = {"hidden_size": 16, "intermediate_size": 24, "vocab_size": 40, "draft_vocab_size": 40, "num_aux": 3}
    return DraftShape(
        **{**plain, **sizes, "rms_norm_eps": 1e-6, "rope": rope, "max_position_embeddings": 262144, **changes}
    )


def of_transformers(shape):
    """transformers' attention on a doubled input: its hidden size is 2H, its output is cut to H by our `o_proj`."""
    config = DeepseekV3Config(
        hidden_size=2 * shape.hidden_size,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=262144,
        rope_parameters={"rope_theta": 50000.0, **YARN},
        rope_interleave=True,
        **LATENT,
    )
    config._attn_implementation = "eager"
    module = DeepseekV3Attention(config, 0).double()
    module.o_proj = torch.nn.Linear(4 * shape.v_head_dim, shape.hidden_size, bias=False).double()
    return module, DeepseekV3RotaryEmbedding(config)


def test_attention_is_transformers_own_far_out():
    """Same weights, 7 tokens from position 8192 on: rotation in pairs, yarn, its factor on the scores, both norms."""
    torch.manual_seed(0)
    shape = shape_of()
    theirs, rotary = of_transformers(shape)
    draft = build_draft(shape).double()
    ours = draft.midlayer.self_attn
    assert isinstance(ours, LatentAttention)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.4)
    ours.load_state_dict(theirs.state_dict())  # the very same names
    a, positions = torch.randn(7, 32, dtype=torch.float64), torch.arange(8192, 8199)
    cos, sin = rotary(a, positions[None])
    mask = torch.full((7, 7), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    wanted, _ = theirs(a[None], (cos.double(), sin.double()), mask)

    def attend(q, k, v):
        scores = torch.einsum("nhd,mhd->hnm", q, k) * draft.score_scale + mask[0]
        return torch.einsum("hnm,mhd->nhd", scores.softmax(-1), v)

    found = ours(ours.words(a[:, :16]), a[:, 16:], *draft.rope(positions, torch.float64), attend)
    torch.testing.assert_close(found, wanted[0], rtol=1e-5, atol=1e-6)


def test_an_engines_folded_form_gives_the_same_numbers():
    """Caching the latent and one rotated key, `kv_b` folded into query and output: what a server runs."""
    torch.manual_seed(1)
    draft = build_draft(shape_of()).double()
    attn, s = draft.midlayer.self_attn, draft.shape
    a, positions = torch.randn(5, 32, dtype=torch.float64), torch.arange(100, 105)
    cos, sin = draft.rope(positions, torch.float64)

    def turn(x):  # [n, heads, R], neighbours as complex numbers
        angle = torch.complex(cos[..., ::2], sin[..., ::2])
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * angle).flatten(-2)

    latent, key = (a @ attn.kv_a_proj_with_mqa.weight.T).split((s.kv_lora_rank, s.qk_rope_head_dim), -1)
    latent, key = attn.kv_a_layernorm(latent), turn(key[:, None])[:, 0]  # what the cache holds
    up_k, up_v = attn.kv_b_proj.weight.unflatten(0, (4, -1)).split((s.qk_nope_head_dim, s.v_head_dim), dim=1)
    q = attn.q_b_proj(attn.q_a_layernorm(a @ attn.q_a_proj.weight.T)).view(5, 4, -1)
    folded = torch.einsum("nhd,hdc->nhc", q[..., :8], up_k)
    scores = torch.einsum("nhc,mc->hnm", folded, latent) + torch.einsum("nhr,mr->hnm", turn(q[..., 8:]), key)
    scores = (scores * draft.score_scale).masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), -torch.inf)
    mixed = torch.einsum("hnm,mc->nhc", scores.softmax(-1), latent)
    wanted = attn.o_proj(torch.einsum("nhc,hdc->nhd", mixed, up_v).flatten(1))

    hidden, tokens = torch.randn(5, 16, dtype=torch.float64), torch.arange(5)
    layer = draft.midlayer
    layer.input_layernorm = layer.hidden_norm = torch.nn.Identity()
    draft.embed_tokens.weight.data[:5], hidden = a[:, :16], a[:, 16:]
    served = draft.serve_step(hidden, tokens, positions, DraftCache())
    mid = hidden + wanted
    torch.testing.assert_close(served, mid + layer.mlp(layer.post_attention_layernorm(mid)), rtol=1e-9, atol=1e-9)


def test_a_draft_can_be_counted_without_memory():
    """Kimi-K2.5's sizes under the meta device: 3 billion parameters, none of them allocated."""
    sizes = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    shape = shape_of(
        hidden_size=7168,
        intermediate_size=18432,
        num_attention_heads=64,
        num_key_value_heads=64,
        head_dim=192,
        v_head_dim=128,
        vocab_size=163840,
        draft_vocab_size=163840,
        **sizes,
    )
    with torch.device("meta"):
        draft = build_draft(shape)
    assert all(p.is_meta for p in draft.parameters())
    attention = 14336 * (1536 + 512 + 64) + 1536 * 64 * 192 + 512 * 64 * 256 + 64 * 128 * 7168 + 1536 + 512
    rest = 3 * 7168 * 7168 + 3 * 7168 * 18432 + 4 * 7168 + 2 * 163840 * 7168
    assert sum(p.numel() for p in draft.parameters()) == attention + rest
    assert math.isclose(draft.score_scale, 192**-0.5 * (0.1 * math.log(64) + 1) ** 2)
