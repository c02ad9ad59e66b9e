"""What a stage leaves behind: its inputs' fingerprint, so that an unchanged stage is skipped."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.prepare import read_manifest
from eagle3.atomic import sha256_file, sha256_json
from eagle3.checked_json import read_checked, write_checked
from eagle3.place import Place, exists, remove
from train.front.console import console
from train.front.context import Run


@dataclass(frozen=True)
class StageRecord:
    """The finished-marker of one stage, a JSON file beside the stage's output.

    Args:
        path: the marker's file.
        inputs: everything the output depends on, JSON-able.
    """

    path: Place
    inputs: dict[str, Any]

    @property
    def fingerprint(self) -> str:
        """SHA-256 over `inputs`."""
        return sha256_json(self.inputs)

    def finished(self) -> bool:
        """True when the marker is there and speaks of the same inputs."""
        return exists(self.path) and self._read().get("fingerprint") == self.fingerprint

    def changed(self) -> list[str]:
        """Names of the inputs that differ from the last finished run's; empty when there was none."""
        if not exists(self.path):
            return []
        told = self._read().get("inputs")
        before = told if isinstance(told, dict) else {}
        now = self.inputs
        return [key for key in now if sha256_json(before.get(key)) != sha256_json(now[key])]

    def _read(self) -> dict[str, Any]:
        return read_checked(self.path, f"delete {self.path} and run the same command again")

    def begin(self) -> None:
        """Withdraw the marker: from here on the output is being rewritten."""
        remove(self.path)

    def finish(self, **facts: Any) -> None:
        """Write the marker, last of all."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        write_checked(self.path, {"fingerprint": self.fingerprint, "finished": stamp, "inputs": self.inputs, **facts})


def training_result(run_dir: Path) -> dict[str, Any]:
    """What training has left of itself, `train/result.json` of a run; empty before it has finished.

    Raises:
        IntegrityError: it is not what was written.
    """
    path = run_dir / "train" / "result.json"
    return read_checked(path, "run the train stage again") if path.exists() else {}


def prepared_counts(run: Run) -> dict[str, Any]:
    """Counts of the run's prepared set by split; empty where there is none.

    Raises:
        IntegrityError: its manifest is not what was written.
    """
    return read_manifest(run.prepared).get("counts", {}) if (run.prepared / "manifest.json").exists() else {}


def source_fingerprint(source: str) -> Any:
    """What tells one state of a data source from another: a file's hash, a folder's listing, a name."""
    path = Path(source)
    if path.is_file():
        return sha256_file(path)
    if path.is_dir():
        files = [p for p in sorted(path.rglob("*")) if p.is_file()]
        return [[str(p.relative_to(path)), p.stat().st_size, p.stat().st_mtime_ns] for p in files]
    return source


def skip(record: StageRecord) -> bool:
    """Say that a stage is skipped, or why it runs again."""
    if record.finished():
        console.print("      unchanged since it finished: skipped")
        return True
    changed = record.changed()
    if changed:
        console.print(f"      runs again, since these changed: {', '.join(changed)}")
    return False
