"""A trained draft served by the real SGLang and by the local engine: what both keep of the same prompts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from drafts import ROOT
from transformers import AutoTokenizer

from eagle3.checkpoint import load_served
from eagle3.hf_model import load_target
from eagle3.target_weights import TargetWeights
from eagle3.wiring import Wiring
from eval.engines.base import Ask, Generation, Session
from eval.engines.local import LocalEngine
from eval.engines.server_config import ServerConfig
from eval.engines.sglang import SGLangEngine
from eval.prompts import encode_prompt, read_prompt_set

STEPS, LENGTH, PROMPTS = 3, 24, 5
ROUNDING = 1e-3  # two logits this close may swap places between two implementations


@dataclass
class Bench:
    """The target, its draft, the prompts, and the local engine that serves them."""

    target: Path
    served: Path
    trained: Wiring
    asks: list[Ask]
    local: LocalEngine
    config: dict[str, Any]
    work: Path

    def engine(self, **changes: Any) -> SGLangEngine:
        """An SGLang that serves this draft; `changes` to its ServerConfig."""
        cfg = ServerConfig(**{**self.config, **changes})
        return SGLangEngine(self.target, self.served, self.trained, STEPS, cfg, self.work)

    def same_text(self, ask: Ask, made: list[int], expected: list[int]) -> bool:
        """Equal, or parted where the target's first two logits tie."""
        if made == expected:
            return True
        place = next((k for k, (a, b) in enumerate(zip(made, expected, strict=False)) if a != b), len(expected))
        return self.local.top_gap([*ask.prompt_ids, *expected[:place]]) < ROUNDING

    def check_acceptance(self, made: list[Generation]) -> None:
        """Each text is the local engine's, and every verify keeps what the local engine's keeps."""
        totals = [0, 0, 0, 0]
        for ask, there in zip(self.asks, made, strict=True):
            here = self.local.generate(ask.prompt_ids, LENGTH, STEPS)
            assert self.same_text(ask, list(there.tokens), here.tokens), ask.id
            if list(there.tokens) == here.tokens:
                counts = (there.correct, there.verifies, here.correct, here.verifies)
                totals = [a + b for a, b in zip(totals, counts, strict=True)]
        correct, verifies, local_correct, local_verifies = totals
        assert local_correct > 0, "the draft accepts nothing, so nothing is compared"
        assert abs(correct / verifies - local_correct / local_verifies) < 0.03


def make_bench(
    target: Path, served: Path, work: Path, python: Path, env: dict[str, str], extra_args: list[str]
) -> Bench:
    """A bench over a served folder, float32 on both sides."""
    draft, trained, _ = load_served(served, TargetWeights(target).embedding())
    model = load_target(target, "cpu", torch.float32, False, with_head=True)
    tokenizer = AutoTokenizer.from_pretrained(target)
    prompts = read_prompt_set(ROOT / "data" / "eval" / "chat.jsonl", PROMPTS).prompts
    asks = [Ask(one.id, encode_prompt(tokenizer, one)) for one in prompts]
    start = {"dtype": "float32", "start_timeout_s": 600.0}
    config = {"python": str(python), "env": env, "extra_args": extra_args, **start}
    return Bench(target, served, trained, asks, LocalEngine(model, draft, trained), config, work)


def run(session: Session, asks: list[Ask], concurrency: int, temperature: float = 0.0) -> list[Generation]:
    """The answers, none failed."""
    batch = session.run(asks, max_new_tokens=LENGTH, temperature=temperature, concurrency=concurrency)
    assert not batch.failures
    return [made for made in batch.generations if made is not None]
