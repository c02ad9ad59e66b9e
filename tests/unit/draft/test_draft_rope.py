"""Rotary positions: scaled as the target says, exact far out, the same for every engine."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eagle3.errors import ConfigError
from eagle3.rope import inverse_frequencies, rotate, served_scaling

YARN = {
    "type": "yarn",
    "factor": 64.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def transformers_cos_sin(scaling, theta, head_dim, position):
    parameters = {"rope_theta": theta, **(scaling or {"rope_type": "default"})}
    parameters["rope_type"] = parameters.pop("type", None) or parameters["rope_type"]
    config = LlamaConfig(
        hidden_size=head_dim,
        num_attention_heads=1,
        head_dim=head_dim,
        max_position_embeddings=262144,
        rope_parameters=parameters,
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.tensor([[position]]))
    return cos[0, 0], sin[0, 0]


@pytest.mark.parametrize("scaling", [None, LLAMA3, YARN, {"rope_type": "linear", "factor": 4.0}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_position_8192_is_that_of_transformers(make_draft, scaling, dtype):
    """Casting the model to bfloat16 must not round the frequencies: at 8192 that would turn the angles at random."""
    draft = make_draft(head_dim=32, rope={"rope_theta": 50000.0, "rope_scaling": scaling}).to(dtype)
    cos, sin = draft.rope(torch.tensor([8192]), torch.float32)
    wanted_cos, wanted_sin = transformers_cos_sin(scaling, 50000.0, 32, 8192)
    torch.testing.assert_close(cos[0, 0], wanted_cos, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sin[0, 0], wanted_sin, rtol=1e-5, atol=1e-5)


def test_scaling_is_not_dropped():
    plain, _ = inverse_frequencies(32, 50000.0, None, 4096)
    scaled, _ = inverse_frequencies(32, 50000.0, YARN, 262144)
    assert scaled[-1] == pytest.approx(plain[-1] / 64)
    assert scaled[0] == pytest.approx(plain[0])


def test_yarn_is_written_so_that_every_reader_gets_one_factor():
    """transformers reads attention_factor; engines multiply attn_factor onto 0.1 ln(factor) + 1, mscale or not."""
    kept = served_scaling(YARN)
    assert "mscale" not in kept and "mscale_all_dim" not in kept
    assert kept["type"] == kept["rope_type"] == "yarn"
    engine = kept["attn_factor"] * (0.1 * math.log(64.0) + 1.0)
    _, ours = inverse_frequencies(32, 50000.0, YARN, 262144)
    assert engine == pytest.approx(ours) == pytest.approx(1.0)
    assert served_scaling(kept) == kept


def test_plain_yarn_keeps_its_own_factor():
    plain = {k: v for k, v in YARN.items() if not k.startswith("mscale")}
    assert "attn_factor" not in served_scaling(plain)
    assert inverse_frequencies(32, 50000.0, plain, 262144)[1] == pytest.approx(0.1 * math.log(64.0) + 1.0)


def test_default_scaling_is_none():
    assert served_scaling({"rope_type": "default", "rope_theta": 1.0}) is None


@pytest.mark.parametrize(
    ("scaling", "says"),
    [({"rope_type": "longrope"}, "longrope"), ({"rope_type": "yarn", "factor": 4.0}, "original_max_position")],
)
def test_a_scaling_that_cannot_be_copied_is_refused(scaling, says):
    with pytest.raises(ConfigError, match=says) as caught:
        served_scaling(scaling)
    assert "\n" not in str(caught.value)


def test_rotation_depends_on_distance_alone(make_draft):
    draft = make_draft()
    q, k = torch.randn(1, 1, 8, dtype=torch.float64), torch.randn(1, 1, 8, dtype=torch.float64)

    def score(i, j):
        (cq, sq), (ck, sk) = (draft.rope(torch.tensor([p]), torch.float64) for p in (i, j))
        return float((rotate(q, cq, sq) * rotate(k, ck, sk)).sum())

    assert score(9, 4) == pytest.approx(score(105, 100), rel=1e-4)
    assert score(9, 4) != pytest.approx(score(9, 5), rel=1e-4)
