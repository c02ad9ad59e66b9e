"""How bad input enters: through the real command lines, in this process, each refusal held against the house's rules.

A refusal is exit code 2 and exactly one line on standard error, with a mend, and leaves nothing half-written behind.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from planted_bench import ROOT, Bench, Reached, guarded

from train import run as front_door

Write = Callable[[Path], Any]  # writes the bad input to the path it is given
OF_A_RUN = {"config.yaml", "run.json", "commands.log"}  # what a run folder holds before its first stage


class UntoldError(AssertionError):
    """A bad input was not refused as it should be."""


def the_line(code: int, err: str) -> str:
    """The one line of a refusal, "" when all went well.

    Raises:
        UntoldError: another exit code, no line or several, or no word of how to mend it.
    """
    if code == 0:
        return ""
    lines = err.strip().splitlines()
    if code != 2 or len(lines) != 1 or not lines[0].startswith("error: ") or ". To mend: " not in lines[0]:
        raise UntoldError(f"exit code {code} with {len(lines)} lines:\n{err[-3000:]}")
    return lines[0].removeprefix("error: ")


def entered(main: Callable[[Sequence[str] | None], int], *arguments: Any) -> str:
    """The line that a command line of the product gets."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([str(one) for one in arguments])
        except Reached:
            return ""
        except SystemExit as left:
            raise UntoldError(f"it left with {left.code!r}:\n{err.getvalue()[-3000:]}") from None
    return the_line(code, err.getvalue())


def front_door_line(*arguments: str, folder: Path = ROOT / "conf") -> str:
    """The line that `python train/run.py ...` gets."""
    argv = ["train/run.py", "--config-path", str(folder), *arguments]
    with mock.patch.object(sys, "argv", argv), guarded():
        return entered(lambda _argv: front_door.cli())


@functools.cache
def _preset(*overrides: str) -> Any:
    """Settings that Hydra composed: once, for that is most of a refusal's time."""
    with initialize_config_dir(version_base="1.3", config_dir=str(ROOT / "conf")):
        return compose(config_name="config", overrides=list(overrides))


def settled_line(preset: Sequence[str], *settings: str) -> str:
    """The line that the front door gets for settings, KEY=VALUE, on top of a composed preset."""
    cfg = copy.deepcopy(_preset(*preset))
    for text in settings:
        name, _, value = text.partition("=")
        OmegaConf.update(cfg, name.lstrip("+"), yaml.safe_load(value), force_add=name.startswith("++"))
    return _entered_with(cfg)


def _entered_with(cfg: Any) -> str:
    """The front door's line on settings that Hydra has composed."""
    inside = front_door.compose_and_run.__wrapped__
    with (
        mock.patch.object(sys, "argv", ["train/run.py"]),
        mock.patch.object(front_door, "compose_and_run", lambda: inside(cfg)),
        mock.patch.object(front_door, "apply_sweep"),
        guarded(),
    ):
        return entered(lambda _argv: front_door.cli())


def staged(bench: Bench, stage: str, *overrides: str, run_dir: Path | None = None) -> str:
    """The line that one stage of the run gets; a refusal may leave only what a run folder begins with.

    `run_dir` is a copy of a finished run; without it the folder is new.
    """
    folder = run_dir or bench.folder("run")
    before = {path.name for path in folder.iterdir()} if folder.exists() else set()
    preset = ("conf=tiny_kimi", *bench.settings(bench.root / "run"))
    line = settled_line(preset, f"run_dir={folder}", f"stages=[{stage}]", *overrides)
    left = {path.name for path in folder.iterdir() if not path.name.endswith(".lock")} if folder.is_dir() else set()
    if line and left - before - OF_A_RUN:
        raise UntoldError(f"it left {sorted(left - before - OF_A_RUN)} behind")
    torn = [path for path in bench.root.rglob("*") if path.name.endswith((".tmp", ".part")) or ".tmp." in path.name]
    if torn:
        raise UntoldError(f"half-written: {torn}")
    return line


def shared(name: str, bad: Callable[[Bench], str], sound: Callable[[Bench], str]) -> Callable[[Bench, bool], str]:
    """A fault's `run`: the bad input, or the sound one that several rows share, entered once a bench."""
    return lambda bench, planted: bad(bench) if planted else bench.once(name, lambda: sound(bench))
