"""The measure over an engine that is a server: one phase a way of serving, every batch size in each.

A server holds one draft wiring, so the phases follow one another: first the target without a draft, then each mode of
`eval.serve`. Within a phase every prompt set is one batch at every batch size: timed by the wall clock from the first
request to the last answer, and kept on disk as soon as it is over.
"""

from __future__ import annotations

import contextlib
import itertools
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from eagle3.atomic import sha256_json
from eagle3.conventions import explain
from eagle3.errors import RedraftError
from eagle3.wiring import Wiring
from eval.accept import WARM_UP_TOKENS, beside_plain, engine_ids, scalars, served_wirings, shown_text
from eval.alarm import allowed_gap, find_alarms
from eval.config import EvalConfig
from eval.counts import checked, checked_plain
from eval.engines.base import Ask, BatchRun, Generation, ServedEngine, ServerGone, Session
from eval.partial import Partial
from eval.prompts import PromptSet, encode_prompt
from eval.results import AcceptResult, PromptResult, Served, SetResult, Wall, prompt_result, summarize

PLAIN = "plain"  # the phase without a draft
# Settings that name batches, or judge them, rather than change what is in one.
NOT_OF_A_BATCH = ("prompt_sets", "max_prompts", "serve", "baseline", "batch_sizes", "alarm", "server")


def phases(cfg: EvalConfig, trained: Wiring) -> dict[str, Wiring | None]:
    """The wiring of each phase, in order; None = without a draft."""
    first: dict[str, Wiring | None] = {PLAIN: None} if cfg.baseline else {}
    return {**first, **served_wirings(trained, cfg.serve)}


def count_served(prompt_sets: list[PromptSet], cfg: EvalConfig, trained: Wiring) -> int:
    """How many continuations `measure_served` reports to `advance`."""
    return len(phases(cfg, trained)) * len(cfg.batch_sizes) * sum(len(one.prompts) for one in prompt_sets)


def measure_served(
    engine: ServedEngine,
    prompt_sets: list[PromptSet],
    cfg: EvalConfig,
    *,
    tokenizer: PreTrainedTokenizerBase,
    trained: Wiring,
    folder: Path,
    identity: dict[str, Any] | None = None,
    title: str = "draft",
    target: str = "",
    draft: str = "",
    predicted_acceptance: list[float] | None = None,
    commands: list[str] | None = None,
    next_commands: list[str] | None = None,
    template_kwargs: dict[str, Any] | None = None,
    advance: Callable[[int], None] | None = None,
    log: Callable[[dict[str, float]], None] | None = None,
) -> AcceptResult:
    """Serve, continue every prompt, and pool the counts; the same result as `eval.accept.measure` gives.

    Finished batches are kept in `folder/partial.json`. They are used again by the next call with equal settings, and
    the file stays while a prompt is left that failed, so that the next call tries the batches with failures again.
    A server that dies in the middle of its phase costs what it had not answered; the result says what is missing.

    Args:
        engine: serves the target with a wiring or without a draft.
        prompt_sets: what to continue.
        cfg: lengths, steps, temperature, batch sizes, modes.
        tokenizer: the target's, with its chat template.
        trained: the wiring that the draft was trained on.
        folder: where the finished batches are kept.
        identity: what else the batches depend on (hashes of draft and target, settings of the server), JSON-able.
        title: name of the run in reports.
        target: name of the target in reports.
        draft: the served folder, for reports.
        predicted_acceptance: per-step conditional accuracies on validation data, for the predicted accept length.
        commands: exact commands, for the report.
        next_commands: what an alarm tells to run next.
        template_kwargs: extra keyword arguments of the chat template.
        advance: called with 1 after every continuation.
        log: called once with scalar metrics.

    Raises:
        RedraftError: a server does not start, speculates where it must not, or answers no prompt of a batch; or the
            draft's died before a single batch was over.
        DataError: a prompt cannot be rendered.
    """
    same = {name: value for name, value in asdict(cfg).items() if name not in NOT_OF_A_BATCH}
    asks = {
        one.name: [Ask(p.id, encode_prompt(tokenizer, p, template_kwargs), cfg.seed) for p in one.prompts]
        for one in prompt_sets
    }
    work = _Work(
        engine,
        cfg,
        asks,
        {name: f"{name} {sha256_json([asdict(ask) for ask in some])[:16]}" for name, some in asks.items()},
        Partial(Path(folder) / "partial.json", {**same, **(identity or {})}),
        advance or _ignore,
    )
    for mode, wiring in phases(cfg, trained).items():
        work.phase(mode, wiring)
    served, missing = _served(work, prompt_sets, trained, tokenizer)
    result = AcceptResult(
        title=title,
        engine=engine.name,
        num_steps=cfg.num_steps,
        temperature=cfg.temperature,
        max_new_tokens=cfg.max_new_tokens,
        seed=cfg.seed,
        trained=trained.to_dict(),
        engine_ids=engine_ids(trained),
        predicted_acceptance=predicted_acceptance,
        served=served,
        commands=commands or [],
        environment=client_environment(),
        target=target,
        draft=draft,
        plain_facts=work.partial.facts(PLAIN) if cfg.baseline else {},
        plain_failures=_plain_failures(work, prompt_sets) if cfg.baseline else {},
        missing=missing,
    )
    result.allowed_gap = allowed_gap(result.predicted_tau, cfg.alarm)
    result.alarm = find_alarms(result, cfg.alarm, next_commands or [], tree=cfg.server.topk > 1)
    if not result.incomplete:
        work.partial.discard()
    if log is not None:
        log(scalars(result))
    return result


def _ignore(_count: int) -> None:
    """No progress bar."""


def client_environment() -> dict[str, str]:
    """This side's versions; the server's stand among its facts."""
    return {"python": platform.python_version(), "transformers": version("transformers")}


@dataclass
class _Work:
    """What the phases share."""

    engine: ServedEngine
    cfg: EvalConfig
    asks: dict[str, list[Ask]]  # set name -> prompts
    keys: dict[str, str]  # set name -> its name with the hash of its tokens
    partial: Partial
    advance: Callable[[int], None]
    unasked: dict[tuple[str, int, str], BatchRun] = field(default_factory=dict)  # lost with a server that died
    last: ServerGone | None = None  # how the last server died that did

    def phase(self, mode: str, wiring: Wiring | None) -> None:
        """Measure what is not finished yet; starts no server when all is."""
        if self._todo(mode):
            try:
                with self.engine.serve(wiring) as session:
                    self.partial.enter(mode, session.facts)
                    with self._surviving(mode):
                        self._measure(mode, session)
            except RedraftError as err:
                raise self.with_hope(err) from err
        else:
            self.advance(sum(map(len, self.asks.values())) * len(self.cfg.batch_sizes))

    def finished(self, mode: str, batch: int, name: str) -> BatchRun:
        """A batch that the phases have measured."""
        run = self.partial.get(mode, batch, self.keys[name]) or self.unasked.get((mode, batch, name))
        assert run is not None
        return run

    @contextlib.contextmanager
    def _surviving(self, mode: str) -> Iterator[None]:
        """Where the server dies, put down what it has not answered; batches of an earlier run stay as they are."""
        try:
            yield
            return
        except ServerGone as err:
            self.last = lost = err
        for batch, name in self._todo(mode):
            asks = self.asks[name]
            why = {ask.id: f"not asked: {lost.what}: {lost.why}" for ask in asks}
            self.unasked[mode, batch, name] = BatchRun([None] * len(asks), why, 0.0)

    def _todo(self, mode: str) -> list[tuple[int, str]]:
        units = [(batch, name) for batch in self.cfg.batch_sizes for name in self.asks]
        return [(batch, name) for batch, name in units if not self.partial.whole(mode, batch, self.keys[name])]

    def _measure(self, mode: str, session: Session) -> None:
        todo = self._todo(mode)
        for batch in self.cfg.batch_sizes:
            names = [name for name in self.asks if (batch, name) in todo]
            self.advance(sum(len(asks) for name, asks in self.asks.items() if name not in names))
            if names:
                self._warm_up(session, batch)
            for name in names:
                asks = self.asks[name]
                run = self._run(session, asks, batch, self.cfg.max_new_tokens, self.advance)
                run = checked_plain(run, asks) if mode == PLAIN else checked(run, asks, self.cfg.num_steps)
                self._refuse_silence(mode, batch, name, run)
                self.partial.put(mode, batch, self.keys[name], run, session.facts)

    def _warm_up(self, session: Session, batch: int) -> None:
        """A short batch of this size, thrown away: the first one pays for graphs, compilation and allocation."""
        first = list(itertools.islice(itertools.chain(*self.asks.values()), batch))
        asks = [Ask(f"warm-up {k}", ask.prompt_ids, ask.seed) for k, ask in enumerate(first)]
        self._run(session, asks, batch, WARM_UP_TOKENS, _ignore)

    def _run(
        self, session: Session, asks: list[Ask], batch: int, max_new_tokens: int, done: Callable[[int], None]
    ) -> BatchRun:
        return session.run(
            asks, max_new_tokens=max_new_tokens, temperature=self.cfg.temperature, concurrency=batch, done=done
        )

    def _refuse_silence(self, mode: str, batch: int, name: str, run: BatchRun) -> None:
        if any(one is not None for one in run.generations):
            return
        first, why = next(iter(run.failures.items()), ("?", "no reason was given"))
        raise RedraftError(
            "the server answered no prompt",
            where=f"{mode}, batch {batch}, {name}",
            why=f"{len(self.asks[name])} of {len(self.asks[name])} failed; {first}: {why}",
            mend="read the server's log, or leave this set out of eval.prompt_sets",
        )

    def with_hope(self, err: RedraftError) -> RedraftError:
        """The same error, saying that what is finished is kept."""
        if not len(self.partial):
            return err
        kept = f"{len(self.partial)} finished batches are kept, the same command goes on after them"
        mend = f"{err.mend}; {kept}" if err.mend else kept
        return type(err)(err.what, where=err.where, why=err.why, mend=mend, page=err.page)


def _served(
    work: _Work, prompt_sets: list[PromptSet], trained: Wiring, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[Served], dict[str, str]]:
    """Every mode at every batch size from the finished batches; and why there is nothing to tell of some.

    Raises:
        ServerGone: there is nothing to tell of any.
    """
    out, missing = [], {}
    for mode, wiring in served_wirings(trained, work.cfg.serve).items():
        differences = [] if wiring == trained else explain(trained, wiring)
        for batch in work.cfg.batch_sizes:
            units = [_Unit(work, mode, batch, one, tokenizer) for one in prompt_sets]
            failures = {f"{u.prompts.name}/{name}": why for u in units for name, why in u.run.failures.items()}
            sets = [unit.result() for unit in units if unit.answered]
            if not sets:
                missing[f"{mode}, batch {batch}"] = next(iter(failures.values()), "no prompts")
                continue
            rows = [row for one in sets for row in one.prompts]
            asked = sum(len(one.prompts) for one in prompt_sets)
            walls, plain_walls = Wall.total([u.wall for u in units]), Wall.total([u.plain_wall for u in units])
            out.append(
                Served(
                    mode=mode,
                    wiring=wiring.to_dict(),
                    differences=differences,
                    sets=sets,
                    overall=summarize("all", rows, asked, walls, plain_walls),
                    batch=batch,
                    facts=work.partial.facts(mode),
                    failures=failures,
                )
            )
    if not out and work.last is not None:
        raise work.with_hope(work.last)
    return out, missing


class _Unit:
    """One finished batch of a draft, beside the same batch without one."""

    def __init__(
        self, work: _Work, mode: str, batch: int, prompts: PromptSet, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self.prompts, self._work, self._tokenizer = prompts, work, tokenizer
        self.run = work.finished(mode, batch, prompts.name)
        self.plain = work.finished(PLAIN, batch, prompts.name) if work.cfg.baseline else None

    @property
    def answered(self) -> bool:
        return any(made is not None for made in self.run.generations)

    @property
    def wall(self) -> Wall | None:
        return _wall(self.run)

    @property
    def plain_wall(self) -> Wall | None:
        return _wall(self.plain)

    def result(self) -> SetResult:
        plain = self.plain.generations if self.plain else [None] * len(self.prompts.prompts)
        rows = [
            self._row(prompt.id, made, beside)
            for prompt, made, beside in zip(self.prompts.prompts, self.run.generations, plain, strict=True)
            if made is not None
        ]
        asked = len(self.prompts.prompts)
        summary = summarize(self.prompts.name, rows, asked, self.wall, self.plain_wall)
        return SetResult(summary, self.prompts.key, rows)

    def _row(self, prompt_id: str, made: Generation, plain: Generation | None) -> PromptResult:
        beside = None
        if plain is not None:
            beside = beside_plain(made, plain, greedy=self._work.cfg.temperature == 0)
        return prompt_result(prompt_id, made, beside, shown_text(self._tokenizer, made.tokens))


def _wall(run: BatchRun | None) -> Wall | None:
    if run is None:
        return None
    tokens = sum(len(made.tokens) for made in run.generations if made is not None)
    return Wall(tokens, run.seconds, whole=not run.failures)


def _plain_failures(work: _Work, prompt_sets: list[PromptSet]) -> dict[str, str]:
    return {
        f"batch {batch}, {one.name}/{prompt_id}": why
        for batch in work.cfg.batch_sizes
        for one in prompt_sets
        for prompt_id, why in work.finished(PLAIN, batch, one.name).failures.items()
    }
