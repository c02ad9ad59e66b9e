"""The served folder: what is written, what is refused, what comes back."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3.atomic import sha256_file
from eagle3.checkpoint import load_served, load_state, save_served, sealed_config, warm_start
from eagle3.config import DraftConfig
from eagle3.conventions import convention
from eagle3.draft import DraftCache
from eagle3.draft_init import fresh_draft
from eagle3.errors import ConfigError, IntegrityError, WiringError
from eagle3.vocab import build_draft_vocab, vocab_from_maps
from eagle3.wiring import Site, Wiring

WIRING = Wiring((Site(2), Site(5), Site(9)), "final", "llama", 12, 16)
NAMES = {
    "fc.weight",
    "midlayer.hidden_norm.weight",
    "midlayer.input_layernorm.weight",
    "midlayer.post_attention_layernorm.weight",
    *(f"midlayer.self_attn.{p}_proj.weight" for p in "qkvo"),
    *(f"midlayer.mlp.{p}_proj.weight" for p in ("gate", "up", "down")),
    "norm.weight",
    "lm_head.weight",
}


def vocab_of(draft):
    return vocab_from_maps(draft.d2t, draft.t2d, "here")


@pytest.fixture
def served(make_draft, tmp_path):
    """A folder, its draft (float32, 17 of 40 tokens) and its config."""
    draft = make_draft(torch.float32, draft_vocab_size=17)
    config = save_served(
        tmp_path / "served",
        draft,
        WIRING,
        target={"name": "tiny"},
        convention_name="sglang-0.5.23",
        vocab=vocab_of(draft),
        dtype=torch.float32,
    )
    return tmp_path / "served", draft, config


def edit(folder, change):
    """Rewrite the folder's tensors, as if they had been exported so."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    edit_config(folder, lambda _: None)


def edit_config(folder, change):
    """Change config.json likewise: the checksums agree."""
    config = json.loads((folder / "config.json").read_text())
    change(config)
    config = sealed_config(config, sha256_file(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps(config))


def test_names_are_exactly_those_an_engine_looks_for(served):
    folder, _, _ = served
    tensors = load_file(folder / "model.safetensors")
    assert set(tensors) == NAMES | {"d2t", "t2d"}
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    assert sorted(p.name for p in folder.parent.iterdir()) == ["served"]


def test_the_config_carries_ids_for_the_named_engine_and_the_wiring(served):
    folder, _, config = served
    assert json.loads((folder / "config.json").read_text()) == config
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [1, 4, 8], "use_aux_hidden_state": True}
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 5, 9]  # where vLLM looks first, as vLLM counts
    assert "target_hidden_size" not in config
    block = config["redraft"]
    assert Wiring.from_dict(block["wiring"]) == WIRING and block["convention"] == "sglang-0.5.23"
    for name, ids in block["ids"].items():
        assert convention(name).parse_like(ids, WIRING).aux == WIRING.aux


def test_loading_gives_the_same_draft(served):
    folder, draft, _ = served
    embedding = draft.embed_tokens.weight.detach()
    back, wiring, _ = load_served(folder, embedding, wiring=WIRING)
    assert wiring == WIRING and back.shape == draft.shape
    for name, tensor in draft.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name
    features, tokens = torch.randn(6, 48), torch.arange(6)
    runs = [d.logits(d.serve_step(d.fuse(features), tokens, torch.arange(6), DraftCache())) for d in (draft, back)]
    assert torch.equal(*runs)


def test_a_full_vocabulary_draft_has_no_maps(make_draft, tmp_path):
    draft = make_draft(torch.float32)
    save_served(
        tmp_path / "s",
        draft,
        WIRING,
        target={},
        convention_name="vllm",
        vocab=build_draft_vocab(torch.ones(40), 40),
        with_embedding=True,
    )
    assert set(load_file(tmp_path / "s" / "model.safetensors")) == NAMES | {"embed_tokens.weight"}
    back, _, config = load_served(tmp_path / "s")
    assert back.t2d.all() and not back.d2t.any()
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 5, 9]
    torch.testing.assert_close(back.fc.weight, draft.fc.weight.bfloat16().float())


@pytest.mark.parametrize("name", sorted(NAMES | {"d2t"}))
def test_a_missing_name_is_refused(served, name):
    folder, draft, _ = served
    edit(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(IntegrityError, match=f"missing {name}") as caught:
        load_served(folder, draft.embed_tokens.weight.detach())
    assert "\n" not in str(caught.value)


def test_unknown_names_and_wrong_shapes_are_all_listed(served):
    folder, draft, _ = served

    def spoil(tensors):
        tensors["layers.0.self_attn.q_proj.weight"] = torch.zeros(2)
        tensors["midlayer.self_attn.q_proj.bias"] = torch.zeros(2)
        tensors["lm_head.weight"] = torch.zeros(18, 16)

    edit(folder, spoil)
    with pytest.raises(IntegrityError) as caught:
        load_served(folder, draft.embed_tokens.weight.detach())
    line = str(caught.value)
    assert "unknown layers.0.self_attn.q_proj.weight" in line and "unknown midlayer.self_attn.q_proj.bias" in line
    assert "lm_head.weight is [18, 16], expected [17, 16]" in line


def test_an_absent_embedding_or_one_of_another_target_is_refused(served):
    folder, _, _ = served
    with pytest.raises(IntegrityError, match="no embedding"):
        load_served(folder)
    with pytest.raises(IntegrityError, match=r"embed_tokens\.weight is \[41, 16\]"):
        load_served(folder, torch.zeros(41, 16))


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_one_changed_bit_is_refused_by_the_files_name(served, file):
    folder, draft, _ = served
    content = (folder / file).read_bytes()
    at = content.index(b"256,") if file == "config.json" else len(content) - 1  # max_position_embeddings
    (folder / file).write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    for read in (load_served, lambda *given: warm_start(folder, draft.shape, given[1])):
        with pytest.raises(IntegrityError, match=rf"exported \[.*{file}\]: .*checksum differs.*To mend: export"):
            read(folder, draft.embed_tokens.weight.detach())


def test_another_wiring_is_refused(served):
    folder, draft, _ = served
    other = replace(WIRING, aux=(Site(3), Site(6), Site(10)))
    with pytest.raises(WiringError, match="slot 0 holds layer 2; expected layer 3"):
        load_served(folder, draft.embed_tokens.weight.detach(), wiring=other)


@pytest.mark.parametrize("nested", [True, False])
def test_ids_edited_by_hand_are_refused(served, nested):
    folder, draft, _ = served
    edit_config(
        folder,
        lambda c: (c["eagle_config"] if nested else c).update(eagle_aux_hidden_state_layer_ids=[3, 6, 10]),
    )
    with pytest.raises(WiringError, match="slot 0 holds layer"):
        load_served(folder, draft.embed_tokens.weight.detach())


def test_a_folder_of_another_tool_needs_the_callers_word(served):
    folder, draft, _ = served
    edit_config(folder, lambda c: c.pop("redraft"))
    edit(folder, lambda tensors: tensors.pop("t2d"))
    embedding = draft.embed_tokens.weight.detach()
    with pytest.raises(WiringError, match="names no wiring"):
        load_served(folder, embedding)
    back, wiring, _ = load_served(folder, embedding, wiring=WIRING)
    assert wiring == WIRING and torch.equal(back.t2d, draft.t2d)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_a_broken_or_missing_file_is_refused(served, file):
    folder, draft, _ = served
    embedding = draft.embed_tokens.weight.detach()
    content = (folder / file).read_bytes()
    (folder / file).write_bytes(content[: len(content) // 2])
    with pytest.raises(IntegrityError, match=file):
        load_served(folder, embedding)
    (folder / file).unlink()
    with pytest.raises(IntegrityError, match=r"not found|no safetensors"):
        load_served(folder, embedding)


def test_a_draft_that_is_not_finite_leaves_the_old_folder(served):
    folder, draft, config = served
    with torch.no_grad():
        draft.fc.weight[0, 0] = float("nan")
    with pytest.raises(IntegrityError, match=r"not finite: fc\.weight"):
        save_served(folder, draft, WIRING, target={}, convention_name="sglang-0.5.23", vocab=vocab_of(draft))
    assert json.loads((folder / "config.json").read_text()) == config
    assert sorted(p.name for p in folder.parent.iterdir()) == ["served"]


def test_a_wiring_of_another_width_or_beyond_the_engine_is_refused(make_draft, tmp_path):
    draft = make_draft(torch.float32)
    vocab = build_draft_vocab(torch.ones(40), 40)
    with pytest.raises(WiringError, match="width"):
        two = replace(WIRING, aux=(Site(2), Site(5)))
        save_served(tmp_path / "s", draft, two, target={}, convention_name="vllm", vocab=vocab)
    with pytest.raises(WiringError):
        backwards = replace(WIRING, aux=(Site(9), Site(5), Site(2)))
        save_served(tmp_path / "s", draft, backwards, target={}, convention_name="vllm", vocab=vocab)
    assert not list(tmp_path.iterdir())


def test_warm_start_keeps_weights_and_vocabulary_and_tells_the_wiring(served):
    folder, draft, _ = served
    embedding = torch.randn(40, 16)
    started, vocab, wiring = warm_start(folder, draft.shape, embedding)
    assert torch.equal(vocab.d2t, draft.d2t) and torch.equal(started.fc.weight, draft.fc.weight)
    assert torch.equal(started.embed_tokens.weight, embedding) and wiring == WIRING
    with pytest.raises(ConfigError, match="draft_vocab_size is 17, wanted 20"):
        warm_start(folder, replace(draft.shape, draft_vocab_size=20), embedding)


def test_a_trained_state_without_embedding_loads_strictly(make_draft):
    source, target = make_draft(torch.float32, seed=1), make_draft(torch.float32, seed=2)
    state = {k: v for k, v in source.state_dict().items() if k != "embed_tokens.weight"}
    load_state(target, state, "final.safetensors")
    assert torch.equal(target.midlayer.mlp.up_proj.weight, source.midlayer.mlp.up_proj.weight)
    with pytest.raises(IntegrityError, match=r"missing norm\.weight"):
        load_state(target, {k: v for k, v in state.items() if k != "norm.weight"}, "final.safetensors")


def test_a_fresh_draft_says_what_the_last_site_says(make_draft):
    """init_fc=last and init_lm_head=target: before training fc passes the last slot on and the head is the target's."""
    shape = make_draft(draft_vocab_size=17).shape
    vocab = build_draft_vocab(torch.arange(40), 17)
    parts = {"embedding": torch.randn(40, 16), "head": torch.randn(40, 16), "final_norm": torch.rand(16)}
    config = DraftConfig(vocab_size=17, init_fc="last", init_lm_head="target")
    draft = fresh_draft(shape, vocab, config, **parts, seed=3)
    features = torch.randn(2, 48)
    assert torch.equal(draft.fuse(features), features[:, 32:])
    assert torch.equal(draft.lm_head.weight, parts["head"][23:]) and torch.equal(draft.norm.weight, parts["final_norm"])
    again = fresh_draft(shape, vocab, config, **parts, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(draft.parameters(), again.parameters(), strict=True))
    with pytest.raises(ConfigError, match="target head"):
        fresh_draft(shape, vocab, config, **{**parts, "head": torch.randn(41, 16)}, seed=3)
