"""What the tracker is given once the stages are through: the figures to compare runs by, and the artifacts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eagle3.atomic import read_json, sha256_file, sha256_json, write_json
from eagle3.errors import IntegrityError
from eagle3.place import exists
from eval.results import AcceptResult, predicted_tau
from train.front.context import Run
from train.front.records import training_result
from train.metrics import read_metrics
from train.track import WandbRun

TOLD = "tracked.json"  # hash of what the tracker was given last
SERVED = ("config.json", "README.md", "model.safetensors")


def publish(run: Run) -> None:
    """Add the run's figures and artifacts to the tracker's run of its training; nothing when it has them already.

    Raises:
        IntegrityError: a file of the run cannot be read.
    """
    folder = run.run_dir / "train"
    if run.config.track.wandb == "disabled" or not folder.is_dir():
        return
    figures = summary_figures(run)
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if row["kind"] == "eval"]
    served = {name: run.served / name for name in SERVED if (run.served / name).is_file()}
    hashes = {name: sha256_file(path) for name, path in served.items()} if run.config.track.artifacts else {}
    key = sha256_json({"figures": figures, "rows": rows, "served": hashes})
    if _told(folder / TOLD) == key:
        return
    tracked = WandbRun.start(folder, run.config.track, run.config.name, {})
    if tracked is None:
        return
    for row in rows:
        tracked.log(row)
    tracked.summarize(figures)
    if run.config.track.artifacts:
        _artifacts(run, tracked, served, hashes)
    tracked.finish()
    write_json(folder / TOLD, {"key": key})


def summary_figures(run: Run) -> dict[str, float]:
    """Predicted accept length, and the measured one of each engine; `tau` is that of the configured engine."""
    out: dict[str, float] = {}
    result = training_result(run.run_dir)
    if result:
        predicted = predicted_tau(result["val"].get("acc"), run.config.eval.num_steps)
        out |= {} if predicted is None else {"predicted_tau": predicted}
    for path in sorted(run.run_dir.glob("eval*/results.json")):
        measured = AcceptResult.load(path)
        own = [one.overall.tau for one in measured.served if not one.differences]
        if own:
            out[f"tau_{measured.engine}"] = own[0]
            if measured.engine == run.config.eval.engine:
                out["tau"] = own[0]
    return out


def _artifacts(run: Run, tracked: WandbRun, served: dict[str, Path], hashes: dict[str, str]) -> None:
    facts: dict[str, Any] = {"wiring": run.wiring.names, "teacher": run.wiring.teacher}
    manifest = run.store / "manifest.json"
    if exists(manifest):
        tracked.artifact(f"{run.config.name}-store", "store-manifest", {"manifest.json": manifest.read_bytes()}, facts)
    if served:
        files: dict[str, Path | bytes] = dict(served)
        tracked.artifact(f"{run.config.name}-served", "model", files, {**facts, "sha256": hashes})


def _told(path: Path) -> str:
    try:
        return str(read_json(path)["key"]) if path.exists() else ""
    except (IntegrityError, KeyError, TypeError):
        return ""  # to be told again does no harm
