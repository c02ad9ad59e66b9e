"""The front door: `python train/run.py conf=<preset> [key=value ...] [stages=[...]]`.

Composes and validates the configuration, then runs the stages asked for, each skipped when nothing it
depends on has changed. Exit codes: 0 done, 2 bad input or configuration, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

if sys.path and Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # import siblings as packages, not as loose modules
os.environ["HYDRA_FULL_ERROR"] = "1"  # let composition errors reach `cli`, which prints one line
os.environ.setdefault("TQDM_DISABLE", "1")  # the libraries' own bars; ours say which stage they belong to

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from eagle3.errors import RedraftError
from train.front.config import RedraftConfig, omegaconf_error, register, typed

register()
failures: list[RedraftError] = []


def sweep_suffix() -> str:
    """Subfolder of this job of a `--multirun` sweep, empty outside one."""
    job = HydraConfig.get()
    if job.mode is None or job.mode.name != "MULTIRUN":
        return ""
    swept = [override for override in job.overrides.task if override not in sys.argv]
    return "sweep/" + (",".join(swept).replace("/", "_") or str(job.job.num))


def apply_sweep(config: RedraftConfig) -> None:
    """Give a sweep's job a run folder of its own; prepared data and store stay shared."""
    suffix = sweep_suffix()
    if suffix:
        config.run_dir = str(Path(config.run_dir) / suffix)
        config.mark_latest = False


def work(config: RedraftConfig) -> None:
    """Run the pipeline; under torchrun, deepspeed or srun in the first process, in whose training the others take part.

    Raises:
        RedraftError: a stage refused its input.
    """
    from train.front.pipeline import run_pipeline
    from train.orders import follow, follower, leading

    runs = set(config.stages) != {"plan"}  # a plan alone needs no group
    if follower():
        if runs:
            follow()
        return
    with leading() if runs else contextlib.nullcontext():
        run_pipeline(config)


@hydra.main(version_base="1.3", config_path="../conf", config_name="config")
def compose_and_run(cfg: DictConfig) -> None:
    """Hydra's entry: validate first, import torch only after."""
    try:
        config = typed(cfg)
        apply_sweep(config)
        work(config)
    except RedraftError as err:  # caught here, so that Hydra adds no line of its own and a sweep goes on
        failures.append(err)
        print(f"error: {err}", file=sys.stderr)


def cli() -> int:
    """Run and translate expected failures into one line and an exit code."""
    try:
        compose_and_run()
    except OmegaConfBaseException as err:
        print(f"error: {omegaconf_error(err)}", file=sys.stderr)
        return 2
    except HydraException as err:
        cause = err.__cause__
        line = str(omegaconf_error(cause)) if isinstance(cause, OmegaConfBaseException) else " ".join(str(err).split())
        print(f"error: {line}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            "interrupted: finished stages and saved checkpoints are kept; run the same command to go on",
            file=sys.stderr,
        )
        return 130
    return 2 if failures else 0


if __name__ == "__main__":
    sys.exit(cli())
