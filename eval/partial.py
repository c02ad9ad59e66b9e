"""Batches that are finished, on disk, so that a crash or Ctrl-C loses none and the same command goes on."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from eagle3.atomic import read_json, sha256_json, write_json
from eagle3.errors import IntegrityError
from eval.engines.base import BatchRun, Generation

IDENTITY = ("build", "convention", "ids")  # facts that make two servers two different measurements


class Partial:
    """Finished batches of one measurement, each written as soon as it ends.

    Args:
        path: the JSON file.
        settings: everything that the batches depend on apart from their own keys (JSON-able). A file of other
            settings, or a damaged one, is put aside: it holds nothing of this measurement.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path = Path(path)
        self._settings = sha256_json(settings)
        self._runs: dict[str, dict[str, Any]] = {}
        self._facts: dict[str, dict[str, Any]] = {}
        self._load()

    def _load(self) -> None:
        if not self.path.exists():
            return
        try:
            data = read_json(self.path)
            if data["settings"] == self._settings:
                self._runs, self._facts = data["runs"], data["facts"]
        except (IntegrityError, KeyError, TypeError):
            self._runs, self._facts = {}, {}

    def __len__(self) -> int:
        """Batches finished."""
        return len(self._runs)

    def get(self, mode: str, batch: int, prompts: str) -> BatchRun | None:
        """The finished batch, or None. `prompts` names the set together with its content."""
        data = self._runs.get(_key(mode, batch, prompts))
        if data is None:
            return None
        made = [None if one is None else Generation(**one) for one in data["generations"]]
        return BatchRun(made, data["failures"], data["seconds"])

    def whole(self, mode: str, batch: int, prompts: str) -> bool:
        """Whether that batch is finished and no prompt of it failed; one with failures is tried again."""
        data = self._runs.get(_key(mode, batch, prompts))
        return data is not None and not data["failures"]

    def facts(self, mode: str) -> dict[str, Any]:
        """What the server of that way of serving said; empty before it was up."""
        return self._facts.get(mode, {})

    def enter(self, mode: str, facts: dict[str, Any]) -> bool:
        """Tell which server is up now. Batches from another build, or of other ids, are forgotten: True if any."""
        before = self._facts.get(mode)
        stale = before is not None and any(before.get(name) != _plain(facts.get(name)) for name in IDENTITY)
        forgotten = [key for key in self._runs if stale and key.startswith(f"{mode}/")]
        for key in forgotten:
            del self._runs[key]
        self._facts[mode] = _plain(facts)
        return bool(forgotten)

    def put(self, mode: str, batch: int, prompts: str, run: BatchRun, facts: dict[str, Any]) -> None:
        """Keep a finished batch, on disk when this returns."""
        made = [None if one is None else asdict(one) for one in run.generations]
        entry = {"seconds": run.seconds, "failures": dict(run.failures), "generations": made}
        self._runs[_key(mode, batch, prompts)] = entry
        self._facts[mode] = _plain(facts)
        write_json(self.path, {"settings": self._settings, "facts": self._facts, "runs": self._runs})

    def discard(self) -> None:
        """Delete the file: the measurement is whole and written elsewhere."""
        self.path.unlink(missing_ok=True)


def _key(mode: str, batch: int, prompts: str) -> str:
    return f"{mode}/{batch}/{prompts}"


def _plain(value: Any) -> Any:
    """`value` as JSON gives it back, so that facts compare equal before and after the disk."""
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(one) for one in value]
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)
