"""The reference backend reads the tensors that the vocabulary of sites names, for several kinds of model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from data_prep.capture.hf import HFCapture
from eagle3.errors import DataError, IntegrityError, RedraftError, WiringError
from eagle3.wiring import Site, Wiring

IDS = [[5, 9, 3, 17, 40, 2, 2, 63], [7, 7, 30], [1, 2, 3, 4, 5]]


def wiring(*layers: int, teacher: str = "final", model_type: str = "llama", n: int = 6, h: int = 16) -> Wiring:
    return Wiring(tuple(Site(k) for k in layers), teacher, model_type, n, h)


def batch(ids: list[list[int]] = IDS) -> list[tuple[str, list[int], list[int]]]:
    return [(f"r{i}", tokens, [0] + [1] * (len(tokens) - 1)) for i, tokens in enumerate(ids)]


def hidden_states(model: nn.Module, ids: list[int]) -> list[torch.Tensor]:
    with torch.no_grad():
        out = model(input_ids=torch.tensor([ids]), output_hidden_states=True)
    return [state[0] for state in out.hidden_states]  # (n + 1) x [T, H]


def test_sites_are_the_inputs_of_their_layers(llama: nn.Module) -> None:
    capture = HFCapture.from_model(llama, wiring(1, 3, 5), out_dtype=torch.float32)
    for record in batch():
        (sample,) = capture.run([record])
        want = hidden_states(llama, record[1])
        for k in (1, 3, 5):
            assert torch.equal(sample.sites[f"layer_{k}"], want[k])
        assert sample.record_id == record[0]
        assert sample.input_ids.tolist() == record[1] and sample.loss_mask.tolist() == [bool(m) for m in record[2]]


def test_final_is_before_the_norm_and_final_normed_after_it(llama: nn.Module) -> None:
    after = hidden_states(llama, IDS[0])[-1]  # transformers norms its last entry
    (plain,) = HFCapture.from_model(llama, wiring(2), out_dtype=torch.float32).run(batch()[:1])
    (normed,) = HFCapture.from_model(llama, wiring(2, teacher="final_normed"), out_dtype=torch.float32).run(batch()[:1])
    assert (plain.teacher, normed.teacher) == ("final", "final_normed")
    assert torch.equal(normed.final, after)
    assert not torch.allclose(plain.final, after, atol=0.1)
    with torch.no_grad():
        assert torch.equal(llama.model.norm(plain.final), after)


def test_padding_and_company_do_not_change_a_record(llama: nn.Module) -> None:
    capture = HFCapture.from_model(llama, wiring(2, 4), out_dtype=torch.float32)
    alone = [capture.run([record])[0] for record in batch()]
    for one, together in zip(alone, capture.run(batch()), strict=True):
        assert together.tokens == one.tokens
        for name, state in {**one.sites, "final": one.final}.items():
            other = together.final if name == "final" else together.sites[name]
            torch.testing.assert_close(other, state, atol=2e-5, rtol=1e-4)


def test_repeated_calls_give_each_its_own_states(llama: nn.Module) -> None:
    capture = HFCapture.from_model(llama, wiring(2), out_dtype=torch.float32)
    first = capture.run(batch()[:1])[0]
    kept = first.final.clone()
    second = capture.run(batch()[1:2])[0]
    assert torch.equal(first.final, kept) and second.final.shape == (3, 16)
    assert torch.equal(capture.run(batch()[:1])[0].final, kept)


class AddConstant(nn.Module):
    """A decoder layer that adds 2**k: what a site holds tells which layers ran before it."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k

    def forward(self, hidden_states: torch.Tensor, **_: object) -> torch.Tensor:
        return hidden_states + 2.0**self.k


def test_layers_that_add_known_constants() -> None:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=8, num_hidden_layers=6, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config).eval()
    for k in range(6):
        model.model.layers[k] = AddConstant(k)
    model.model.embed_tokens.weight.data.zero_()
    (sample,) = HFCapture.from_model(model, wiring(1, 4, 5), out_dtype=torch.float32).run(batch()[:1])
    seen = {name: state.unique().tolist() for name, state in sample.sites.items()}
    assert seen == {"layer_1": [1.0], "layer_4": [15.0], "layer_5": [31.0]}
    assert sample.final.unique().tolist() == [63.0]


def test_the_embedding_is_not_stored_and_no_logits_are_computed(llama: nn.Module) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the language-model head was called")

    handle = llama.lm_head.register_forward_pre_hook(refuse)
    try:
        (sample,) = HFCapture.from_model(llama, wiring(0, 2, 3)).run(batch()[:1])
    finally:
        handle.remove()
    assert sorted(sample.sites) == ["layer_2", "layer_3"]
    assert sample.final.dtype == torch.bfloat16


def deepseek_config() -> transformers.PretrainedConfig:
    return transformers.DeepseekV3Config(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        moe_intermediate_size=8,
        num_hidden_layers=6,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=4,
    )


def other_models() -> dict[str, transformers.PretrainedConfig]:
    small = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 6, "num_attention_heads": 2}
    return {
        "qwen3": transformers.Qwen3Config(**small, intermediate_size=32, num_key_value_heads=1, head_dim=8),
        "gpt2": transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=6, n_head=2),
        "opt": transformers.OPTConfig(**small, ffn_dim=32, word_embed_proj_dim=16),
        "deepseek_v3": deepseek_config(),
    }


@pytest.mark.parametrize("name", ["qwen3", "gpt2", "opt", "deepseek_v3"])
def test_other_architectures(name: str) -> None:
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(other_models()[name]).eval()
    capture = HFCapture.from_model(model, wiring(1, 3, 5, model_type=name), out_dtype=torch.float32)
    (sample,) = capture.run(batch()[:1])
    want = hidden_states(model, IDS[0])
    for k in (1, 3, 5):
        torch.testing.assert_close(sample.sites[f"layer_{k}"], want[k], atol=1e-6, rtol=1e-5)
    assert not torch.allclose(sample.final, want[6], atol=1e-3)  # the last entry is normed


def test_a_language_model_wrapper() -> None:
    config = transformers.Kimi_K25Config(
        text_config=deepseek_config(),
        vision_config={"num_hidden_layers": 6, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16},
        tie_word_embeddings=False,
    )
    model = transformers.Kimi_K25ForConditionalGeneration(config).eval()
    capture = HFCapture.from_model(model, wiring(2, 3, model_type="kimi_k25"), out_dtype=torch.float32)
    (sample,) = capture.run(batch()[:1])
    with torch.no_grad():
        want = model.model.language_model(input_ids=torch.tensor([IDS[0]]), output_hidden_states=True).hidden_states
    assert torch.equal(sample.sites["layer_2"], want[2][0]) and torch.equal(sample.sites["layer_3"], want[3][0])


def test_an_embedding_that_the_target_changes_is_refused() -> None:
    model = transformers.AutoModelForCausalLM.from_config(other_models()["gpt2"]).eval()  # adds positions to it
    capture = HFCapture.from_model(model, wiring(0, 2, model_type="gpt2"))
    with pytest.raises(WiringError, match="changes its embedding before layer 0"):
        capture.run(batch())


def test_loading_from_a_folder(llama: nn.Module, tmp_path: Path) -> None:
    llama.save_pretrained(tmp_path)
    capture = HFCapture(tmp_path, wiring(2, 3), device="cpu", out_dtype=torch.float32)
    (sample,) = capture.run(batch()[:1])
    assert torch.equal(sample.sites["layer_3"], hidden_states(llama, IDS[0])[3])
    assert capture.info == {"backend": "hf", "compute_dtype": "float32"}


def test_bfloat16_loading_keeps_the_rotary_frequencies(llama: nn.Module, tmp_path: Path) -> None:
    llama.save_pretrained(tmp_path)
    capture = HFCapture(tmp_path, wiring(2), device="cpu", compute_dtype="bfloat16")
    body = capture.decoder.body
    assert body.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16  # type: ignore[union-attr,index]
    assert torch.equal(body.rotary_emb.inv_freq, llama.model.rotary_emb.inv_freq)  # type: ignore[union-attr,arg-type]


def test_incomplete_weights_are_refused_not_filled_in(llama: nn.Module, tmp_path: Path) -> None:
    state = {k: v for k, v in llama.state_dict().items() if k != "model.layers.4.mlp.up_proj.weight"}
    llama.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(IntegrityError, match=r"model\.layers\.4\.mlp\.up_proj\.weight"):
        HFCapture(tmp_path, wiring(2), device="cpu")


def test_a_missing_head_does_not_matter(llama: nn.Module, tmp_path: Path) -> None:
    state = {k: v for k, v in llama.state_dict().items() if k != "lm_head.weight"}
    llama.save_pretrained(tmp_path, state_dict=state)
    HFCapture(tmp_path, wiring(2), device="cpu").run(batch())


def test_unloadable_folders_give_one_line(llama: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(RedraftError, match="target folder not found"):
        HFCapture(tmp_path / "none", wiring(2), device="cpu")
    llama.save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(RedraftError, match="cannot load the target") as caught:
        HFCapture(tmp_path, wiring(2), device="cpu")
    assert "\n" not in str(caught.value)


def test_another_shape_than_the_wiring_is_refused(llama: nn.Module) -> None:
    with pytest.raises(WiringError, match="found 6 layers, expected 7"):
        HFCapture.from_model(llama, wiring(2, n=7))
    with pytest.raises(WiringError, match="hidden size 16, expected 32"):
        HFCapture.from_model(llama, wiring(2, h=32))


@pytest.mark.parametrize(
    ("ids", "mask", "words"),
    [([], [], "no tokens"), ([1, 64], [0, 1], "ids 1 to 64"), ([1, -1], [0, 1], "ids -1"), ([1, 2], [1], "1 mask")],
)
def test_bad_records_are_named(llama: nn.Module, ids: list[int], mask: list[int], words: str) -> None:
    with pytest.raises(DataError, match=f"record bad.*{words}"):
        HFCapture.from_model(llama, wiring(2)).run([("good", [1, 2], [0, 1]), ("bad", ids, mask)])


def test_states_that_are_not_finite_are_refused() -> None:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=8, num_hidden_layers=6, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.model.embed_tokens.weight.data[40] = float("nan")
    with pytest.raises(RedraftError, match=r"not finite.*record r0"):
        HFCapture.from_model(model, wiring(2)).run(batch())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_gpu_gives_the_states_of_the_cpu(llama: nn.Module, tmp_path: Path) -> None:
    llama.save_pretrained(tmp_path)
    ids = [list(range(1, 60)), *IDS]
    there = HFCapture(tmp_path, wiring(0, 2, 5), device="cuda", compute_dtype="float32", out_dtype=torch.float32)
    here = HFCapture(tmp_path, wiring(0, 2, 5), device="cpu", out_dtype=torch.float32)
    for a, b in zip(there.run(batch(ids)), here.run(batch(ids)), strict=True):
        torch.testing.assert_close(a.final, b.final, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(a.sites["layer_5"], b.sites["layer_5"], atol=1e-3, rtol=1e-3)
        assert a.final.device.type == "cpu"
