"""Experiment tracking: every row to `metrics.jsonl`, and the same figures to Weights & Biases; it never asks."""

from __future__ import annotations

import contextlib
import netrc
import os
import re
import secrets
from pathlib import Path
from typing import Any

from eagle3.atomic import read_json, write_json
from eagle3.errors import ConfigError
from train.config import TrackConfig
from train.metrics import MetricsLog

RUN_ID = "wandb.json"


def has_api_key() -> bool:
    """Whether a tracking key stands in the environment or in the user's netrc file."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        hosts = netrc.netrc(os.environ.get("NETRC")).hosts
    except (OSError, netrc.NetrcParseError):
        return False
    return any("wandb" in host for host in hosts)


def wandb_mode(setting: str) -> str:
    """Mode for `track.wandb`, "online", "offline" or "disabled"; "auto" heeds WANDB_MODE, then whether there is a key.

    Raises:
        ConfigError: "online" without a key, which would make the tracker ask for one.
    """
    if setting == "auto":
        asked = os.environ.get("WANDB_MODE", "")
        return asked if asked in ("online", "offline", "disabled") else ("online" if has_api_key() else "offline")
    if setting == "online" and not has_api_key():
        raise ConfigError(
            "online tracking without a key",
            where="track.wandb",
            why="WANDB_API_KEY is not set and the netrc file has no entry",
            mend="set WANDB_API_KEY, or track.wandb=offline",
        )
    return setting


def flat(row: dict[str, Any]) -> dict[str, float]:
    """Numbers of a row under tracker names: `{"kind": "val", "acc": [..]}` -> `{"val/acc_0": ..}`."""
    out: dict[str, float] = {}
    for key, value in row.items():
        if isinstance(value, list):
            out.update({f"{row['kind']}/{key}_{k}": v for k, v in enumerate(value)})
        elif isinstance(value, int | float) and key != "step":
            out[f"{row['kind']}/{key}"] = value
    return out


def _run_id(folder: Path) -> str:
    """The tracker's id of this run folder, the same after every resume."""
    if not (folder / RUN_ID).exists():
        write_json(folder / RUN_ID, {"id": secrets.token_hex(4)})
    return str(read_json(folder / RUN_ID)["id"])


class WandbRun:
    """The tracker's run of a run folder; whoever opens it, after a crash or in another stage, goes on with the same."""

    def __init__(self, run: Any, cfg: TrackConfig) -> None:
        self._run, self._cfg = run, cfg

    @classmethod
    def start(cls, folder: Path, cfg: TrackConfig, name: str, settings: dict[str, Any]) -> WandbRun | None:
        """Open it; None where tracking is disabled or the tracker refuses to work at all.

        Args:
            folder: holds the tracker's files and the run's id.
            cfg: mode, project, and how the run is shown.
            name: run name.
            settings: JSON-able settings shown beside the run; empty = leave those of before.

        Raises:
            ConfigError: online tracking without a key.
        """
        mode = wandb_mode(cfg.wandb)
        if mode == "disabled":
            return None
        os.environ["WANDB_SILENT"] = "true"
        import wandb

        attempts: list[Any] = list(dict.fromkeys((mode, "offline")))
        for attempt in attempts:  # unreachable or refused: go on offline, never stop training
            with contextlib.suppress(Exception):
                run = wandb.init(
                    entity=cfg.entity or None,
                    project=cfg.project,
                    group=cfg.group or None,
                    job_type=cfg.job_type or None,
                    tags=cfg.tags or None,
                    name=name,
                    id=_run_id(folder),
                    resume="allow",
                    dir=str(folder),
                    mode=attempt,
                    config=settings or None,
                    settings=wandb.Settings(console="off", silent=True, init_timeout=60),
                )
                return cls(run, cfg)
        return None

    def log(self, row: dict[str, Any]) -> None:
        """Record one row (`kind`, `step`, figures)."""
        self._run.log({**flat(row), "step": row["step"]}, step=row["step"])

    def summarize(self, figures: dict[str, float]) -> None:
        """Set the figures that stand beside the run in tables."""
        self._run.summary.update(figures)

    def artifact(self, name: str, kind: str, files: dict[str, Path | bytes], facts: dict[str, Any]) -> None:
        """Record files under a name; equal files make no new version.

        Args:
            name: of the artifact; characters that the tracker refuses become dashes.
            kind: its type, such as "model".
            files: name within it -> a file, or its content. A file larger than `track.artifact_mib` is not uploaded
                but entered by its place and size.
            facts: JSON-able, shown beside it.
        """
        import wandb

        made = wandb.Artifact(re.sub(r"[^\w.-]", "-", name)[:128], type=kind, metadata=facts)
        for inside, file in files.items():
            if isinstance(file, bytes):
                with made.new_file(inside, mode="wb") as handle:
                    handle.write(file)
            elif file.stat().st_size <= self._cfg.artifact_mib << 20:
                made.add_file(str(file), name=inside)
            else:
                made.add_reference(file.resolve().as_uri(), name=inside, checksum=False)
        self._run.log_artifact(made)

    def finish(self, exit_code: int = 0) -> None:
        """Close it; another may open it again."""
        self._run.finish(exit_code=exit_code)


class Tracker:
    """Writes metrics rows; made on the first rank only.

    Args:
        folder: holds `metrics.jsonl` and the tracker's files.
        cfg: mode, project, and how the run is shown.
        name: run name.
        settings: JSON-able settings shown beside the run.
        resume_step: rows past it are dropped: they will be written again.
    """

    def __init__(self, folder: Path, cfg: TrackConfig, name: str, settings: dict[str, Any], resume_step: int) -> None:
        wandb_mode(cfg.wandb)  # refused before anything is opened
        self.log = MetricsLog(folder / "metrics.jsonl", resume_step)
        self._run = WandbRun.start(folder, cfg, name, settings)

    def write(self, row: dict[str, Any]) -> None:
        """Record one row (`kind`, `step`, figures)."""
        self.log.write(row)
        if self._run is not None:
            self._run.log(row)

    def close(self, exit_code: int = 0) -> None:
        """Finish the tracker's run and close the file."""
        self.log.sync()
        self.log.close()
        if self._run is not None:
            self._run.finish(exit_code)
