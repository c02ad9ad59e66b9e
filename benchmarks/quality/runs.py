"""Run one variant with one seed: train, predict, and where asked serve and measure; finished ones are only read."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from safetensors.torch import load_file

from benchmarks.quality.neutral import read_weights, write_data, write_plan
from benchmarks.quality.predict import held_out_figures
from benchmarks.quality.variants import Variant
from eagle3.atomic import read_json, sha256_json, write_json
from eagle3.checkpoint import load_state, save_served
from eagle3.draft import Eagle3Draft
from eagle3.draft_shape import DraftShape
from eagle3.errors import RedraftError
from eagle3.vocab import DraftVocab, load_vocab
from train.front.config import PROJECT_ROOT, RedraftConfig, composition_error, register, typed
from train.front.context import Run
from train.front.draft_shape import target_shape
from train.front.source import open_source
from train.front.stages import train_job
from train.job import TrainJob
from train.model import TrainParts
from train.parts import open_parts

QUIET = ("track.wandb=disabled", "mark_latest=false", "store.verify_records=0")
TRAINER = Path(__file__).with_name("specforge_train.py")


@dataclass(frozen=True)
class Setting:
    """What every variant of a comparison shares.

    Args:
        preset: of conf/conf.
        shared: Hydra overrides for all, data and target included.
        steps: optimizer steps; 0 = as many as the epochs hold.
        work: folder of the shared data and of each variant's runs.
        specforge: the Python of SpecForge's environment.
    """

    preset: str
    shared: tuple[str, ...]
    steps: int
    work: Path
    specforge: Path

    @property
    def base(self) -> Path:
        """Run folder of the shared prepared set and store."""
        return self.work / "base"

    def folder(self, variant: Variant, seed: int) -> Path:
        """Run folder of a variant."""
        return self.work / f"{variant.name}-{self.steps}" / f"seed-{seed}"

    def overrides(self, folder: Path, seed: int, own: tuple[str, ...]) -> list[str]:
        """All overrides of one run, its own last."""
        places = (f"run_dir={folder}", f"paths.prepared={self.base / 'prepared'}", f"paths.store={self.base / 'store'}")
        return [*places, *QUIET, *self.shared, f"train.max_steps={self.steps}", f"train.seed={seed}", *own]

    def config(self, folder: Path, seed: int, own: tuple[str, ...]) -> RedraftConfig:
        """The checked configuration of one run.

        Raises:
            RedraftError: a setting is wrong.
        """
        register()
        with initialize_config_dir(version_base="1.3", config_dir=str(PROJECT_ROOT / "conf")):
            overrides = [f"conf={self.preset}", *self.overrides(folder, seed, own)]
            try:
                return typed(compose(config_name="config", overrides=overrides))
            except (HydraException, OmegaConfBaseException) as err:
                raise composition_error(err, overrides) from None


@dataclass
class Outcome:
    """One variant with one seed.

    Args:
        variant, seed: which.
        predicted: tau on held-out data; accuracies: conditional, by proposal.
        tau: measured by the engine, None where it was not asked for; low, high: its 95% interval.
        seconds: spent training.
        key: of everything that the training depends on.
    """

    variant: str
    seed: int
    predicted: float
    accuracies: list[float]
    seconds: float
    key: str
    tau: float | None = None
    low: float | None = None
    high: float | None = None
    command: list[str] = field(default_factory=list)


def outcome_key(setting: Setting, variant: Variant, seed: int, identity: dict[str, Any]) -> str:
    """SHA-256 over what decides the outcome: the job's `identity`, side, its settings, steps, seed.

    Of our job another trainer takes the data, their order, and the draft's sizes and vocabulary.
    """
    own: list[str] = []
    if variant.side == "specforge":
        taken = ("content", "wiring", "target", "shape", "train.global_batch_size", "train.epochs")
        identity, own = {name: identity[name] for name in taken}, list(variant.settings)
    return sha256_json({"identity": identity, "side": variant.side, "own": own, "steps": setting.steps, "seed": seed})


def share_data(setting: Setting) -> None:
    """Prepare and extract once for all variants."""
    overrides = [f"run_dir={setting.base}", *QUIET, *setting.shared]
    front_door(setting, overrides, "prepare,extract")


def front_door(setting: Setting, overrides: list[str], stages: str) -> list[str]:
    """Run stages in a process of their own; returns the command.

    Raises:
        RedraftError: they failed.
    """
    command = ["train/run.py", f"conf={setting.preset}", *overrides, f"stages=[{stages}]"]
    run_process([sys.executable, *command], f"the {stages} stages")
    return ["python", *command]


def run_process(command: list[str], what: str) -> None:
    """Run a command in the project's folder.

    Raises:
        RedraftError: it ended with another code than 0.
    """
    done = subprocess.run(command, cwd=PROJECT_ROOT, env={**os.environ, "PYTHONUNBUFFERED": "1"}, check=False)
    if done.returncode:
        mend = "its own message stands above; the same command goes on from there"
        raise RedraftError(f"{what} failed", why=f"exit code {done.returncode}", mend=mend)


def run_variant(setting: Setting, variant: Variant, seed: int, measure: bool) -> Outcome:
    """One variant with one seed; what a former call finished is taken over."""
    folder = setting.folder(variant, seed)
    own = variant.settings if variant.side == "redraft" else ()
    config = setting.config(folder, seed, own)
    run = Run.create(config, folder)
    job = train_job(run, folder / "train")
    key = outcome_key(setting, variant, seed, {**job.full_identity(), "shape": job.model_args["shape"]})
    path = folder / "outcome.json"
    outcome = _former(path, key)
    if outcome is None:
        started = time.monotonic()
        train = _train_own if variant.side == "redraft" else _train_theirs
        draft, command = train(setting, variant, seed, run)
        spent = time.monotonic() - started
        figures = _figures(run, variant, job, draft)
        outcome = Outcome(variant.name, seed, figures["predicted_tau"], figures["acc"], spent, key, command=command)
        if variant.side != "redraft":
            write_json(folder / "train" / "result.json", {"steps": setting.steps, "val": figures})
            _serve_theirs(run, draft)
        write_json(path, asdict(outcome))
    if measure and outcome.tau is None:
        stages = "export,eval" if variant.side == "redraft" else "eval"
        front_door(setting, [*setting.overrides(folder, seed, own), "eval.baseline=false"], stages)
        overall = read_json(folder / "eval" / "results.json")["served"][0]["overall"]
        outcome.tau, outcome.low, outcome.high = overall["tau"], overall["tau_low"], overall["tau_high"]
        write_json(path, asdict(outcome))
    return outcome


def _figures(run: Run, variant: Variant, job: TrainJob, draft: Eagle3Draft) -> dict[str, Any]:
    """Held-out figures at the number of proposals that is served; our own trainer's, where it unrolled as many."""
    steps = run.config.eval.num_steps
    if variant.side == "redraft" and run.config.train.ttt_steps == steps:
        return read_json(run.run_dir / "train" / "result.json")["val"]
    teacher, held_out = open_parts(**job.model_args).teacher, open_source("val", **job.source_args)
    return held_out_figures(draft, teacher, held_out, steps)


def _former(path: Path, key: str) -> Outcome | None:
    if not path.exists():
        return None
    found = Outcome(**read_json(path))
    return found if found.key == key else None


def _ends(run: Run) -> tuple[DraftShape, DraftVocab]:
    vocab = load_vocab(run.run_dir / "train" / "draft_vocab.safetensors")
    return target_shape(run.config, run.weights), vocab


def _train_own(setting: Setting, variant: Variant, seed: int, run: Run) -> tuple[Eagle3Draft, list[str]]:
    command = front_door(setting, setting.overrides(run.run_dir, seed, variant.settings), "train")
    return trained_parts(run).draft, command


def trained_parts(run: Run) -> TrainParts:
    """The draft as our trainer left it, and the target's end that taught it.

    Raises:
        RedraftError: a file of either is missing or broken.
    """
    weights = run.run_dir / "train" / "final.safetensors"
    parts = open_parts(**train_job(run, run.run_dir / "train").model_args)
    load_state(parts.draft, load_file(weights), str(weights))
    return parts


def _train_theirs(setting: Setting, variant: Variant, seed: int, run: Run) -> tuple[Eagle3Draft, list[str]]:
    if not setting.specforge.exists():
        raise RedraftError(
            "SpecForge's environment is not there",
            where=str(setting.specforge),
            mend="`bash benchmarks/peers/setup.sh specforge .venv-specforge` makes it; --only leaves its variants out",
        )
    shape, vocab = _ends(run)
    job = train_job(run, run.run_dir / "train")
    source = open_source("train", **job.source_args)
    data, folder = setting.work / "neutral", run.run_dir / "train"
    write_data(data, source, run.prepared, run.weights, shape, vocab)
    write_plan(folder / "plan.json", len(source), run.config.train)
    weights = folder / "specforge.safetensors"
    command = [
        str(setting.specforge),
        str(TRAINER.relative_to(PROJECT_ROOT)),
        f"--data={data}",
        f"--plan={folder / 'plan.json'}",
        f"--out={weights}",
        f"--seed={seed}",
        *variant.settings,
    ]
    run_process(command, "SpecForge's training")
    return read_weights(weights, shape, vocab, run.weights.embedding()), command


def _serve_theirs(run: Run, draft: Eagle3Draft) -> None:
    save_served(
        run.served,
        draft,
        run.wiring,
        target=run.identity,
        convention_name=run.config.export.convention,
        vocab=_ends(run)[1],
        extra={"trainer": "SpecForge"},
    )
