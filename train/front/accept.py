"""The eval stage: load the served folder back, measure it in the engine, write and track the results."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from eagle3.atomic import sha256_file, sha256_json
from eagle3.checkpoint import load_served
from eagle3.draft import Eagle3Draft
from eagle3.errors import RedraftError
from eagle3.hf_model import choose_device, choose_dtype, load_target
from eagle3.place import exists
from eagle3.target_identity import TargetIdentity
from eagle3.wiring import Wiring
from eval.accept import count_generations, measure
from eval.config import EvalConfig
from eval.engines.base import ServedEngine
from eval.engines.flags import sglang_speculation
from eval.engines.local import LocalEngine
from eval.engines.server_config import ServerConfig
from eval.prompts import PromptSet, read_prompt_sets
from eval.report import write_report
from eval.results import AcceptResult
from eval.series import series_of
from eval.served import count_served, measure_served
from eval.table import show
from train.front.console import console, progress_bar
from train.front.context import Run
from train.front.model_card import write_card
from train.front.page_facts import PageFacts, command_line
from train.front.records import StageRecord, skip, training_result
from train.metrics import MetricsLog

PROBED_URL = "http://127.0.0.1:30000"  # of a server started for the probe by the command that an alarm prints
# Never printed; wider than the names that hold a key, for nothing here has to stay readable.
SECRET = re.compile("TOKEN|KEY|SECRET|PASS|AUTH|CREDENTIAL", re.IGNORECASE)
# Settings of a server that do not bear on what it computes.
NOT_BEHAVIOUR = ("host", "port", "start_timeout_s", "request_timeout_s", "retries", "outage_s", "log_dir")


def predicted_acceptance(run: Run) -> list[float] | None:
    """Per-step conditional accuracies of the last validation; None without a validation split."""
    result = training_result(run.run_dir)
    return result["val"].get("acc") if result else None


def eval_folder(run: Run) -> Path:
    """Where an engine's results stand: each has its own, so that one draft's can be compared."""
    engine = run.config.eval.engine
    return run.run_dir / ("eval" if engine == "local" else f"eval-{engine}")


def eval_stage(run: Run) -> dict[str, Any]:
    """Served folder -> accept length, table, picture, report.

    Raises:
        RedraftError: there is no served folder, it does not fit the run's target or wiring, or the server fails.
    """
    for name in ("config.json", "model.safetensors"):
        if not (run.served / name).is_file():
            raise RedraftError("no served draft", where=str(run.served / name), mend="run the export stage first")
    cfg, folder = run.config.eval, eval_folder(run)
    prompt_sets = read_prompt_sets(cfg.prompt_sets, cfg.max_prompts)
    record = StageRecord(folder / "stage.json", eval_inputs(run, prompt_sets))
    facts = {"accept length": folder / "report.html"}
    if not (cfg.engine != "local" and cfg.server.connects) and skip(record):  # a running server may have changed
        show(series_of([AcceptResult.load(folder / "results.json")]), console)
        return facts
    page_facts = PageFacts.of(run, next_commands(run))
    record.begin()
    result = measure_locally(run, prompt_sets) if cfg.engine == "local" else measure_in_server(run, prompt_sets)
    page_facts.fill(result)
    write_report(result, folder, console)
    write_card(run)
    if result.incomplete:
        run.incomplete.append(f"{result.incomplete} ({folder / 'table.txt'} says why)")
    else:
        record.finish()
    return facts


def eval_inputs(run: Run, prompt_sets: list[PromptSet]) -> dict[str, Any]:
    """Everything that the figures depend on."""
    settings = asdict(run.config.eval)
    del settings["server"], settings["prompt_sets"]
    return {
        "eval": settings,
        "server": server_settings(run.config.eval),
        "draft": [sha256_file(run.served / name) for name in ("model.safetensors", "config.json")],
        "target": run.identity,
        "prompts": [[one.name, one.key] for one in prompt_sets],
        "template": run.config.data.template_kwargs,
    }


def server_settings(cfg: EvalConfig) -> dict[str, Any]:
    """Settings of the server that bear on what it does; the environment only as a hash, for it may hold secrets."""
    if cfg.engine == "local":
        return {}
    settings = {name: value for name, value in asdict(cfg.server).items() if name not in NOT_BEHAVIOUR}
    return {**settings, "env": sha256_json(settings["env"])}


def common_arguments(run: Run) -> dict[str, Any]:
    """What both measures are told."""
    return {
        "tokenizer": run.tokenizer,
        "title": run.config.name,
        "target": run.config.target.name,
        "draft": str(run.served),
        "predicted_acceptance": predicted_acceptance(run),
        "commands": [command_line(sys.argv)],
        "next_commands": next_commands(run),
        "template_kwargs": run.config.data.template_kwargs,
        "log": lambda figures: track(run, figures),
    }


def load_own_draft(run: Run) -> tuple[Eagle3Draft, Wiring]:
    """The served draft and its wiring, read strictly and held against this run's target.

    Raises:
        IntegrityError: weights, names or maps are wrong.
        WiringError: another wiring, or it was trained for other target weights.
    """
    draft, trained, config = load_served(run.served, run.weights.embedding(), wiring=run.wiring)
    block = config.get("redraft")
    named = block.get("target") if isinstance(block, dict) else None
    if named and not run.config.eval.accept_other_target:
        TargetIdentity.from_dict(named).check_same(
            run.weights.identity(),
            where=f"{run.target_path}, for the draft {run.served}",
            mend="set target.path to the target that the draft was trained for, or eval.accept_other_target=true to "
            "measure it on this one",
        )
    return draft, trained


def measure_locally(run: Run, prompt_sets: list[PromptSet]) -> AcceptResult:
    """In this process, one text at a time."""
    cfg = run.config.eval
    draft, trained = load_own_draft(run)
    device = choose_device(run.config.capture.device)
    dtype = choose_dtype(run.config.capture.compute_dtype, device)
    console.print(f"      loading {run.config.target.name}")
    target = load_target(run.target_path, device, dtype, run.config.target.trust_remote_code, with_head=True)

    def engine(wiring: Wiring) -> LocalEngine:
        return LocalEngine(target, draft, wiring)

    with progress_bar("continuations", count_generations(prompt_sets, cfg, trained), "texts") as advance:
        return measure(engine, prompt_sets, cfg, trained=trained, advance=advance, **common_arguments(run))


def measure_in_server(run: Run, prompt_sets: list[PromptSet]) -> AcceptResult:
    """In SGLang or vLLM, at every batch size asked for."""
    cfg, folder = run.config.eval, eval_folder(run)
    # Read back strictly first: engines skip names they do not know, and serve missing weights as they were allocated.
    _, trained = load_own_draft(run)
    engine = server_engine(run, trained)
    identity = {name: value for name, value in eval_inputs(run, []).items() if name in ("server", "draft", "target")}
    console.print(f"      {_what_is_asked(run)}")
    with progress_bar("continuations", count_served(prompt_sets, cfg, trained), "texts") as advance:
        return measure_served(
            engine,
            prompt_sets,
            cfg,
            trained=trained,
            folder=folder,
            identity=identity,
            advance=advance,
            **common_arguments(run),
        )


def _what_is_asked(run: Run) -> str:
    """Which servers the figures will come from: starting one takes minutes, in which no text is written."""
    cfg = run.config.eval
    if cfg.server.connects:
        return f"asking the {cfg.engine} server at {cfg.server.url or cfg.server.baseline_url}"
    plain = ", and once without" if cfg.baseline else ""
    return f"starting {cfg.engine} with the draft for each of {', '.join(cfg.serve)}{plain}"


def started_engine(run: Run, extra_args: list[str], work_dir: Path) -> ServedEngine:
    """The adapter of `eval.engine` for a server that is started for the run, whatever `eval.server.url` says.

    Args:
        run: gives the target and how the engine is started.
        extra_args: flags beside `eval.server.extra_args`.
        work_dir: for its log.
    """
    server = run.config.eval.server
    server = replace(server, url="", baseline_url="", extra_args=[*server.extra_args, *extra_args])
    return engine_adapter(run, run.wiring, server, work_dir)


def server_engine(run: Run, trained: Wiring) -> ServedEngine:
    """The adapter of `eval.engine` that serves the run's draft."""
    return engine_adapter(run, trained, run.config.eval.server, eval_folder(run) / "server")


def engine_adapter(run: Run, trained: Wiring, server: ServerConfig, work_dir: Path) -> ServedEngine:
    """The adapter of `eval.engine`."""
    cfg, trust = run.config.eval, run.config.target.trust_remote_code
    arguments = (run.target_path, run.served, trained, cfg.num_steps, server, work_dir, trust)
    if cfg.engine == "sglang":
        from eval.engines.sglang import SGLangEngine

        return SGLangEngine(*arguments)
    from eval.engines.vllm import VLLMEngine

    return VLLMEngine(*arguments)


def next_commands(run: Run) -> list[str]:
    """What finds out why served and predicted accept length part: what the draft was trained on, what it is fed."""
    cfg, target, served = run.config.eval, str(run.target_path), str(run.served)
    stored = ["--store", str(run.store)] if exists(run.store / "manifest.json") else []
    commands = [["python", "-m", "eval.probe", "draft", "--draft", served, "--target", target, *stored]]
    if cfg.engine == "sglang":
        url = cfg.server.url or PROBED_URL
        if not cfg.server.url:
            commands.append(probed_server(run))
        commands.append(["python", "-m", "eval.probe", "live", "--url", url, "--target", target, "--draft", served])
    return [shlex.join(command) for command in commands]


def probed_server(run: Run) -> list[str]:
    """The command that starts a server which hands out what it feeds the draft."""
    cfg = run.config.eval
    server = cfg.server
    flags = ["--model-path", str(run.target_path), "--port", PROBED_URL.rpartition(":")[2]]
    flags += ["--tp-size", str(server.tp), "--dtype", server.dtype]
    flags += sglang_speculation(run.served, cfg.num_steps, server.topk, server.draft_tokens)
    flags += ["--chunked-prefill-size", "-1", "--disable-radix-cache", "--enable-return-aux-hidden-states"]
    env = [f"{name}={value}" for name, value in server.env.items() if not SECRET.search(name)]
    python = [*(["env", *env] if env else []), server.python or "python"]
    return [*python, "-m", "sglang.launch_server", *flags, *server.extra_args]


def track(run: Run, figures: dict[str, float]) -> None:
    """Add the figures to the training run's own metrics file, at its last step; the tracker gets them at the end.

    As with the results' folder, one engine's newer figures take the place of its older ones.
    """
    folder = run.run_dir / "train"
    result = training_result(run.run_dir)
    step = result["steps"] if result else 0
    log = MetricsLog(folder / "metrics.jsonl", step)
    named = {name.removeprefix("eval/"): value for name, value in figures.items()}
    engine = run.config.eval.engine
    log.forget(kind="eval", engine=engine)
    log.write({"kind": "eval", "engine": engine, "step": step, **named})
    log.sync()
    log.close()
