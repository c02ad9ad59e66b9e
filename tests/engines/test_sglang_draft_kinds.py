"""Every kind of draft in the real SGLang: its loader takes every name and leaves nothing, its forward is ours."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import POSITIONS, local_engine, make_served, make_target
from tiny_models import WIRING as TINY

from eagle3.checkpoint import save_served
from eagle3.draft import Eagle3Draft
from eagle3.draft_build import build_draft
from eagle3.draft_shape import DraftShape
from eagle3.vocab import build_draft_vocab
from eagle3.wiring import Site, Wiring
from eval.engines.base import Ask
from eval.engines.server_config import ServerConfig
from eval.engines.sglang import SGLangEngine

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
STEPS, TOKENS = 3, 24
ASKS = [Ask(f"p{k}", [0, 10 + k, 20, 30 + k, 40], k) for k in range(10)]
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
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[Eagle3Draft, dict[str, Any]]]:
    """Each kind's draft, and what SGLang made of its folder: one process for all of them."""
    work, drafts = tmp_path_factory.mktemp("kinds"), {}
    target = make_target(work / "target")  # the process cannot be configured without one
    for name, switches in KINDS.items():
        draft = drafts[name] = marked_draft(switches)
        vocab = build_draft_vocab(torch.arange(VOCAB), draft.shape.draft_vocab_size)
        save_served(work / name, draft, WIRING, target={}, convention_name="sglang-0.5.23", vocab=vocab)
    script = Path(__file__).parent / "sglang_cpu" / "load_drafts.py"
    folders = [str(work / name) for name in KINDS]
    command = [str(sglang_python), str(script), str(work / "report.json"), str(target), *folders, "--"]
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
        expected.setdefault(place, set()).add(float(parameter.detach().flatten()[0]))
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


@pytest.mark.parametrize("kind", ["llama-3.1", "mla-3.1"])
def test_every_verify_keeps_what_the_local_engine_keeps(
    sglang_python: Path, sglang_env: dict[str, str], sglang_args: list[str], tmp_path: Path, kind: str
) -> None:
    """The draft's forward, its cache and what feeds the next step: guesses hang on all of them, chains go three deep.

    Of these ten prompts, counts change in 8 without attention's scores, in 2 without positions and in 5 with an
    un-normed state fed back (the latent kind, locally).
    """
    target = make_target(tmp_path / "target")
    small = {**YARN, "factor": 8.0, "original_max_position_embeddings": POSITIONS // 8}
    latent = {**LATENT, "rope": {"rope_theta": 10000.0, "rope_scaling": small}}
    changes = {**NEWER, **latent} if kind == "mla-3.1" else {**NEWER, "norm_before_fc": True}
    served = make_served(tmp_path / "served", target, "sglang-0.5.23", stir=0.02, **changes)
    local = local_engine(target, served, TINY)
    expected = [local.generate(ask.prompt_ids, TOKENS, STEPS) for ask in ASKS]
    assert sum(one.correct_histogram[2] + one.correct_histogram[3] for one in expected) > 5
    start = {"env": sglang_env, "extra_args": sglang_args, "start_timeout_s": 600.0}
    config = ServerConfig(python=str(sglang_python), dtype="float32", **start)
    with SGLangEngine(target, served, TINY, STEPS, config, tmp_path).serve(TINY) as session:
        made = session.run(ASKS, max_new_tokens=TOKENS, temperature=0.0, concurrency=4)
    assert made.failures == {}
    for here, there in zip(expected, made.generations, strict=True):
        assert there is not None
        assert (there.tokens, there.correct_histogram) == (here.tokens, here.correct_histogram)
