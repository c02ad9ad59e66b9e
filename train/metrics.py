"""`metrics.jsonl`: one JSON object a line, written out at once; after a resume no step stands twice."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from eagle3.atomic import write_text
from eagle3.errors import IntegrityError


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the whole lines of a metrics file; a torn last line, left by a kill, is dropped.

    Raises:
        IntegrityError: a line other than the last is no JSON object.
    """
    if not Path(path).exists():
        return []
    lines = Path(path).read_bytes().splitlines()
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError("no object")
            rows.append(row)
        except (ValueError, RecursionError):
            if number == len(lines):
                break
            raise IntegrityError(
                "not a metrics line", where=f"{path}, line {number}", mend="delete the line and run again"
            ) from None
    return rows


class MetricsLog:
    """Appends metrics; opening drops whatever stands past `resume_step`.

    Args:
        path: the file; its lines carry `step`, the number of optimizer steps done.
        resume_step: step of the checkpoint training goes on from; 0 = from scratch.
    """

    def __init__(self, path: Path, resume_step: int) -> None:
        self.path = Path(path)
        kept = [row for row in read_metrics(self.path) if row["step"] <= resume_step and resume_step > 0]
        write_text(self.path, "".join(json.dumps(row) + "\n" for row in kept))
        self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 (closed by close)

    def write(self, row: dict[str, Any]) -> None:
        """Append one row and hand it to the operating system."""
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def forget(self, **fields: Any) -> None:
        """Drop every row that has all these values: its figures are about to be written anew."""
        self._file.close()
        rows = read_metrics(self.path)
        kept = [row for row in rows if any(row.get(name) != value for name, value in fields.items())]
        write_text(self.path, "".join(json.dumps(row) + "\n" for row in kept))
        self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 (closed by close)

    def sync(self) -> None:
        """Force the rows to disk; done before a checkpoint counts as complete."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()
