"""Experiment tracking: every row to `metrics.jsonl`, and the same figures to Weights & Biases; it never asks."""

from __future__ import annotations

import contextlib
import netrc
import os
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


class Tracker:
    """Writes metrics rows; made on the first rank only.

    Args:
        folder: holds `metrics.jsonl` and the tracker's files.
        cfg: mode and project.
        name: run name.
        settings: JSON-able settings shown beside the run.
        resume_step: rows past it are dropped: they will be written again.
    """

    def __init__(self, folder: Path, cfg: TrackConfig, name: str, settings: dict[str, Any], resume_step: int) -> None:
        mode = wandb_mode(cfg.wandb)
        self.log = MetricsLog(folder / "metrics.jsonl", resume_step)
        self._run = None if mode == "disabled" else self._start(mode, folder, cfg, name, settings)

    @staticmethod
    def _start(mode: str, folder: Path, cfg: TrackConfig, name: str, settings: dict[str, Any]) -> Any:
        os.environ["WANDB_SILENT"] = "true"
        import wandb

        attempts: list[Any] = list(dict.fromkeys((mode, "offline")))
        for attempt in attempts:  # unreachable or refused: go on offline, never stop training
            with contextlib.suppress(Exception):
                return wandb.init(
                    project=cfg.project,
                    name=name,
                    id=_run_id(folder),
                    resume="allow",
                    dir=str(folder),
                    mode=attempt,
                    config=settings,
                    settings=wandb.Settings(console="off", silent=True, init_timeout=60),
                )
        return None

    def write(self, row: dict[str, Any]) -> None:
        """Record one row (`kind`, `step`, figures)."""
        self.log.write(row)
        if self._run is not None:
            self._run.log({**flat(row), "step": row["step"]}, step=row["step"])

    def close(self, exit_code: int = 0) -> None:
        """Finish the tracker's run and close the file."""
        self.log.sync()
        self.log.close()
        if self._run is not None:
            self._run.finish(exit_code=exit_code)
