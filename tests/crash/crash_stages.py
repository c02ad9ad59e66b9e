"""The stages that are killed, each on a small run of its own, with an uninterrupted run of each to compare with."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from crash_child import Orders, child
from omegaconf import OmegaConf

from train.front.provenance import RERUN_HEAD
from train.world import environment

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit" / "regenerate"))
from fake_chat import FakeChat, serving

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "one", "red", "bird", "fly", "over", "so", "it"]
CONVERSATIONS = 26
ANSWER_DELAY_S = 0.02  # of the chat server, so that kills fall between answers
PATIENCE_S = 300.0


@dataclass(frozen=True)
class Stage:
    """A stage of the front door.

    Args:
        name: as the campaign calls it.
        after: the stage whose folder it goes on from; "" = from nothing.
        stage: as the front door calls it.
        settings: of the command line.
    """

    name: str
    after: str
    stage: str
    settings: tuple[str, ...] = ()

    @property
    def words(self) -> list[str]:
        """The command line."""
        return [f"stages=[{self.stage}]", *self.settings]


STAGES = {
    stage.name: stage
    for stage in (
        Stage("regenerate", "", "regenerate"),
        Stage("prepare", "regenerate", "prepare"),
        Stage("extract", "prepare", "extract"),
        Stage("train", "extract", "train"),
        Stage(
            "train-2", "extract", "train", ("++train.processes=2", "train.micro_batch_size=2", "++train.zero_stage=2")
        ),
        Stage("export", "train", "export"),
        Stage("eval", "export", "eval"),
    )
}


def write_inputs(root: Path, target: Path) -> None:
    """Conversations, prompts and the configuration of a small run on an 8-layer Llama; all paths are relative."""
    root.mkdir(parents=True)
    with open(root / "selected.jsonl", "w", encoding="utf-8") as out:
        for n in range(CONVERSATIONS):
            asked = " ".join(WORDS[(n * 3 + k) % len(WORDS)] for k in range(2 + n % 3))
            turns = [{"role": "user", "content": f"{asked} {n}"}, {"role": "assistant", "content": "to be replaced"}]
            out.write(json.dumps({"id": f"c{n:02d}", "messages": turns}) + "\n")
    with open(root / "prompts.jsonl", "w", encoding="utf-8") as out:
        for n in range(3):
            text = " ".join(WORDS[(n + k) % len(WORDS)] for k in range(5))
            out.write(json.dumps({"id": f"p{n}", "messages": [{"role": "user", "content": text}]}) + "\n")
    (root / "config.yaml").write_text(RERUN_HEAD + OmegaConf.to_yaml(OmegaConf.create(settings(target))))


def settings(target: Path) -> dict[str, Any]:
    """The configuration."""
    return {
        "name": "crash",
        "run_dir": "run",
        "stages": ["plan"],
        "paths": {"selected": "selected.jsonl", "answers": "answers", "prepared": "prepared", "store": "store"},
        "target": {
            "name": "tiny", "path": str(target), "model_type": "llama",
            "num_layers": 8, "hidden_size": 64, "vocab_size": 320,
        },
        "wiring": {"aux": ["layer_2", "layer_4", "layer_5"]},
        "regenerate": {
            "source": "selected.jsonl", "concurrency": 3, "max_tokens": 40, "backoff_s": 0.01, "outage_s": 5.0,
            "temperature": 0.7, "top_p": 0.9, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0,
        },
        "data": {"sources": ["answers/answers.jsonl"], "max_length": 96, "val_fraction": 0.1},
        "capture": {"batch_tokens": 200},
        "store": {"shard_tokens": 300, "verify_records": 1},
        "draft": {"vocab_size": 64},
        "train": {
            "ttt_steps": 2, "global_batch_size": 4, "micro_batch_size": 4, "lr": 1e-3, "save_every": 2, "val_every": 2,
            "max_steps": 5,
        },
        "track": {"wandb": "disabled"},
        "export": {"convention": "sglang-0.5.23"},
        "eval": {"prompt_sets": ["prompts.jsonl"], "max_new_tokens": 6},
    }  # fmt: skip


@dataclass
class Ended:
    """How a run ended: its exit code (-9: killed), what it said, and seconds from its begin."""

    code: int
    said: str
    seconds: float


@dataclass
class Whole:
    """An uninterrupted run of a stage: its folder, how long it took, and its calls at which it can be killed."""

    root: Path
    seconds: float
    calls: list[tuple[str, int, str]]  # (process, number within the process, "module.function")


@dataclass
class Workshop:
    """Runs stages in folders below `base`; close it at the end.

    Args:
        base: an empty folder.
        target: the tiny Llama.
        quick: as in `Orders`.
    """

    base: Path
    target: Path
    quick: bool = True
    _whole: dict[str, Whole] = field(default_factory=dict)
    _number: int = 0
    _open: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __post_init__(self) -> None:
        self.chat = self._open.enter_context(serving(FakeChat(delay_s=ANSWER_DELAY_S)))
        self._context = multiprocessing.get_context("forkserver")
        forkserver._forkserver._stop()  # type: ignore[attr-defined]  # another test's may have other modules loaded
        self._context.set_forkserver_preload(["crash_preload"])
        here = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
        # The server looks nowhere else for what to import, and says nothing when it does not find it; and that the
        # killed leave semaphores (tqdm's) to their keeper is no news.
        with environment({"PYTHONPATH": here, "PYTHONWARNINGS": "ignore:resource_tracker:UserWarning"}):
            forkserver.ensure_running()

    def close(self) -> None:
        """End the chat server."""
        self._open.close()

    def whole(self, name: str) -> Whole:
        """The uninterrupted run of a stage, made when first asked for."""
        if name not in self._whole:
            root = self.fresh(name, f"whole-{name}")
            calls = self.base / f"calls-{name}"
            ended = self.run(root, STAGES[name], calls=calls)
            assert ended.code == 0, ended.said
            self._whole[name] = Whole(root, ended.seconds, _calls(calls))
        return self._whole[name]

    def fresh(self, name: str, folder: str = "") -> Path:
        """A folder in which stage `name` has not run yet and all before it have."""
        self._number += 1
        root = self.base / (folder or f"{name}-{self._number}")
        before = STAGES[name].after
        if before:
            shutil.copytree(self.whole(before).root, root, symlinks=True)
        else:
            write_inputs(root, self.target)
        return root

    @contextlib.contextmanager
    def started(self, root: Path, stage: Stage, *more: str, **orders: Any) -> Iterator[Any]:
        """A run of the stage in `root`, as a process that has come to the front door's first line."""
        words = [*stage.words, *more]
        if stage.stage == "regenerate":
            words.append(f"++regenerate.url={self.chat.url}")
        self._number += 1
        told = Orders(root, words, self.base / f"said-{self._number}.log", quick=self.quick, **orders)
        mine, theirs = self._context.Pipe()
        process = self._context.Process(target=child, args=(told, theirs))
        process.start()
        theirs.close()
        assert mine.poll(PATIENCE_S) and mine.recv_bytes() == b"begun"
        process.said = told.said
        try:
            yield process
        finally:
            end_group(process)

    def run(self, root: Path, stage: Stage, *more: str, kill_after: float | None = None, **orders: Any) -> Ended:
        """Run the stage to its end, or kill it after so many seconds, or let it die at `moment`."""
        with self.started(root, stage, *more, **orders) as process:
            began = time.monotonic()
            process.join(PATIENCE_S if kill_after is None else kill_after)
            if kill_after is None:
                assert process.exitcode is not None, "it hangs"
            else:
                end_group(process)
            seconds = time.monotonic() - began
        return Ended(process.exitcode, process.said.read_text(errors="replace"), seconds)


def end_group(process: Any) -> None:
    """Kill what is left of a run's process group, and wait until nothing is."""
    deadline = time.monotonic() + PATIENCE_S
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join(PATIENCE_S)
    while _living(process.pid):
        assert time.monotonic() < deadline, "a process of the group does not die"
        time.sleep(0.002)


def _living(group: int) -> bool:
    """Whether any process of a group runs; one that nobody has taken the exit code of does not."""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, IndexError):
                state, _, its_group = Path(f"/proc/{entry}/stat").read_text().rsplit(")", 1)[1].split()[:3]
                if int(its_group) == group and state not in ("Z", "X"):
                    return True
    return False


def _calls(path: Path) -> list[tuple[str, int, str]]:
    numbers: dict[str, int] = defaultdict(int)
    found = []
    for line in path.read_text().splitlines():
        process, name = line.split()
        found.append((process, numbers[process], name))
        numbers[process] += 1
    return found
