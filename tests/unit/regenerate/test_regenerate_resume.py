"""Killed, torn, mixed up or run twice: the answers are those of one unbroken run."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_chat import FakeChat, completion, serving
from regenerate_case import SET, read_lines

from data_prep.regenerate.config import RegenerateConfig
from data_prep.regenerate.part import PartFile, whole_record
from data_prep.regenerate.run import regenerate
from data_prep.store.lock import FileLock
from eagle3.errors import ConfigError, IntegrityError, RedraftError

Quick = Callable[..., RegenerateConfig]


@pytest.fixture(scope="module")
def fork() -> Any:
    """Starts children that have the program loaded already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["data_prep.regenerate.__main__"])
    return context


class Child:
    """`python -m data_prep.regenerate` in a process of its own."""

    def __init__(self, fork: Any, url: str, source: Path, out: Path) -> None:
        words = [word for name, value in SET.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        words += ["--concurrency", "4", "--max-tokens", "50", "--backoff-s", "0.01"]
        words += ["--url", url, "--source", str(source), "--out", str(out)]
        self.said = out.with_name("child.log")
        self._process = fork.Process(target=entry, args=(words, str(self.said)))
        self._process.start()

    @property
    def code(self) -> int | None:
        return self._process.exitcode

    def end(self, number: int | None = None) -> int | None:
        """Send a signal, or none, and wait for the end."""
        if number is not None:
            os.kill(self._process.pid, number)
        self._process.join(60)
        return self.code


def entry(words: list[str], said: str) -> None:
    """What a child does: its output goes to a file, and its exit code is the program's."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell started all this in the background
    log = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    from data_prep.regenerate.__main__ import main

    sys.exit(main(words))


def lines_in(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for(path: Path, count: int, child: Child) -> None:
    deadline = time.monotonic() + 240
    while lines_in(path) < count and time.monotonic() < deadline and child.code is None:
        time.sleep(0.005)
    assert lines_in(path) >= count


def test_killed_at_several_moments_it_ends_like_an_unbroken_run(
    tmp_path: Path, source: Path, quick: Quick, fork: Any
) -> None:
    out, part = tmp_path / "out", tmp_path / "out" / "answers.part.jsonl"
    with serving(FakeChat(delay_s=0.03)) as fake:
        regenerate(quick(), source, tmp_path / "whole", fake.url)
        asked_once = len(fake.requests)
        for lines in (1, 6, 15):  # the header alone, then answers
            child = Child(fork, fake.url, source, out)
            wait_for(part, lines, child)
            assert child.end(signal.SIGKILL) == -signal.SIGKILL
        time.sleep(0.2)  # let the last requests of the dead child end
        kept = lines_in(part) - 1
        before = len(fake.requests)
        child = Child(fork, fake.url, source, out)
        assert child.end() == 0, child.said.read_text()
    assert asked_once == 24 and 14 <= kept < 24 and len(fake.requests) - before == 24 - kept
    assert (out / "answers.jsonl").read_bytes() == (tmp_path / "whole" / "answers.jsonl").read_bytes()
    assert "24 of 24 conversations" in child.said.read_text() and not part.exists()


def test_interrupted_it_leaves_cleanly_and_goes_on(tmp_path: Path, source: Path, quick: Quick, fork: Any) -> None:
    out, part = tmp_path / "out", tmp_path / "out" / "answers.part.jsonl"
    with serving(FakeChat(delay_s=0.05)) as fake:
        child = Child(fork, fake.url, source, out)
        wait_for(part, 6, child)
        assert child.end(signal.SIGINT) == 130
        said = child.said.read_text()
        assert "Traceback" not in said and "the same command goes on" in said
        assert part.read_bytes().endswith(b"\n")
        regenerate(quick(), source, out, fake.url)
    assert [one["id"] for one in read_lines(out / "answers.jsonl")] == [f"r{i:02d}" for i in range(24)]


def stopped_half_way(out: Path, source: Path, cfg: RegenerateConfig, fake: FakeChat) -> Path:
    """Let the second half of the questions fail; returns the part file."""
    fake.script = lambda body, _nth: (
        (400, "no", {}) if int(body["messages"][-1]["content"].split()[-1]) >= 12 else completion(body)
    )
    with pytest.raises(RedraftError, match="too many"):
        regenerate(cfg, source, out, fake.url)
    fake.script = lambda body, _nth: completion(body)
    return out / "answers.part.jsonl"


def test_torn_end_is_cut_off(tmp_path: Path, source: Path, quick: Quick) -> None:
    with serving(FakeChat()) as fake:
        regenerate(quick(), source, tmp_path / "whole", fake.url)
        whole = stopped_half_way(tmp_path / "begun", source, quick(concurrency=1), fake).read_bytes()
        assert whole.count(b"\n") == 13
        cut = whole[: whole.rfind(b"\n", 0, -1) + 1]  # the last record is lost, and what follows is torn
        for name, tear in {
            "half": b'{"id": "r11", "mess',
            "zeros": b"\0\0\n\0",
            "foreign": b'["x"]\n{"id": "r1',
        }.items():
            out = tmp_path / name
            shutil.copytree(tmp_path / "begun", out)
            (out / "answers.part.jsonl").write_bytes(cut + tear)
            before = len(fake.requests)
            regenerate(quick(), source, out, fake.url)
            assert len(fake.requests) - before == 24 - 11
            assert (out / "answers.jsonl").read_bytes() == (tmp_path / "whole" / "answers.jsonl").read_bytes()


def test_other_settings_are_refused(tmp_path: Path, source: Path, quick: Quick) -> None:
    out = tmp_path / "out"
    changes: dict[str, dict[str, Any]] = {
        "temperature was 0.7, now 0.9": {"temperature": 0.9},
        "seed": {"seed": 5},
        "max_tokens": {"max_tokens": 51},
        "thinking was None, now True": {"thinking": True},
        "turns": {"turns": "all"},
    }
    with serving(FakeChat()) as fake:
        part = stopped_half_way(out, source, quick(concurrency=1), fake)
        before, asked = part.read_bytes(), len(fake.requests)
        for named, change in changes.items():
            with pytest.raises(ConfigError, match=f"other settings .*{named}"):
                regenerate(quick(**change), source, out, fake.url)
        assert part.read_bytes() == before and len(fake.requests) == asked
        regenerate(quick(concurrency=9, retries=1, timeout_s=7.0), source, out, fake.url)  # these bear on nothing
        for named, change in changes.items():  # nor may a finished folder be mixed
            with pytest.raises(ConfigError, match=f"other settings .*{named}"):
                regenerate(quick(**change), source, out, fake.url)


def test_another_model_or_source_is_refused(tmp_path: Path, source: Path, quick: Quick) -> None:
    out = tmp_path / "out"
    with serving(FakeChat()) as fake:
        stopped_half_way(out, source, quick(concurrency=1), fake)
        fake.models = [{"id": "other"}]
        with pytest.raises(ConfigError, match="model was 'tiny', now 'other'"):
            regenerate(quick(), source, out, fake.url)
        fake.models = [{"id": "tiny"}]
        source.write_text(source.read_text().replace("question 3", "question 33"))
        with pytest.raises(ConfigError, match="source_sha256"):
            regenerate(quick(), source, out, fake.url)


def test_finished_folder_is_left_as_it_is(tmp_path: Path, source: Path, quick: Quick) -> None:
    with serving(FakeChat()) as fake:
        first = regenerate(quick(), source, tmp_path / "out", fake.url)
        stamp, done = (tmp_path / "out" / "answers.jsonl").stat().st_mtime_ns, []
        assert regenerate(quick(), source, tmp_path / "out", fake.url, done.append) == first
        shutil.copy(tmp_path / "out" / "answers.jsonl", tmp_path / "out" / "answers.part.jsonl")
        assert regenerate(quick(), source, tmp_path / "out", fake.url) == first
        assert not (tmp_path / "out" / "answers.part.jsonl").exists()  # left by a kill right after the report
    assert len(fake.requests) == 24 and sum(done) == 24
    assert (tmp_path / "out" / "answers.jsonl").stat().st_mtime_ns == stamp


def test_two_at_once_are_refused_and_a_dead_ones_lock_is_free(
    tmp_path: Path, source: Path, quick: Quick, fork: Any
) -> None:
    out = tmp_path / "out"
    with serving(FakeChat(delay_s=0.05)) as fake:
        child = Child(fork, fake.url, source, out)
        wait_for(out / "answers.part.jsonl", 2, child)
        with pytest.raises(RedraftError, match="another process is writing"):
            regenerate(quick(), source, out, fake.url)
        child.end(signal.SIGKILL)
        assert (out / ".lock").exists()
        assert regenerate(quick(), source, out, fake.url)["answers"] == 24
    FileLock(out / ".lock").release()


def test_part_file_keeps_each_record_once(tmp_path: Path) -> None:
    path, settings = tmp_path / "p.jsonl", {"a": 1}
    part = PartFile(path, settings)
    for i in range(3):
        part.append({"id": str(i), "text": "ä\u2028\n"})
    with pytest.raises(AssertionError):
        part.append({"id": "1"})
    part.close()
    path.write_bytes(path.read_bytes() + json.dumps({"id": "1", "text": "again"}).encode() + b"\n")  # never written so
    again = PartFile(path, settings)
    assert len(again) == 3 and whole_record(again.line("1")) == {"id": "1", "text": "ä\u2028\n"}
    again.close()
    path.write_text("something else\n")
    with pytest.raises(IntegrityError, match="not a file of unfinished answers"):
        PartFile(path, settings)
