"""The front door: `python train/run.py conf=<preset> [key=value ...] [stages=[...]]`.

Composes and validates the configuration, then runs the stages asked for, each skipped when nothing it
depends on has changed. Exit codes: 0 done, 2 bad input or configuration, 3 done but incomplete (the line
says what is missing), 130 interrupted.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from types import TracebackType
from typing import NoReturn

INTERRUPTED = "interrupted: finished work is kept; run the same command to go on"


def one_line(kind: type[BaseException], err: BaseException, trace: TracebackType | None) -> None:
    """Say an interruption in a line even while modules are imported, which takes a second or two."""
    if issubclass(kind, KeyboardInterrupt):
        print(INTERRUPTED, file=sys.stderr)
    else:
        sys.__excepthook__(kind, err, trace)


sys.excepthook = one_line
if sys.path and Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # import siblings as packages, not as loose modules
os.environ["HYDRA_FULL_ERROR"] = "1"  # let composition errors reach `cli`, which prints one line
os.environ.setdefault("TQDM_DISABLE", "1")  # the libraries' own bars; ours say which stage they belong to

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from eagle3.errors import ConfigError, RedraftError
from eagle3.redact import hidden_words
from train.front.config import RedraftConfig, composition_error, register, typed
from train.terminal import settle

register()
failures: list[RedraftError] = []
composed: list[DictConfig] = []  # filled when Hydra is done


def sweep_suffix() -> str:
    """Subfolder of this job of a `--multirun` sweep, empty outside one."""
    job = HydraConfig.get()
    if job.mode is None or job.mode.name != "MULTIRUN":
        return ""
    swept = [override for override in job.overrides.task if override not in sys.argv]
    return "sweep/" + (",".join(hidden_words(swept)).replace("/", "_") or str(job.job.num))


def apply_sweep(config: RedraftConfig) -> None:
    """Give a sweep's job a run folder of its own; prepared data and store stay shared."""
    suffix = sweep_suffix()
    if suffix:
        config.run_dir = str(Path(config.run_dir) / suffix)
        config.track.group = config.track.group or config.name
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
    composed.append(cfg)
    try:
        config = typed(cfg)
        apply_sweep(config)
        work(config)
    except RedraftError as err:  # caught here, so that Hydra adds no line of its own and a sweep goes on
        failures.append(err)
        print(f"error: {err}", file=sys.stderr)


def check_flags(arguments: list[str]) -> None:
    """Read the command line as Hydra will, for Hydra itself answers a wrong flag with a page of usage, or a traceback.

    Raises:
        ConfigError: an unknown flag, or two that exclude one another.
    """

    def wrong(message: str) -> NoReturn:
        raise ConfigError("bad command line", why=message, mend="see `python train/run.py --help`")

    parser = get_args_parser()
    setattr(parser, "error", wrong)  # noqa: B010, its own prints a page and exits
    args = parser.parse_args(arguments)
    shows = args.cfg is not None
    if args.resolve and not shows:
        wrong("--resolve is for --cfg alone")
    if args.run + shows + args.multirun + args.shell_completion + (args.info is not None) > 1:
        wrong("--run, --multirun, --cfg, --info and --shell_completion exclude one another")


def refuse(err: RedraftError) -> int:
    """Print the line; the exit code."""
    print(f"error: {err}", file=sys.stderr)
    return 2


def cli() -> int:
    """Run and translate expected failures into one line and an exit code."""
    failures.clear()
    composed.clear()
    try:
        check_flags(sys.argv[1:])
        compose_and_run()
    except ConfigError as err:
        return refuse(err)
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError, RecursionError) as err:
        if composed and not isinstance(err, OmegaConfBaseException):
            raise  # not of the composition: a fault of ours
        return refuse(composition_error(err, sys.argv[1:]))
    except KeyboardInterrupt:
        settle(sys.stdout)
        print(INTERRUPTED, file=sys.stderr)
        return 130
    return min((err.exit_code for err in failures), default=0)


if __name__ == "__main__":
    sys.exit(cli())
