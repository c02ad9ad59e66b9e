"""The eval stage: load the served folder back, measure it in the engine, write and track the results."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eagle3.atomic import read_json, sha256_file
from eagle3.checkpoint import load_served
from eagle3.errors import RedraftError
from eagle3.hf_model import choose_device, choose_dtype, load_target
from eagle3.wiring import Wiring
from eval.accept import count_generations, measure
from eval.engines.local import LocalEngine
from eval.prompts import read_prompt_sets
from eval.report import write_report
from train.front.console import console, progress_bar
from train.front.context import Run
from train.front.records import StageRecord, skip
from train.track import Tracker


def predicted_acceptance(run: Run) -> list[float] | None:
    """Per-step conditional accuracies of the last validation; None without a validation split."""
    path = run.run_dir / "train" / "result.json"
    return read_json(path)["val"].get("acc") if path.exists() else None


def eval_stage(run: Run) -> dict[str, Any]:
    """Served folder -> accept length, table, picture, report.

    Raises:
        RedraftError: there is no served folder, or it does not fit the run's target or wiring.
    """
    if not (run.served / "config.json").exists():
        raise RedraftError("no served draft", where=str(run.served), mend="run the export stage first")
    cfg, folder = run.config.eval, run.run_dir / "eval"
    inputs = {
        "eval": asdict(cfg),
        "draft": sha256_file(run.served / "model.safetensors"),
        "target": run.identity,
        "prompts": [sha256_file(path) for path in map(Path, cfg.prompt_sets)],
    }
    record = StageRecord(folder / "stage.json", inputs)
    if skip(record):
        console.print((folder / "table.txt").read_text(encoding="utf-8"))
        return {"accept length": folder / "report.html"}
    record.begin()
    draft, trained, _ = load_served(run.served, run.weights.embedding(), wiring=run.wiring)
    prompt_sets = read_prompt_sets(cfg.prompt_sets, cfg.max_prompts)
    device = choose_device(run.config.capture.device)
    dtype = choose_dtype(run.config.capture.compute_dtype, device)
    target = load_target(run.target_path, device, dtype, run.config.target.trust_remote_code, with_head=True)

    def engine(wiring: Wiring) -> LocalEngine:
        return LocalEngine(target, draft, wiring)

    with progress_bar("continuations", count_generations(prompt_sets, cfg, trained), "texts") as advance:
        result = measure(
            engine,
            prompt_sets,
            cfg,
            tokenizer=run.tokenizer,
            trained=trained,
            title=run.config.name,
            target=run.config.target.name,
            draft=str(run.served),
            predicted_acceptance=predicted_acceptance(run),
            commands=["python " + " ".join(sys.argv)],
            template_kwargs=run.config.data.template_kwargs,
            advance=advance,
            log=lambda figures: track(run, figures),
        )
    write_report(result, folder, console)
    record.finish()
    return {"accept length": f"{folder / 'report.html'} (and results.json, table.txt, accept.png beside it)"}


def track(run: Run, figures: dict[str, float]) -> None:
    """Add the figures to the training run's own metrics file and tracker run, at its last step."""
    folder = run.run_dir / "train"
    result = folder / "result.json"
    step = read_json(result)["steps"] if result.exists() else 0
    tracker = Tracker(folder, run.config.track, run.config.name, {}, resume_step=step)
    named = {name.removeprefix("eval/"): value for name, value in figures.items()}
    tracker.write({"kind": "eval", "step": step, **named})
    tracker.close()
