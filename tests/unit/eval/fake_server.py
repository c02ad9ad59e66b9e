"""A server engine whose behaviour is planted: what its draft keeps, what fails, when it dies, what it miscounts."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from eagle3.wiring import Wiring
from eval.engines.base import Ask, BatchRun, Generation, ServerGone, Session, chain_counts

STEPS = 2


def text_of(ask: Ask, length: int) -> list[int]:
    """The one text that this target writes after a prompt."""
    dice = random.Random(str(ask.prompt_ids))
    return [dice.randrange(7) for _ in range(length)]


def drafted(tokens: list[int], kept: Sequence[int], seconds: float) -> Generation:
    """Counts of a text whose verifies kept these numbers of proposals, over and over."""
    histogram, produced = [0] * (STEPS + 1), 1
    for count in itertools.cycle(kept):
        if produced >= len(tokens):
            break
        histogram[count] += 1
        produced += count + 1
    verifies, correct = sum(histogram), sum(c * n for c, n in enumerate(histogram))
    tried, right = chain_counts(histogram)
    own = len(tokens) / verifies if verifies else None  # as SGLang counts: with the prefill's token
    return Generation(
        tokens, verifies, correct, STEPS * verifies, histogram, tried, right, seconds, ended=False, engine_tau=own
    )


@dataclass
class FakeEngine:
    """Every plan is keyed by the wiring's first site ("none" without a draft), so that ways of serving differ."""

    kept: dict[str, list[int]] = field(default_factory=dict)
    failing: dict[str, dict[str, str]] = field(default_factory=dict)
    change: Callable[[str, int, Ask, Generation], Generation] = lambda _key, _batch, _ask, made: made
    build: dict[str, str] = field(default_factory=dict)
    dies_at: int | None = None  # count of batches (warm-ups included) after which the server is gone
    interrupt_at: int | None = None
    name: str = "fake"
    log: list[tuple[Any, ...]] = field(default_factory=list)  # what happened, in order
    batches: int = 0

    @contextlib.contextmanager
    def serve(self, wiring: Wiring | None) -> Iterator[Session]:
        key = wiring.names[0] if wiring else "none"
        self.log.append(("start", key))
        try:
            yield FakeSession(self, key)
        finally:
            self.log.append(("stop", key))


class FakeSession:
    def __init__(self, engine: FakeEngine, key: str) -> None:
        self.engine, self.key = engine, key
        self.facts: dict[str, Any] = {
            "engine": "fake",
            "mode": "launched",
            "build": engine.build.get(key, "0.5.23"),
            "convention": None if key == "none" else "sglang-0.5.23",
            "ids": None if key == "none" else [1, 2, 4],
            "flags": ["--port", "30000", "--note", "<b>&"],
            "resolved": {"speculative_num_steps": STEPS, "dtype": "bfloat16"},
        }

    def gone(self) -> str:
        return ""

    def run(
        self,
        prompts: Sequence[Ask],
        *,
        max_new_tokens: int,
        temperature: float,
        concurrency: int,
        done: Callable[[int], None] | None = None,
    ) -> BatchRun:
        engine = self.engine
        engine.batches += 1
        if engine.interrupt_at == engine.batches:
            raise KeyboardInterrupt
        if engine.dies_at is not None and engine.batches > engine.dies_at:
            raise ServerGone("the server is gone", where="http://127.0.0.1:1", why="killed", mend="read its log")
        engine.log.append(("run", self.key, concurrency, max_new_tokens, [ask.id for ask in prompts]))
        failures = {a.id: engine.failing[self.key][a.id] for a in prompts if a.id in engine.failing.get(self.key, {})}
        made: list[Generation | None] = []
        for ask in prompts:
            one = None if ask.id in failures else self._generate(ask, max_new_tokens, concurrency)
            made.append(one)
            if done is not None:
                done(1)
        # A batch of n takes as long as its slowest: the wall clock shrinks as the batch grows.
        seconds = sum(one.seconds for one in made if one is not None) / concurrency
        return BatchRun(made, failures, seconds)

    def _generate(self, ask: Ask, max_new_tokens: int, concurrency: int) -> Generation:
        tokens = text_of(ask, max_new_tokens)
        if self.key == "none":
            made = Generation(tokens, seconds=0.1 * len(tokens))
        else:
            made = drafted(tokens, self.engine.kept.get(self.key, [1, 0]), 0.1)
            made = replace(made, seconds=0.12 * made.verifies)
        return self.engine.change(self.key, concurrency, ask, made)
