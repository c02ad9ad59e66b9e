"""What the terminal shows: at 80 columns, in a file, without colour, on a terminal that cannot move its cursor."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eagle3.wiring import Site, Wiring
from train.front import console as front
from train.front import pipeline
from train.progress import TrainProgress
from train.terminal import StageConsole, seconds_text, settle
from train.waits import ALLOWED

ROOT = Path(__file__).resolve().parents[3]
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
LONG = "      a line about /a/path/with [brackets] that goes on for longer than eighty columns, which a screen breaks"


def screen(**settings: Any) -> tuple[StageConsole, io.StringIO]:
    stream = io.StringIO()
    return StageConsole(file=stream, width=80, **settings), stream


def terminal() -> tuple[StageConsole, io.StringIO]:
    return screen(force_terminal=True, color_system="standard", _environ={"TERM": "xterm"})


def drawn(stream: io.StringIO) -> list[str]:
    """Every line that was on the screen at some moment, without colours."""
    return [line.rstrip() for line in re.split(r"[\r\n]+", ESCAPES.sub("", stream.getvalue())) if line.strip()]


def test_a_line_stays_whole_in_a_file() -> None:
    console, stream = screen()
    console.print(LONG, style="yellow")
    assert stream.getvalue() == LONG + "\n"


def test_a_long_line_hangs_under_itself_on_a_terminal() -> None:
    console, stream = terminal()
    console.print(LONG, style="yellow")
    lines = drawn(stream)
    assert "\x1b[33m" in stream.getvalue()
    assert len(lines) == 2 and all(line.startswith("      ") and len(line) <= 80 for line in lines)
    assert "[brackets]" in " ".join(lines)


def test_colour_goes_where_nobody_wants_it() -> None:
    console, stream = screen(force_terminal=True, _environ={"TERM": "xterm", "NO_COLOR": "1"})
    console.print(LONG, style="yellow")
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", stream.getvalue())


@pytest.mark.parametrize("total", [12, 1_234_567_890])
def test_a_bar_fits_into_80_columns(monkeypatch: pytest.MonkeyPatch, total: int) -> None:
    console, stream = terminal()
    monkeypatch.setattr(front, "console", console)
    with front.progress_bar("hidden states", total, "tokens") as advance:
        advance(6)
        time.sleep(0.01)
        advance(6)
    lines = drawn(stream)
    assert max(map(len, lines)) <= 80
    assert all("hidden states" in line and re.search(r"\d/\s*\d", line) for line in lines)  # none is broken in two
    assert f"12/{total}" in lines[-1] and "tokens/s" in lines[-1]


@pytest.mark.parametrize("waiting", [0.0, ALLOWED + 0.2])
def test_the_bar_of_training_fits_into_80_columns(waiting: float) -> None:
    console, stream = terminal()
    with TrainProgress(0, 1000, console) as progress:
        progress.step(999, {"loss": 12.3456, "acc": [0.5]}, 123456, 1.0, waiting)
        progress.say("held out: fine")
    lines = drawn(stream)
    assert max(map(len, lines)) <= 80
    last = lines[-1]
    told = "waits 22%" if waiting else "acc 50.0%"
    assert "999/1000" in last and f"loss 12.35 {told} 123,456 tok/s" in last


@pytest.mark.parametrize("settings", [{}, {"force_terminal": True, "_environ": {"TERM": "dumb"}}])
def test_a_log_and_a_dumb_terminal_get_lines(monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]) -> None:
    console, stream = screen(**settings)
    monkeypatch.setattr(front, "console", console)
    monkeypatch.setattr(front.LoggedProgress, "EVERY", 0.0)
    with front.progress_bar("answers", 10, "records") as advance:
        time.sleep(0.01)
        advance(4)
        advance(6)
    progress = TrainProgress(0, 2, console)
    progress.step(1, {"loss": 2.0, "acc": [0.25]}, 100, 50.0)
    progress.step(2, {"loss": 1.0, "acc": [0.5]}, 100, 50.0)
    first, last, *steps = stream.getvalue().splitlines()
    assert re.fullmatch(r"      answers: 4 of 10 records, [\d,.]+/s, \d:\d\d:\d\d left", first)
    assert re.fullmatch(r"      answers: 10 of 10 records, [\d,.]+/s, 0 s", last)
    assert steps == [
        "      step 1 of 2: loss 2.0000, accuracy 25.0%, 2 tokens/s, 0:00:50 left",
        "      step 2 of 2: loss 1.0000, accuracy 50.0%, 2 tokens/s",
    ]
    assert "\x1b" not in stream.getvalue()


def test_where_everything_is_can_be_copied(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    console, stream = terminal()
    monkeypatch.setattr(pipeline, "console", console)
    monkeypatch.chdir(tmp_path)
    deep = tmp_path / "runs" / "/".join(["a folder"] * 12)
    run: Any = SimpleNamespace(run_dir=deep)
    pipeline.summary(run, {"served draft": deep / "served", "hidden states": f"{tmp_path}/store (3 GB)"})
    lines = ESCAPES.sub("", stream.getvalue()).splitlines()
    near = str(deep.relative_to(tmp_path))
    assert lines[0] == "Where everything is"
    assert lines[1:] == [
        f"  served draft   {near}/served", "  hidden states  store (3 GB)",
        f"  settings       {near}/config.yaml", f"  made with      {near}/run.json",
    ]  # fmt: skip


def test_paths_are_shown_as_they_are_shortest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    assert front.shown_path(tmp_path / "a" / "runs" / "x") == "runs/x"
    assert front.shown_path(tmp_path / "b") == "../b"
    assert front.shown_path("/etc") == "/etc"
    assert front.shown_path("s3://bucket/store") == "s3://bucket/store"


def test_the_heading_fits_into_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    console, stream = terminal()
    monkeypatch.setattr(pipeline, "console", console)
    target = SimpleNamespace(name="Kimi-K2.5", path="/t", maker=None)
    wiring = Wiring((Site(3), Site(31), Site(59)), "final", "deepseek_v3", 61, 7168)
    run: Any = SimpleNamespace(
        config=SimpleNamespace(name="kimi", target=target), wiring=wiring, run_dir=Path("runs/k")
    )
    pipeline.heading(run)
    assert max(map(len, drawn(stream))) <= 80
    assert "fc reads cat(layer 3 | layer 31 | layer 59), 21504 wide" in ESCAPES.sub("", stream.getvalue())
    longest = max(len(f"[7/7] {name}  {about}") for name, about in pipeline.ABOUT.items())
    assert longest <= 80 and set(pipeline.ABOUT) == set(pipeline.STAGE_FUNCTIONS)


@pytest.mark.parametrize(("seconds", "words"), [(3.4, "3 s"), (99.0, "99 s"), (3725.0, "1:02:05")])
def test_durations_read_well(seconds: float, words: str) -> None:
    assert seconds_text(seconds) == words


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "term", "left"), [
    (Tty(), "xterm", "\x1b[?25h\r\x1b[K"), (Tty(), "dumb", ""), (io.StringIO(), "xterm", ""),
])  # fmt: skip
def test_a_bar_cut_off_leaves_the_terminal_usable(
    monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, term: str, left: str
) -> None:
    monkeypatch.setenv("TERM", term)
    settle(stream)
    assert stream.getvalue() == left


def test_an_interruption_while_modules_load_is_one_line(tmp_path: Path) -> None:
    """A module that waits stands in for a slow import."""
    (tmp_path / "hydra.py").write_text("import time\nprint('loading', flush=True)\ntime.sleep(600)\n")
    command = [sys.executable, str(ROOT / "train" / "run.py"), "conf=tiny_kimi"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    # A shell's background job ignores the signal, and so would the child.
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert child.stdout is not None and child.stdout.readline() == "loading\n"
    child.send_signal(signal.SIGINT)
    _, said = child.communicate(timeout=120)
    assert said == "interrupted: finished work is kept; run the same command to go on\n"
    assert child.returncode in (130, -signal.SIGINT)
