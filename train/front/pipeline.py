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
from rich.table import Table
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from eagle3.errors import RedraftError
from train.front import samples, stages
from train.front.accept import eval_stage
from train.front.config import STAGES, RedraftConfig
from train.front.console import console
from train.front.context import Run
from train.front.plan import plan
from train.front.provenance import write_provenance
from train.world import choose_accelerator

STAGE_FUNCTIONS: dict[str, Callable[[Run], dict[str, Any]]] = {
    "select": samples.select_stage,
    "regenerate": samples.regenerate_stage,
    "prepare": stages.prepare_stage,
    "extract": stages.extract_stage,
    "train": stages.train_stage,
    "export": stages.export_stage,
    "eval": eval_stage,
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


def mark_latest(run_dir: Path) -> None:
    """Point `latest`, beside the run folder, at it."""
    link = run_dir.parent / "latest"
    temporary = link.with_name(f".latest.{socket.gethostname()}.{os.getpid()}")
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
    with locked(run_dir, shared=wanted == ["extract"]):
        write_provenance(config, run_dir)
        run = Run.create(config, run_dir)
        heading(run)
        _ = run.target_path  # every stage needs it: made or refused before the first one starts
        facts: dict[str, Any] = {}
        for number, name in enumerate(wanted, start=1):
            started = time.monotonic()
            console.print(f"[bold]\\[{number}/{len(wanted)}] {name}[/]")
            facts.update(run_stage(name, run))
            console.print(f"      done in {time.monotonic() - started:.0f} s")
        if config.mark_latest:
            mark_latest(run_dir)
        summary(run, facts)


def run_stage(name: str, run: Run) -> dict[str, Any]:
    """Run one stage, turning a full disk or a read-only folder into one line.

    Raises:
        RedraftError: the stage refused its input, or the system refused a write.
    """
    try:
        return STAGE_FUNCTIONS[name](run)
    except OSError as err:
        raise RedraftError(
            f"the {name} stage could not read or write a file",
            where=str(err.filename or run.run_dir),
            why=err.strerror or str(err),
            mend="free space or fix the permissions, then run the same command again: finished work is kept",
        ) from err


def heading(run: Run) -> None:
    """Say what this run is."""
    wiring = run.wiring
    console.print(f"[bold]redraft[/] {run.config.name}: an EAGLE-3 draft for {run.config.target.name}")
    slots = " | ".join(site.words for site in wiring.aux)
    console.print(f"  wiring   fc reads cat({slots}), {wiring.feature_width} wide")
    console.print(f"  teacher  {wiring.teacher}")
    console.print(f"  folder   {run.run_dir}")
    target = Path(run.config.target.path)
    making = "" if target.exists() or not run.config.target.maker else ", made now"
    console.print(f"  target   {target}{making}")


def summary(run: Run, facts: dict[str, Any]) -> None:
    """Where everything is."""
    table = Table(show_header=False, title="Where everything is", title_justify="left")
    for name, value in facts.items():
        table.add_row(name, str(value))
    table.add_row("config, provenance", f"{run.run_dir / 'config.yaml'}, {run.run_dir / 'run.json'}")
    console.print(table)
