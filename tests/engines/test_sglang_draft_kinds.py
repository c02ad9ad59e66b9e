"""Every kind of draft in the real SGLang: its loader takes every name and leaves nothing, its forward is ours."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from acceptance import make_bench, run
from drafts import tiny_kimi_run

from eagle3.checkpoint import save_served
from eagle3.draft import Eagle3Draft
from eagle3.draft_build import build_draft
from eagle3.draft_shape import DraftShape
from eagle3.vocab import build_draft_vocab
from eagle3.wiring import Site, Wiring

WIRING = Wiring((Site(3), Site(31), Site(59)), "final", "deepseek_v3", 61, 64)
HEADS = {"num_key_value_heads": 1, "head_dim": 32}
LATENT = {
    **{"kind": "mla", "num_key_value_heads": 2, "head_dim": 32, "q_lora_rank": 24, "kv_lora_rank": 32},
    **{"qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 32},
}
NEWER = {"fc_norm": True, "norm_output": True}
VOCAB, SUBSET = 1024, 300
KINDS: dict[str, dict[str, Any]] = {
    "llama": {**HEADS, "draft_vocab_size": SUBSET},
    "llama-all": {**HEADS, "draft_vocab_size": VOCAB},
    "llama-3.1": {**HEADS, **NEWER, "norm_before_fc": True, "draft_vocab_size": SUBSET},
    "mla": {**LATENT, "draft_vocab_size": VOCAB},
    "mla-3.1": {**LATENT, **NEWER, "draft_vocab_size": SUBSET},
}
# Where SGLang keeps tensors side by side in one parameter.
JOINED = {
    **{f"self_attn.{part}_proj": "self_attn.qkv_proj" for part in "qkv"},
    **{f"mlp.{part}_proj": "mlp.gate_up_proj" for part in ("gate", "up")},
    **{f"self_attn.{part}": "self_attn.fused_qkv_a_proj_with_mqa" for part in ("q_a_proj", "kv_a_proj_with_mqa")},
}
YARN = {
    **{"rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0},
    **{"beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
}


def marked_draft(switches: dict[str, Any]) -> Eagle3Draft:
    """A draft each of whose tensors holds one number of its own, exact in bfloat16."""
    draft = build_draft(
        DraftShape(
            hidden_size=64,
            intermediate_size=96,
            num_attention_heads=2,
            vocab_size=VOCAB,
            num_aux=3,
            rms_norm_eps=1e-6,
            rope={"rope_theta": 50000.0, "rope_scaling": YARN},
            max_position_embeddings=262144,
            **switches,
        )
    )
    vocab = build_draft_vocab(torch.arange(VOCAB), draft.shape.draft_vocab_size)
    draft.d2t.copy_(vocab.d2t)
    draft.t2d.copy_(vocab.t2d)
    with torch.no_grad():
        for place, parameter in enumerate(draft.parameters()):
            parameter.fill_((place + 1) / 8)
    return draft


@pytest.fixture(scope="module")
def loaded(
    sglang_python: Path,
    sglang_env: dict[str, str],
    sglang_args: list[str],
    tiny_kimi_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[Eagle3Draft, dict[str, Any]]]:
    """Each kind's draft, and what SGLang made of its folder: one process for all of them."""
    work, drafts = tmp_path_factory.mktemp("kinds"), {}
    for name, switches in KINDS.items():
        draft = drafts[name] = marked_draft(switches)
        vocab = build_draft_vocab(torch.arange(VOCAB), draft.shape.draft_vocab_size)
        save_served(work / name, draft, WIRING, target={}, convention_name="sglang-0.5.23", vocab=vocab)
    script = Path(__file__).parent / "sglang_cpu" / "load_drafts.py"
    folders = [str(work / name) for name in KINDS]
    command = [str(sglang_python), str(script), str(work / "report.json"), str(tiny_kimi_path), *folders, "--"]
    done = subprocess.run(
        [*command, *sglang_args],
        env={**os.environ, **sglang_env},
        cwd=work,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads((work / "report.json").read_text())
    return {name: (draft, report[str(work / name)]) for name, draft in drafts.items()}


def landing(name: str) -> str:
    """The engine's parameter that a served tensor becomes (a part of)."""
    for part, joined in JOINED.items():
        name = name.replace(f".{part}.", f".{joined}.")
    return name if name.startswith("lm_head") else f"model.{name}"


@pytest.mark.parametrize("name", sorted(KINDS))
def test_every_tensor_lands_and_nothing_is_left_as_it_was(loaded: dict[str, Any], name: str) -> None:
    draft, report = loaded[name]
    own = {"llama": "layers.0", "mla": "midlayer"}[draft.shape.kind]
    expected: dict[str, set[float | None]] = {}
    for tensor, parameter in draft.named_parameters():
        place = landing(tensor.replace(f"{draft.layer_name}.", f"{own}.", 1))
        expected.setdefault(place, set()).add(float(parameter.flatten()[0]))
    expected["model.embed_tokens.weight"] = {None}  # the target's takes its place
    found = {key: set(values) for key, values in report["parameters"].items()}
    if not draft.shape.full_vocab:
        found["lm_head.weight"] -= {0.0}  # rows that pad the vocabulary to a multiple of 64
    assert found == expected
    assert report["norm_output"] is draft.shape.norm_output
    ids = None if draft.shape.full_vocab else draft.to_target_ids(torch.arange(SUBSET)).tolist()
    assert report["token_map"] == ids
    if draft.shape.kind == "mla":
        (mark,) = expected["model.midlayer.self_attn.kv_b_proj.weight"]
        assert report["folded"] == {"w_kc": [mark], "w_vc": [mark]}


@pytest.mark.parametrize("name", ["llama", "mla"])
def test_the_rotary_table_and_the_scale_are_ours(loaded: dict[str, Any], name: str) -> None:
    """At position 8192 of a yarn x64, from the config.json that was written: cosines, sines, pairing and scale."""
    draft, report = loaded[name]
    assert report["pairs"] == (draft.shape.kind == "mla")
    assert report["scale"] == pytest.approx(draft.score_scale, rel=1e-6)
    for position, row in report["table"].items():
        cos, sin = (x[0, 0] for x in draft.rope(torch.tensor([int(position)]), torch.float32))
        once = slice(None, None, 2) if report["pairs"] else slice(draft.shape.rotary_dim // 2)
        torch.testing.assert_close(torch.tensor(row), torch.cat((cos[once], sin[once])), rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize(
    "settings",
    [
        ["draft.kind=mla", "draft.fc_norm=true", "draft.norm_output=true"],
        ["draft.fc_norm=true", "draft.norm_before_fc=true", "draft.norm_output=true"],
    ],
    ids=["mla-3.1", "llama-3.1"],
)
def test_a_trained_draft_accepts_as_in_the_local_engine(
    sglang_python: Path,
    sglang_env: dict[str, str],
    sglang_args: list[str],
    tiny_kimi_path: Path,
    tmp_path: Path,
    settings: list[str],
) -> None:
    """The draft's forward, its cache and what feeds the next step, on a target with latent attention and experts."""
    served = tiny_kimi_run(tiny_kimi_path, settings=settings) / "served"
    bench = make_bench(tiny_kimi_path, served, tmp_path, sglang_python, sglang_env, sglang_args)
    with bench.engine().serve(bench.trained) as session:
        bench.check_acceptance(run(session, bench.asks, 4))
