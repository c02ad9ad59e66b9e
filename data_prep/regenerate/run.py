"""The regeneration itself: what is missing is asked for, kept as it comes, and put in the source's order at the end."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from data_prep.regenerate.client import ChatClient, FailedError, ServerGone
from data_prep.regenerate.config import RegenerateConfig
from data_prep.regenerate.dialogue import Dialogues
from data_prep.regenerate.exact import Retokenized
from data_prep.regenerate.facts import ServerFacts, check_tools, read_facts
from data_prep.regenerate.part import PartFile, check_settings, json_line, whole_lines, whole_record
from data_prep.regenerate.report import NAMED_FAILURES, Tally, reasons
from data_prep.regenerate.sampling import Sampling, resolve_sampling
from data_prep.regenerate.source import Asked, Survey, read_source, survey
from data_prep.store.lock import FileLock, LockHeldError
from eagle3.atomic import replacing
from eagle3.checked_json import read_checked, write_checked
from eagle3.errors import IntegrityError, RedraftError
from eagle3.leftovers import clear_leftovers

# Settings that do not bear on what an answer says, nor on what is kept of it.
HOW_ASKED = (
    "source", "url", "server_args", "api_key_env", "concurrency", "generation_config", "keep_empty", "retries",
    "backoff_s", "timeout_s", "outage_s", "max_failures",
)  # fmt: skip
FEWEST_IN_A_ROW = 8  # failures that the server is to blame for, one after another, before it is given up


def regenerate(
    cfg: RegenerateConfig,
    source: Path,
    out: Path,
    url: str,
    advance: Callable[[int], None] | None = None,
    tokenizer: Any = None,
    gone: Callable[[], str] | None = None,
) -> dict[str, Any]:
    """Let the target answer every conversation of `source`, and write `out/answers.jsonl` in the source's order.

    May be killed at any moment: a rerun asks only for what is missing or failed. Finished answers stand in
    `out/answers.part.jsonl` meanwhile (and on, while records are left that failed).

    Args:
        cfg: the configuration; its `url` and `source` are not looked at.
        source: JSON lines of conversations.
        out: folder to write: answers.jsonl, report.json, and failed.jsonl where records failed.
        url: of an OpenAI-compatible server that serves the target.
        advance: called with the number of further records that are over; those of an earlier run at once.
        tokenizer: the target's, to count the answers whose text it would cut into other tokens.
        gone: for a server started here: a clause saying why it is dead, or nothing while it lives.

    Returns:
        The report.

    Raises:
        ConfigError: a bad setting, or `out` holds answers made with other ones.
        DataError: a record of the source is malformed.
        ServerGone: the server has ended or cannot be reached any more; finished answers are kept.
        RedraftError: more records failed than `cfg.max_failures` allows, or another process is at work in `out`.
    """
    cfg.validate()
    held = survey(Path(source))
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(out / ".lock")
    except LockHeldError:
        raise RedraftError(
            "another process is writing answers here", where=str(out), mend="wait for it, or choose another folder"
        ) from None
    clear_leftovers(out, alone=True)
    try:
        return asyncio.run(_Regeneration(cfg, Path(source), out, held, advance or _ignore, tokenizer, gone).run(url))
    finally:
        lock.release()


def _ignore(_count: int) -> None:
    """No progress bar."""


@dataclass
class _Regeneration:
    """One call of `regenerate`."""

    cfg: RegenerateConfig
    source: Path
    out: Path
    held: Survey
    advance: Callable[[int], None]
    tokenizer: Any
    gone: Callable[[], str] | None
    failures: dict[str, str] = field(default_factory=dict)
    in_a_row: int = 0  # failures since the last answer that the server is to blame for
    made: int = 0
    made_tokens: int = 0

    async def run(self, url: str) -> dict[str, Any]:
        """Ask, write, report."""
        began = time.monotonic()
        async with ChatClient(url, self.cfg, self.gone) as client:
            facts = await read_facts(client, self.cfg.model)
            check_tools(facts, self.held.with_tools)
            sampling = resolve_sampling(self.cfg, facts.model_folder, facts.sampling_defaults)
            settings = self._settings(facts, sampling)
            if (finished := self._finished(settings)) is not None:
                self.advance(self.held.records)
                return finished
            part = PartFile(self._part_path, settings)
            try:
                self.advance(len(part))
                await self._ask_all(Dialogues(client, facts, self.cfg, sampling), part)
                self._check_failures(over=True)
                return self._finish(part, settings, facts, sampling, time.monotonic() - began)
            finally:
                part.close()

    @property
    def _part_path(self) -> Path:
        return self.out / "answers.part.jsonl"

    def _settings(self, facts: ServerFacts, sampling: Sampling) -> dict[str, Any]:
        """All that bears on the answers."""
        mine = {name: value for name, value in asdict(self.cfg).items() if name not in HOW_ASKED}
        return {**mine, **sampling.values, "model": facts.model, "source_sha256": self.held.sha256}

    def _finished(self, settings: dict[str, Any]) -> dict[str, Any] | None:
        """The report of an earlier run that left nothing to do.

        Raises:
            ConfigError: it was made with other settings.
        """
        path, answers = self.out / "report.json", self.out / "answers.jsonl"
        if not path.is_file() or not answers.is_file():
            return None
        report = read_checked(path, "delete it and run the regenerate stage again")
        check_settings(report.get("settings"), settings, self.out)
        kept = whole_lines(answers)
        if len(kept) < report["answers"] and not self._part_path.exists():
            self._take_over(kept, settings)
        if len(kept) < report["answers"]:
            return None
        if report["failed"] or report["keep_empty"] != self.cfg.keep_empty:
            return None
        self._part_path.unlink(missing_ok=True)  # a run that was killed right after its report left it
        return report

    def _take_over(self, kept: dict[str, dict[str, Any]], settings: dict[str, Any]) -> None:
        """Begin with the answers of a finished file that are whole: only the damaged ones are asked for again."""
        part = PartFile(self._part_path, settings)
        for record in kept.values():
            part.append(record)
        part.close()

    async def _ask_all(self, dialogues: Dialogues, part: PartFile) -> None:
        missing = (asked for asked in read_source(self.source) if asked.id not in part)
        workers = [asyncio.ensure_future(self._work(missing, dialogues, part)) for _ in range(self.cfg.concurrency)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _work(self, missing: Iterator[Asked], dialogues: Dialogues, part: PartFile) -> None:
        for asked in missing:
            try:
                record = await dialogues.answer(asked)
            except FailedError as err:
                self.failures[asked.id] = err.why
                self.in_a_row += err.blame == "server"
                self._check_failures(over=False)
            else:
                self.in_a_row = 0
                part.append(record)
                self.made += 1
                self.made_tokens += record["answer_tokens"]
            self.advance(1)

    def _check_failures(self, over: bool) -> None:
        """End the run when it cannot end well."""
        if not over and self.in_a_row >= max(FEWEST_IN_A_ROW, self.cfg.concurrency):
            raise ServerGone(
                "the server answers nothing but errors",
                where=self.source.name,
                why=f"{self.in_a_row} records failed in a row; {self._commonest()}",
                mend="read the server's log; a rerun goes on with what is missing",
                page="samples",
            )
        allowed = self.cfg.max_failures * self.held.records
        if len(self.failures) > allowed:
            raise RedraftError(
                "too many records failed",
                where=f"regenerate.max_failures={self.cfg.max_failures:g}",
                why=f"{len(self.failures)} of {self.held.records}; {self._commonest()}",
                mend="mend what the reasons name, or allow more; a rerun asks only for what is missing",
                page="samples",
            )

    def _commonest(self) -> str:
        return "; ".join(f"{count} x {why}" for why, count in itertools.islice(reasons(self.failures).items(), 3))

    def _finish(
        self, part: PartFile, settings: dict[str, Any], facts: ServerFacts, sampling: Sampling, seconds: float
    ) -> dict[str, Any]:
        """Write the answers in order, then the report; drop the part file once nothing is left to do."""
        part.sync()
        tally, again = Tally(), Retokenized(self.tokenizer, self.cfg.chat_template_kwargs)
        with replacing(self.out / "answers.jsonl") as tmp, open(tmp, "wb") as handle:
            for asked in read_source(self.source):
                if asked.id not in part:
                    continue
                line = part.line(asked.id)
                record = whole_record(line)
                if record is None:
                    mend = "run the regenerate stage again: it asks for this one anew"
                    raise IntegrityError("an answer is damaged", where=f"{part.path}, {asked.id!r}", mend=mend)
                if is_empty(record):
                    tally.empty += 1
                    if not self.cfg.keep_empty:
                        continue
                tally.add(record)
                again.add(record)
                handle.write(line)
            handle.flush()
        self._write_failures()
        report = {
            "records": self.held.records,
            **tally.figures(),
            "failed": len(self.failures),
            "failed_reasons": reasons(self.failures),
            "failed_ids": sorted(self.failures)[:NAMED_FAILURES],
            "keep_empty": self.cfg.keep_empty,
            "retokenized": again.figures(),
            "served": {
                "url": facts.url, "engine": facts.engine, "version": facts.version, "model": facts.model,
                "reasoning_parser": facts.reasoning_parser, "tool_call_parser": facts.tool_call_parser,
                "prompt_ends_reasoning": facts.prefill.value,
            },
            "sampling": sampling.values,
            "sampling_from": sampling.origin,
            "settings": settings,
            "this_run": {
                "answers": self.made, "tokens": self.made_tokens, "seconds": seconds,
                "tokens_per_s": self.made_tokens / max(seconds, 1e-9),
            },
        }  # fmt: skip
        write_checked(self.out / "report.json", report)
        if not self.failures:
            part.close()
            part.path.unlink()
        return report

    def _write_failures(self) -> None:
        path = self.out / "failed.jsonl"
        if not self.failures:
            path.unlink(missing_ok=True)
            return
        with replacing(path) as tmp, open(tmp, "wb") as handle:
            for record_id, why in sorted(self.failures.items()):
                handle.write(json_line({"id": record_id, "why": why}))


def is_empty(record: dict[str, Any]) -> bool:
    """Whether the last answer says nothing."""
    last = record["messages"][-1]
    said = (last.get("content"), last.get("reasoning_content"))
    return not any(text and text.strip() for text in said) and not last.get("tool_calls")
