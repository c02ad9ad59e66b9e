"""What the page is told beside the measured figures: a run's training, its machine, the commands to go on with."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3.atomic import read_json
from eagle3.redact import hidden_words
from eval.results import AcceptResult
from eval.training import Training, training_of
from train.front.config import PROJECT_ROOT
from train.front.console import shown_path
from train.front.context import Run
from train.front.records import prepared_counts
from train.front.serving import serving_command
from train.metrics import read_metrics


@dataclass(frozen=True)
class PageFacts:
    """What `measure` cannot know; gathered before it, so that a damaged file costs no measurement.

    Args:
        training: the draft's; None where it was not trained here.
        machine: when, which commit, which processor.
        recipes: what one would do next, in words -> the command.
    """

    training: Training | None
    machine: dict[str, str]
    recipes: dict[str, str]

    @classmethod
    def of(cls, run: Run, probes: list[str]) -> PageFacts:
        """Read them; `probes` are the commands that find out what the draft is fed.

        Raises:
            IntegrityError: one of the run's own files is damaged.
        """
        return cls(training_facts(run), machine(run.run_dir / "run.json"), recipes(run, probes))

    def fill(self, result: AcceptResult) -> None:
        """Put them into a result."""
        result.training, result.recipes = self.training, self.recipes
        result.environment = {**self.machine, **result.environment}


def training_facts(run: Run) -> Training | None:
    """Curves, counts and coverage from the run's own files; None where it has not trained here."""
    folder = run.run_dir / "train"
    rows = read_metrics(folder / "metrics.jsonl")
    if not rows:
        return None
    coverage = folder / "coverage.json"
    return training_of(rows, prepared_counts(run), read_json(coverage) if coverage.exists() else None)


def machine(path: Path) -> dict[str, str]:
    """From a run's provenance: when, which commit, which processor. Empty where there is none."""
    if not path.exists():
        return {}
    facts = read_json(path)
    hardware, git = facts["hardware"], facts["git"]
    found = {
        "measured": facts["started"][:16].replace("T", " "),
        "redraft": _commit(facts["versions"].get("redraft"), git),
        "machine": f"{hardware['cpu']}, {hardware['cores']} cores, {hardware['memory_bytes'] / 1e9:.0f} GB of memory",
        "accelerators": ", ".join(hardware["gpus"]),
    }
    return {name: value for name, value in found.items() if value}


def _commit(version: str | None, git: dict[str, Any]) -> str:
    parts = [version or "", f"commit {git['commit'][:12]}" if git.get("commit") else ""]
    return " ".join(filter(None, parts)) + (", with changes" if git.get("modified") else "")


def command_line(arguments: list[str]) -> str:
    """The command as it would be typed again, from the same folder."""
    program, *rest = hidden_words(arguments)
    return shlex.join(["python", shown_path(program), *rest])


def recipes(run: Run, probes: list[str]) -> dict[str, str]:
    """What one would do next, in words, and how."""
    folder = shown_path(run.run_dir)
    convention = run.config.export.convention
    found = {
        f"Serve it (its layer ids are written for {convention})": serve_command(run),
        "Measure it in that server": shlex.join([*again(run), *connected(convention)]),
        "Set it beside another draft": f"python -m eval.compare {shlex.quote(folder)} runs/OTHER --out runs/compared",
    }
    for command in probes:
        kind = command.split("eval.probe ", 1)[1].split()[0] if "eval.probe " in command else "server"
        found[PROBES[kind]] = command
    return found


def again(run: Run) -> list[str]:
    """The eval stage of this run, with its own settings; Hydra takes a relative path from its own program's folder."""
    where = ["--config-path", os.path.abspath(run.run_dir), "--config-name", "config"]
    return ["python", shown_path(PROJECT_ROOT / "train" / "run.py"), *where, "stages=[eval]"]


def connected(convention: str) -> list[str]:
    """Settings for a server that is up on the engine's own port."""
    engine, port = ("vllm", 8000) if convention.startswith("vllm") else ("sglang", 30000)
    return [f"eval.engine={engine}", f"eval.server.url=http://127.0.0.1:{port}"]


PROBES = {
    "server": "Start a server that hands out what it feeds",
    "draft": "Find out which wiring the draft was trained on",
    "live": "Find out which tensors a running server feeds it (with --json > probe.json beside the results, this page "
    "shows the answer when it is made again)",
}


def serve_command(run: Run) -> str:
    """The shortest command that serves the draft in the engine whose ids it carries."""
    engine = "vllm" if run.config.export.convention.startswith("vllm") else "sglang"
    command = serving_command(engine, shown_path(run.target_path), shown_path(run.served), run.config.eval.num_steps)
    return shlex.join(command)
