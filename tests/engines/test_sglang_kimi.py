"""The real SGLang on the miniature of Kimi-K2.5: int4 experts, slow tokenizer, nested layout, its own wrapper class.

Everything is held against the Hugging Face model of the same folder, whose experts are unpacked by other code.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from drafts import ROOT, kimi_mini_run
from transformers import AutoTokenizer

from data_prep.capture.hf import HFCapture
from data_prep.capture.sglang import SGLangCapture
from data_prep.capture.sglang_engine import plan_engine
from data_prep.config import SGLangCaptureConfig
from eagle3.checkpoint import load_served
from eagle3.hf_model import load_target
from eagle3.target_weights import TargetWeights
from eagle3.wiring import Site, Wiring
from eval.engines.base import Ask, Session
from eval.engines.local import LocalEngine
from eval.engines.server_config import ServerConfig
from eval.engines.sglang import SGLangEngine
from eval.prompts import read_prompt_set

STEPS, LENGTH, PROMPTS = 3, 24, 3
ROUNDING = 1e-3  # two logits this close may swap places between two implementations
WIRING = Wiring((Site(3), Site(31), Site(59)), "final", "kimi_k25", 61, 64)


@pytest.fixture(scope="module")
def tokenizer(kimi_mini_path: Path) -> Any:
    return AutoTokenizer.from_pretrained(kimi_mini_path, trust_remote_code=True)


def test_captured_states_are_transformers(
    kimi_mini_path: Path,
    tokenizer: Any,
    sglang_python: Path,
    sglang_env: dict[str, str],
    sglang_args: list[str],
    tmp_path: Path,
) -> None:
    """Site by site; the engine's wrapper class hands its text model no token ids, so the check of tokens counts too."""
    args = [flag for flag in sglang_args if not flag.startswith("--speculative")]
    cfg = SGLangCaptureConfig(python=str(sglang_python), env=sglang_env, extra_args=args, start_timeout_s=900)
    texts = ("Who is the potter?", "List the days of the week.", "Hot", "What is the opposite of hot?")
    tokens = [tokenizer.encode(f"<|im_user|>user<|im_middle|>{text}<|im_end|>") for text in texts]
    records = [(f"r{i}", ids, [0] * len(ids)) for i, ids in enumerate(tokens)]
    plan = plan_engine(cfg, WIRING, "float32", "bfloat16")
    assert plan.ids == [3, 31, 59]
    with SGLangCapture(
        kimi_mini_path,
        WIRING,
        plan,
        cfg,
        vocab_size=TargetWeights(kimi_mini_path).vocab_size,
        log=tmp_path / "log",
        out_dtype=torch.float32,
        trust_remote_code=True,
    ) as engine:
        assert engine.facts["model"] == "KimiK25ForConditionalGeneration"
        found = engine.run(records)
    here = HFCapture(kimi_mini_path, WIRING, device="cpu", compute_dtype="float32", out_dtype=torch.float32)
    for mine, reference in zip(found, here.run(records), strict=True):
        assert mine.input_ids.tolist() == reference.input_ids.tolist()
        for name, state in {**reference.sites, "final": reference.final}.items():
            other = mine.final if name == "final" else mine.sites[name]
            assert ((other - state).norm() / state.norm()).item() < 2e-5, (mine.record_id, name)


@dataclass
class Bench:
    """The draft's server, and the same draft in this process."""

    session: Session
    local: LocalEngine
    tokenizer: Any
    asks: list[Ask]

    def prompt(self, text: str, thinking: bool) -> list[int]:
        messages = [{"role": "user", "content": text}]
        rendered = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, thinking=thinking
        )
        return list(self.tokenizer.encode(rendered))


@pytest.fixture(scope="module")
def bench(
    sglang_python: Path,
    sglang_env: dict[str, str],
    sglang_args: list[str],
    kimi_mini_path: Path,
    tokenizer: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Bench]:
    served = kimi_mini_run(kimi_mini_path) / "served"
    draft, trained, _ = load_served(served, TargetWeights(kimi_mini_path).embedding())
    target = load_target(kimi_mini_path, "cpu", torch.float32, with_head=True)
    cfg = ServerConfig(
        python=str(sglang_python), env=sglang_env, extra_args=sglang_args, dtype="float32", start_timeout_s=600.0
    )
    work = tmp_path_factory.mktemp("sglang")
    engine = SGLangEngine(kimi_mini_path, served, trained, STEPS, cfg, work, trust_remote_code=True)
    prompts = read_prompt_set(ROOT / "data" / "eval" / "chat.jsonl", PROMPTS).prompts
    with engine.serve(trained) as session:
        one = Bench(session, LocalEngine(target, draft, trained), tokenizer, [])
        one.asks = [Ask(prompt.id, one.prompt(str(prompt.messages[-1]["content"]), False)) for prompt in prompts]
        yield one


def test_a_draft_changes_no_token_and_accepts_as_locally(bench: Bench) -> None:
    assert bench.session.facts["convention"] == "sglang-0.5.23" and bench.session.facts["ids"] == [3, 31, 59]
    batch = bench.session.run(bench.asks, max_new_tokens=LENGTH, temperature=0.0, concurrency=2)
    assert not batch.failures
    accepted = compared = 0
    for ask, made in zip(bench.asks, batch.generations, strict=True):
        assert made is not None
        plain = bench.local.baseline(ask.prompt_ids, LENGTH).tokens
        if list(made.tokens) != plain:  # parted where the target's first two logits tie, and nowhere else
            place = next(k for k, (a, b) in enumerate(zip(made.tokens, plain, strict=False)) if a != b)
            assert bench.local.top_gap([*ask.prompt_ids, *plain[:place]]) < ROUNDING, ask.id
            continue
        here = bench.local.generate(ask.prompt_ids, LENGTH, STEPS)
        assert (made.correct, made.verifies) == (here.correct, here.verifies), ask.id
        accepted, compared = accepted + here.correct, compared + 1
    assert compared and accepted > 0, "the draft accepts nothing, so nothing is compared"


@pytest.mark.parametrize("thinking", [True, False])
def test_chat_is_rendered_as_the_tokenizer_renders_it(bench: Bench, thinking: bool) -> None:
    """The server's own tokenizer and template: same prompt length, same text, and the switch reaches the template."""
    question = "What is the opposite of hot?"
    prompt = bench.prompt(question, thinking)
    reply = httpx.post(
        f"{bench.session.facts['url']}/v1/chat/completions",
        json={
            "model": "kimi",
            "messages": [{"role": "user", "content": question}],
            "max_tokens": LENGTH,
            "temperature": 0,
            "chat_template_kwargs": {"thinking": thinking},
        },
        timeout=300,
    ).json()
    expected = bench.tokenizer.decode(bench.local.baseline(prompt, LENGTH).tokens).removesuffix("<|im_end|>")
    assert reply["usage"]["prompt_tokens"] == len(prompt)
    assert reply["choices"][0]["message"]["content"] == expected
    assert expected.startswith("The user says") == thinking
