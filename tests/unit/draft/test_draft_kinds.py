"""Kinds of draft: what each one's folder says, what is refused, and the norms' formulas."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3.checkpoint import load_served, save_served, warm_start
from eagle3.config import DraftConfig
from eagle3.draft import DraftCache
from eagle3.draft_init import fresh_draft
from eagle3.errors import ConfigError, IntegrityError
from eagle3.vocab import build_draft_vocab, vocab_from_maps
from eagle3.wiring import Site, Wiring

WIRING = Wiring((Site(2), Site(5), Site(9)), "final", "llama", 12, 16)
LATENT_NAMES = {
    f"layers.0.self_attn.{name}.weight"
    for name in (
        *("q_a_proj", "q_a_layernorm", "q_b_proj"),
        *("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"),
    )
}


def save(draft, folder, convention="sglang-0.5.23"):
    vocab = vocab_from_maps(draft.d2t, draft.t2d, "here")
    return save_served(folder, draft, WIRING, target={}, convention_name=convention, vocab=vocab, dtype=torch.float32)


def edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    eagle = changes.pop("eagle", {})
    config["eagle_config"] |= eagle
    (folder / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.parametrize("draft_vocab", [17, 40])
def test_every_kind_comes_back_as_it_was(make_draft, variant, tmp_path, draft_vocab):
    draft = make_draft(torch.float32, **variant, draft_vocab_size=draft_vocab)
    save(draft, tmp_path / "served")
    back, _, config = load_served(tmp_path / "served", draft.embed_tokens.weight.detach(), wiring=WIRING)
    assert type(back) is type(draft) and back.shape == draft.shape
    features, tokens = torch.randn(6, 48), torch.arange(6)
    runs = [d.logits(d.serve_step(d.fuse(features), tokens, torch.arange(6), DraftCache())) for d in (draft, back)]
    assert torch.equal(*runs)
    names = set(load_file(tmp_path / "served" / "model.safetensors"))
    assert ({"d2t", "t2d"} <= names) == (draft_vocab == 17) and config["draft_vocab_size"] == draft_vocab
    started, vocab, _ = warm_start(tmp_path / "served", draft.shape, draft.embed_tokens.weight.detach())
    assert torch.equal(started.fc.weight, draft.fc.weight) and vocab.size == draft_vocab


def test_the_latent_kind_has_the_engines_names_and_keys(make_draft, variant, tmp_path):
    draft = make_draft(torch.float32, **variant)
    config = save(draft, tmp_path / "served")
    names = set(load_file(tmp_path / "served" / "model.safetensors"))
    mla = draft.shape.kind == "mla"
    assert {name for name in names if "self_attn" in name and mla} == (LATENT_NAMES if mla else set())
    assert ("layers.0.mlp.up_proj.weight" in names) == mla and ("midlayer.mlp.up_proj.weight" in names) != mla
    assert ("input_norm.weight" in names) == draft.shape.norm_before_fc
    assert sum(name.startswith("fc_norm.") for name in names) == (3 if draft.shape.fc_norm else 0)
    for switch in ("fc_norm", "norm_before_fc", "norm_output"):
        assert config.get(switch, False) is getattr(draft.shape, switch)  # at top level, where engines look
        assert switch not in config["eagle_config"]
    if not mla:
        assert (config["architectures"], config["model_type"]) == (["LlamaForCausalLMEagle3"], "llama")
        return
    assert (config["architectures"], config["model_type"]) == (["Eagle3DeepseekV2ForCausalLM"], "kimi_k2")
    sizes = {"q_lora_rank": 10, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
    assert {key: config[key] for key in sizes} == sizes and config["rope_interleave"] is True
    assert config["rope_scaling"] == {
        **{"rope_type": "yarn", "type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32},
        **{"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.7},
    }


def norm(x, weight):
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def test_norms_follow_their_formulas(make_draft):
    """norm_before_fc over the joined states, then fc_norm over each; the fed-back state is what the head reads."""
    draft = make_draft(fc_norm=True, norm_before_fc=True, norm_output=True)
    features = torch.randn(4, 48, dtype=torch.float64)
    joined = norm(features, draft.input_norm.weight)
    states = [norm(x, n.weight) for x, n in zip(joined.chunk(3, -1), draft.fc_norm, strict=True)]
    fused = torch.cat(states, -1) @ draft.fc.weight.T
    torch.testing.assert_close(draft.fuse(features), fused)
    arguments = (torch.arange(4), torch.arange(4))
    g = draft.serve_step(fused, *arguments, DraftCache())
    torch.testing.assert_close(draft.logits(g), g @ draft.lm_head.weight.T)
    plain = make_draft()
    plain.load_state_dict({k: v for k, v in draft.state_dict().items() if not k.startswith(("fc_norm", "input_norm"))})
    raw = plain.serve_step(fused, *arguments, DraftCache())
    torch.testing.assert_close(g, norm(raw, draft.norm.weight))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2"),
        ({"norm_before_residual": True}, "norm_before_residual is True"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"logit_scale": 0.5}, r"logit_scale is 0\.5"),
        ({"target_hidden_size": None}, "target_hidden_size is None"),
        ({"eagle": {"fc_norm": True}}, "fc_norm is True inside eagle_config"),
        ({"eagle": {"norm_output": True}}, "norm_output is True inside eagle_config"),
        ({"eagle": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is False"),
    ],
)
def test_switches_that_are_not_trained_are_refused(make_draft, tmp_path, changes, says):
    draft = make_draft(torch.float32)
    save(draft, tmp_path / "served")
    edit_config(tmp_path / "served", **changes)
    with pytest.raises(IntegrityError, match=says) as caught:
        load_served(tmp_path / "served", draft.embed_tokens.weight.detach())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"fc_norm": True}, r"missing fc_norm\.0\.weight.*missing fc_norm\.2\.weight"),
        ({"use_aux_norm": True}, r"missing fc_norm\.0\.weight"),
        ({"eagle": {"norm_before_fc": True}}, r"missing input_norm\.weight"),
    ],
)
def test_a_switch_set_by_hand_asks_for_its_weights(make_draft, tmp_path, changes, says):
    draft = make_draft(torch.float32)
    save(draft, tmp_path / "served")
    edit_config(tmp_path / "served", **changes)
    with pytest.raises(IntegrityError, match="is True, and the draft was trained with False"):
        load_served(tmp_path / "served", draft.embed_tokens.weight.detach())
    # As in another tool's folder, which does not say what was trained.
    edit_config(tmp_path / "served", redraft=None, eagle_aux_hidden_state_layer_ids=None)
    with pytest.raises(IntegrityError, match=says):
        load_served(tmp_path / "served", draft.embed_tokens.weight.detach(), wiring=WIRING)


def test_a_latent_draft_is_read_strictly(make_draft, latent, tmp_path):
    draft = make_draft(torch.float32, **latent)
    embedding, folder = draft.embed_tokens.weight.detach(), tmp_path / "served"
    save(draft, folder)
    for changes, says in (
        ({"rope_interleave": False}, "rope_interleave is False"),
        ({"norm_before_fc": True}, "norm_before_fc is set"),
        ({"architectures": ["Eagle3DeepseekV3ForCausalLM"]}, "not an EAGLE-3 draft"),
    ):
        before = (folder / "config.json").read_text()
        edit_config(folder, **changes)
        with pytest.raises(IntegrityError, match=says):
            load_served(folder, embedding)
        (folder / "config.json").write_text(before)
    tensors = load_file(folder / "model.safetensors")
    fused = tensors.pop("layers.0.self_attn.q_a_proj.weight")  # a fused name is dropped by the engine without a word
    tensors["layers.0.self_attn.fused_qkv_a_proj_with_mqa.weight"] = fused
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(IntegrityError, match=r"missing .*q_a_proj\.weight; unknown .*fused_qkv_a_proj_with_mqa"):
        load_served(folder, embedding)


def test_another_kind_is_no_start_for_a_draft(make_draft, variant, tmp_path):
    draft = make_draft(torch.float32, **variant)
    save(draft, tmp_path / "served")
    switched = replace(draft.shape, norm_output=not draft.shape.norm_output)
    with pytest.raises(ConfigError, match="norm_output is"):
        warm_start(tmp_path / "served", switched, draft.embed_tokens.weight.detach())


@pytest.mark.parametrize(
    ("convention", "switches", "says"),
    [
        ("sglang-0.5.9", {"fc_norm": True}, r"sglang-0\.5\.9 has no fc_norm; SGLang 0\.5\.13 has"),
        ("sglang-0.5.9-patched", {"norm_output": True}, "no norm_output"),
        ("sglang-0.5.14", {"norm_before_fc": True, "fc_norm": True}, r"no norm_before_fc; SGLang 0\.5\.23 has"),
    ],
)
def test_no_folder_is_written_for_a_build_that_lacks_the_switch(make_draft, tmp_path, convention, switches, says):
    with pytest.raises(ConfigError, match=says):
        save(make_draft(torch.float32, **switches), tmp_path / "served", convention)
    assert not list(tmp_path.iterdir())
    save(make_draft(torch.float32), tmp_path / "served", convention)


def test_one_aux_site_is_not_served_by_an_engine_that_would_skip_fc(make_draft, tmp_path):
    draft = make_draft(torch.float32, num_aux=1)
    one = replace(WIRING, aux=(Site(5),))
    saved = {"target": {}, "vocab": vocab_from_maps(draft.d2t, draft.t2d, "here")}
    with pytest.raises(ConfigError, match="leaves out fc"):
        save_served(tmp_path / "served", draft, one, convention_name="sglang-0.5.23", **saved)
    save_served(tmp_path / "served", draft, one, convention_name="vllm", **saved)


def test_a_fresh_draft_of_every_kind_starts_from_the_targets_end(make_draft, variant):
    shape = make_draft(**variant, draft_vocab_size=17).shape
    vocab = build_draft_vocab(torch.arange(40), 17)
    parts = {"embedding": torch.randn(40, 16), "head": torch.randn(40, 16), "final_norm": torch.rand(16)}
    draft = fresh_draft(shape, vocab, DraftConfig(vocab_size=17, init_fc="last"), **parts, seed=3)
    assert torch.equal(draft.lm_head.weight, parts["head"][23:]) and torch.equal(draft.norm.weight, parts["final_norm"])
    fused = draft.fuse(torch.randn(2, 48))
    arguments = (torch.arange(2), torch.arange(2), DraftCache())
    g = draft.serve_step(fused, *arguments)  # the layer adds nothing yet
    assert torch.equal(g, draft.norm(fused) if shape.norm_output else fused)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"kind": "gqa"}, "draft.kind"),
        ({"q_lora_rank": 4}, "draft.q_lora_rank"),
        ({"kind": "mla", "norm_before_fc": True}, "draft.norm_before_fc"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(changes, says):
    with pytest.raises(ConfigError, match=says):
        DraftConfig(**changes).validate()


def test_sizes_of_latent_attention_must_fit(make_draft, latent):
    for changes, says in (
        ({"q_lora_rank": 0}, "q_lora_rank"),
        ({"qk_rope_head_dim": 5}, "qk_rope_head_dim"),
        ({"head_dim": 8}, "12, the two parts"),
        ({"num_key_value_heads": 2}, "not grouped"),
        ({"rope": {"rope_theta": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}}, "latent-attention"),
    ):
        with pytest.raises(ConfigError, match=says):
            make_draft(**{**latent, **changes})
