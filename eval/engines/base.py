"""What every engine adapter returns, so that one measure and one report serve them all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from eagle3.errors import RedraftError
from eagle3.wiring import Wiring


@dataclass(frozen=True)
class Generation:
    """One continuation and, when a draft took part, what the verify steps did.

    Args:
        tokens: generated ids, the end token included when there is one; the prompt is not.
        verifies: target forward passes that judged a chain of proposals. The prefill, which yields the first
            token, is not one.
        correct: proposals kept, over all verifies.
        proposed: proposals made, `verifies * num_steps`.
        correct_histogram: `[num_steps + 1]`; entry c counts the verifies that kept exactly c proposals.
        tried: `[num_steps]`; entry k counts the verifies in which proposals 0..k-1 were kept and the text had not
            ended, so that proposal k was judged.
        right: `[num_steps]`; of those, how often proposal k was kept.
        seconds: wall time of the whole call.
        prefill_seconds: the part of it before the first token was known.
        draft_seconds: the part of it spent proposing (0 where the engine does not tell).
        ended: the text stopped at an end token (else at the length limit).
        engine_tau: the engine's own accept length, where it reports one; kept beside ours because its
            definition may differ.
    """

    tokens: list[int]
    verifies: int = 0
    correct: int = 0
    proposed: int = 0
    correct_histogram: list[int] = field(default_factory=list)
    tried: list[int] = field(default_factory=list)
    right: list[int] = field(default_factory=list)
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    ended: bool = False
    engine_tau: float | None = None

    @property
    def tau(self) -> float:
        """Accept length `1 + correct / verifies`: tokens per verify, the bonus token included; 1 without verifies."""
        return 1.0 + self.correct / self.verifies if self.verifies else 1.0


class Engine(Protocol):
    """A target with a draft, served with one wiring."""

    name: str
    wiring: Wiring  # what is fed to the draft, whatever it was trained on

    def generate(
        self, prompt_ids: list[int], max_new_tokens: int, num_steps: int, temperature: float = 0.0, seed: int = 0
    ) -> Generation:
        """Decode with the draft proposing `num_steps` tokens per verify."""

    def baseline(
        self, prompt_ids: list[int], max_new_tokens: int, temperature: float = 0.0, seed: int = 0
    ) -> Generation:
        """Decode the same prompt without a draft."""


@dataclass(frozen=True)
class Ask:
    """One prompt of a batch.

    Args:
        id: names the prompt within the batch; results and failures are told apart by it.
        prompt_ids: the rendered prompt's token ids.
        seed: for sampling; ignored by engines that have no per-request seed.
    """

    id: str
    prompt_ids: list[int]
    seed: int = 0


@dataclass(frozen=True)
class BatchRun:
    """What became of a batch.

    Args:
        generations: one a prompt, in the order asked; None where the prompt failed.
        failures: prompt id -> why it failed, in one line; exactly the prompts whose generation is None.
        seconds: wall time from the first request sent to the last answer received.
    """

    generations: list[Generation | None]
    failures: dict[str, str]
    seconds: float


class ServerGone(RedraftError):
    """The server has ended, cannot be reached any more, or answers nothing; asking it again is pointless."""


class Session(Protocol):
    """A server that is up, with one draft wiring or none."""

    facts: dict[str, Any]  # build (its version), convention, ids written, flags asked, values resolved, log, url, mode

    def gone(self) -> str:
        """Why the server is dead, in one clause; empty while it may be asked."""

    def run(
        self,
        prompts: Sequence[Ask],
        *,
        max_new_tokens: int,
        temperature: float,
        concurrency: int,
        done: Callable[[int], None] | None = None,
    ) -> BatchRun:
        """Continue every prompt, `concurrency` at a time; `done(1)` is called as each one ends, well or not.

        One prompt's trouble (a refusal, a timeout, an impossible answer) is a failure of that prompt.

        Raises:
            ServerGone: the server was dead before it answered any.
        """


class ServedEngine(Protocol):
    """An engine that is a server: it holds one draft wiring at a time, so ways of serving follow one another."""

    name: str

    def serve(self, wiring: Wiring | None) -> AbstractContextManager[Session]:
        """Launch or connect to a server that feeds the draft `wiring`; None = the target without a draft.

        Leaving the context stops a server that was launched.

        Raises:
            RedraftError: it does not start, or serves something else than asked.
        """


def plain_number(value: Any) -> float | None:
    """A finite number that a server gave beside its counts, or None for anything else."""
    return float(value) if type(value) in (int, float) and abs(value) < 1e18 else None


def chain_counts(histogram: list[int]) -> tuple[list[int], list[int]]:
    """`(tried, right)` per position from a histogram of kept proposals (`[num_steps + 1]`), as if no text had ended."""
    tail = [sum(histogram[c:]) for c in range(len(histogram))]
    return tail[:-1], tail[1:]
