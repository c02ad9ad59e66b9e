"""Run the stages asked for, in their own order, in a locked run folder, and say where everything is."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from datasets import disable_progress_bars
from rich.text import Text
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from eagle3.errors import IncompleteError, RedraftError
from eagle3.leftovers import clear_leftovers
from train.front import samples, stages
from train.front.accept import eval_stage
from train.front.config import STAGES, RedraftConfig
from train.front.console import console, shown_path
from train.front.context import Run
from train.front.plan import plan
from train.front.provenance import write_provenance
from train.front.publish import publish
from train.telling import refusal
from train.terminal import INDENT, seconds_text
from train.world import choose_accelerator

TRACKED = {"train", "export", "eval"}  # stages with something for the tracker
STAGE_FUNCTIONS: dict[str, Callable[[Run], dict[str, Any]]] = {
    "select": samples.select_stage,
    "regenerate": samples.regenerate_stage,
    "prepare": stages.prepare_stage,
    "extract": stages.extract_stage,
    "train": stages.train_stage,
    "export": stages.export_stage,
    "eval": eval_stage,
}


ABOUT = {
    "select": "fill the quotas from mixed sources",
    "regenerate": "let the target write the answers itself",
    "prepare": "conversations to tokens and loss masks",
    "extract": "run the target, keep the hidden states the draft reads",
    "train": "teach the draft from the store",
    "export": "write the folder that an engine serves",
    "eval": "serve the draft, measure its accept length",
}


@contextlib.contextmanager
def locked(run_dir: Path, shared: bool = False) -> Iterator[None]:
    """Hold the run folder; the kernel frees the lock when its owner dies, however it dies.

    `shared`: together with others that share it too (extraction's workers, on this node or another), against all else.
    Where the file system has no locks, a line says so and the folder is used without one.

    Raises:
        RedraftError: another process holds it.
    """
    with open(run_dir / ".lock", "a+", encoding="utf-8") as handle:
        try:
            fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError as err:
            if err.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                console.print(f"  no locks in the run folder ({err.strerror}): start one command at a time")
                yield
                return
            handle.seek(0)
            raise RedraftError(
                "the run folder is in use",
                where=str(run_dir),
                why=f"process {handle.read().strip() or '?'} works in it",
                mend="wait for it, or choose another run_dir; stages=[extract] alone may run many times at once",
            ) from None
        handle.truncate(0)
        handle.write(f"{os.getpid()} on {socket.gethostname()}")
        handle.flush()
        yield


def clear(run_dir: Path, alone: bool) -> None:
    """Remove what killed runs left half-written; store and prepared set may lie here, and be other runs', too."""
    clear_leftovers(run_dir, deep=True)
    if alone:
        for folder in (run_dir, run_dir / "train"):
            clear_leftovers(folder, alone=True)


def mark_latest(run_dir: Path) -> None:
    """Point `latest`, beside the run folder, at it."""
    link = run_dir.parent / "latest"
    temporary = link.with_name(f".latest.{run_dir.name}")  # this run's alone, which is locked
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(run_dir.name)
    os.replace(temporary, link)


def make_run_dir(path: str) -> Path:
    """Create the run folder.

    Raises:
        RedraftError: it cannot be created or written.
    """
    run_dir = Path(path)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / ".writable").touch()
        (run_dir / ".writable").unlink(missing_ok=True)
    except OSError as err:
        raise RedraftError(
            "cannot write the run folder", where=path, why=str(err.strerror or err), mend="choose another run_dir"
        ) from None
    return run_dir


def run_pipeline(config: RedraftConfig) -> None:
    """Run `config.stages`; `plan` touches nothing on disk.

    Raises:
        RedraftError: a stage refused its input; what earlier stages wrote is kept.
        IncompleteError: all is written, and something is missing from it.
    """
    if "plan" in config.stages:
        plan(config)
    wanted = [name for name in STAGES if name in config.stages and name != "plan"]
    if not wanted:
        return
    choose_accelerator()
    disable_progress_bars()
    disable_progress_bar()
    set_verbosity_error()  # it warns of rotary keys that engines want and it does not read
    run_dir = make_run_dir(config.run_dir)
    shared = wanted == ["extract"]
    with in_one_line("this run", run_dir), locked(run_dir, shared):
        clear(run_dir, alone=not shared)
        write_provenance(config, run_dir)
        run = Run.create(config, run_dir)
        heading(run)
        _ = run.target_path  # every stage needs it: made or refused before the first one starts
        facts: dict[str, Any] = {}
        for number, name in enumerate(wanted, start=1):
            started = time.monotonic()
            console.print(Text.assemble((f"[{number}/{len(wanted)}] {name}", "bold"), f"  {ABOUT[name]}"))
            facts.update(run_stage(name, run))
            console.print(f"{INDENT}done in {seconds_text(time.monotonic() - started)}")
        if TRACKED & set(wanted):
            publish(run)
        if config.mark_latest:
            mark_latest(run_dir)
        summary(run, facts)
        if run.incomplete:
            raise IncompleteError(
                "the results are incomplete",
                where="; ".join(run.incomplete),
                mend="mend what the reasons name, then run the same command again: only what is missing is asked for",
                page="engines",
            )


def run_stage(name: str, run: Run) -> dict[str, Any]:
    """Run one stage.

    Raises:
        RedraftError: the stage refused its input, or the system refused a write.
    """
    with in_one_line(f"the {name} stage", run.run_dir):
        return STAGE_FUNCTIONS[name](run)


@contextlib.contextmanager
def in_one_line(who: str, where: Path) -> Iterator[None]:
    """Turn a full disk, or a folder that cannot be read or written, into one line.

    Raises:
        RedraftError: the system refused; `who` asked, working in `where`.
    """
    try:
        yield
    except OSError as err:
        raise refusal(err, who, str(where)) from err


def heading(run: Run) -> None:
    """Say what this run is."""
    wiring = run.wiring
    name, target_name = run.config.name, run.config.target.name
    console.print(Text.assemble(("redraft", "bold"), f" {name}: an EAGLE-3 draft for {target_name}"))
    slots = " | ".join(site.words for site in wiring.aux)
    console.print(f"  wiring   fc reads cat({slots}), {wiring.feature_width} wide")
    console.print(f"  teacher  {wiring.teacher}")
    console.print(f"  folder   {shown_path(run.run_dir)}")
    target = Path(run.config.target.path)
    making = "" if target.exists() or not run.config.target.maker else ", made now"
    console.print(f"  target   {shown_path(target)}{making}")


def summary(run: Run, facts: dict[str, Any]) -> None:
    """Where everything is: a line a thing, unbroken, so that a path can be copied."""
    console.print(Text("Where everything is", "bold"))
    rows = {**facts, "settings": run.run_dir / "config.yaml", "made with": run.run_dir / "run.json"}
    widest = max(map(len, rows))
    for name, value in rows.items():
        place = shown_path(value) if isinstance(value, Path) else str(value).replace(f"{os.getcwd()}/", "")
        console.print(Text(f"  {name:<{widest}}  {place}"), soft_wrap=True)
