"""The stages before `prepare`: which conversations, and the target's own answers to them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data_prep.regenerate.part import whole_lines
from data_prep.regenerate.report import show_report
from data_prep.regenerate.run import regenerate
from data_prep.select.stage import select
from data_prep.select.table import show_selection
from eagle3.atomic import sha256_file
from eagle3.checked_json import read_checked
from eagle3.errors import ConfigError, IntegrityError, RedraftError
from train.front.accept import started_engine
from train.front.console import console, progress_bar
from train.front.context import Run
from train.front.records import StageRecord, skip, source_fingerprint

# Settings of a regeneration that do not bear on what is answered.
HOW_ASKED = (
    "url",
    "concurrency",
    "retries",
    "timeout_s",
    "backoff_s",
    "outage_s",
    "api_key_env",
    "server_args",
    "generation_config",
    "max_failures",
)


def select_stage(run: Run) -> dict[str, Any]:
    """Mixed sources -> the conversations to be answered, with quotas, without duplicates."""
    cfg, out = run.config.select, Path(run.config.paths.selected)
    inputs = {
        "select": asdict(cfg),
        "sources": [source_fingerprint(source.path) for source in cfg.sources],
        "exclude": [source_fingerprint(path) for path in cfg.exclude],
        "tokenizer": run.renderer.tokenizer_hash,
        "template": run.renderer.template_hash,
    }
    record = StageRecord(out / "stage.json", inputs)
    if not skip(record):
        record.begin()
        with progress_bar("conversations read", None, "records") as advance:
            report = select(cfg, out, run.tokenizer, advance)
        show_selection(report, console)
        record.finish(selected=report["selected"])
    return {"selected conversations": f"{out / 'selected.jsonl'} (report.json beside it)"}


def regenerate_stage(run: Run) -> dict[str, Any]:
    """Conversations -> the served target's own answers.

    Raises:
        RedraftError: nothing is selected yet, no server can be reached or started, or too many answers failed.
    """
    cfg, out = run.config.regenerate, Path(run.config.paths.answers)
    source = Path(cfg.source)
    if not source.is_file():
        mend = "run the select stage first, or point regenerate.source to a JSONL file of conversations"
        raise RedraftError("no conversations to answer", where=str(source), mend=mend)
    settings = {name: value for name, value in asdict(cfg).items() if name not in HOW_ASKED}
    inputs = {"regenerate": settings, "conversations": sha256_file(source), "target": run.identity}
    record = StageRecord(out / "stage.json", inputs)
    if not (answers_are_whole(out, record) and skip(record)):
        record.begin()
        with source.open("rb") as lines:
            total = sum(1 for _ in lines)
        with served_target(run) as (url, gone), progress_bar("answers", total, "answers") as advance:
            report = regenerate(cfg, source, out, url, advance, run.tokenizer, gone)
        show_report(report, console)
        record.finish(answers=report["answers"])
    return {"answers": f"{out / 'answers.jsonl'} (report.json beside it)"}


def answers_are_whole(out: Path, record: StageRecord) -> bool:
    """Whether a finished stage's answers are as they were written; says what is not."""
    if not record.finished():
        return True
    try:
        wanted = read_checked(out / "report.json", "")["answers"]
        kept = len(whole_lines(out / "answers.jsonl"))
    except (IntegrityError, OSError) as err:
        wanted, kept = 1, 0
        console.print(f"      runs again: {err}", style="yellow", markup=False)
    if kept < wanted:
        console.print(f"      runs again: {kept} of {wanted} answers are as they were written", style="yellow")
    return bool(kept >= wanted)


@contextlib.contextmanager
def served_target(run: Run) -> Iterator[tuple[str, Callable[[], str] | None]]:
    """The address of a server of the target alone: the configured one, or one that lives as long as the block.

    Of one started here, also what says why it is dead.

    Raises:
        ConfigError: there is none, and the local engine is no server.
        RedraftError: it does not start.
    """
    cfg = run.config.regenerate
    if cfg.url:
        yield cfg.url, None
        return
    if run.config.eval.engine == "local":
        raise ConfigError(
            "no server to ask",
            where="regenerate.url",
            why="it is empty, and eval.engine is local, which serves nobody",
            mend="give the URL of an OpenAI-compatible server, or set eval.engine=sglang (or vllm) to start one",
        )
    console.print(f"      starting {run.config.eval.engine} with the target alone")
    engine = started_engine(run, cfg.server_args, run.run_dir / "regenerate")
    with engine.serve(None) as session:
        yield str(session.facts["url"]), session.gone
