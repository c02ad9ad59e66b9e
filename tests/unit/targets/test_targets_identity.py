"""TargetIdentity and what a draft copies from config.json."""

from __future__ import annotations

import dataclasses

import pytest

from eagle3.errors import WiringError
from eagle3.target_identity import TargetIdentity, describe_quantization
from eagle3.target_weights import rope_parameters

ONE = TargetIdentity("LlamaForCausalLM", "llama", 30, 576, 49152, "a" * 64, "b" * 64, "float32", "none")


def test_identity_goes_through_json_and_back() -> None:
    assert TargetIdentity.from_dict(ONE.to_dict()) == ONE
    for damaged in ({}, ONE.to_dict() | {"extra": 1}):
        with pytest.raises(WiringError, match="not a target identity"):
            TargetIdentity.from_dict(damaged)


def test_check_same_names_each_difference() -> None:
    ONE.check_same(ONE, where="store", mend="x")
    other = dataclasses.replace(ONE, hidden_size=64, weights_fingerprint="c" * 64)
    with pytest.raises(WiringError) as err:
        ONE.check_same(other, where="runs/a/store", mend="extract again")
    line = str(err.value)
    assert "hidden_size is 64; expected 576" in line and "weights_fingerprint" in line
    assert "runs/a/store" in line and "extract again" in line and "num_layers" not in line


def test_quantization_phrase() -> None:
    scheme = {"weights": {"num_bits": 4, "group_size": 32, "type": "int"}}
    quant = {"quant_method": "compressed-tensors", "config_groups": {"group_0": scheme}}
    assert describe_quantization({}, {"quantization_config": quant}) == "compressed-tensors int4 group 32"
    assert describe_quantization({"quantization_config": {"quant_method": "fp8"}}, {}) == "fp8"
    assert describe_quantization({}, {}) == "none"


def test_rope_both_spellings_agree() -> None:
    yarn = {"factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "mscale": 1.0}
    base = {"max_position_embeddings": 262144, "rms_norm_eps": 1e-5}
    old = rope_parameters(base | {"rope_theta": 50000.0, "rope_scaling": yarn | {"type": "yarn"}})
    new = rope_parameters(base | {"rope_parameters": yarn | {"rope_theta": 50000.0, "rope_type": "yarn"}})
    both = base | {"rope_theta": 50000.0, "rope_scaling": yarn | {"type": "yarn"}}
    both |= {"rope_parameters": yarn | {"rope_theta": 50000.0, "rope_type": "yarn"}}
    assert old == new == rope_parameters(both)
    assert old["rope_theta"] == 50000.0 and old["rope_scaling"]["factor"] == 64.0
    assert old["rope_scaling"]["rope_type"] == old["rope_scaling"]["type"] == "yarn"
    assert "rope_theta" not in old["rope_scaling"]
    assert (old["max_position_embeddings"], old["rms_norm_eps"]) == (262144, 1e-5)


def test_rope_default_means_no_scaling() -> None:
    config = {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}
    assert rope_parameters(config)["rope_scaling"] is None and rope_parameters(config)["rope_theta"] == 7.0
    assert rope_parameters({"rope_theta": 5.0, "rope_scaling": None})["rope_theta"] == 5.0
    layered = {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 9.0}}}
    assert rope_parameters(layered)["rope_theta"] == 9.0
