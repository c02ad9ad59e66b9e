"""Who takes part, and where their environments lie."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle3.errors import ConfigError

OURS = "redraft"
PEERS = ("specforge", "speculators")
# Where a peer has a choice that is faster in one case and slower in another.
WAYS: dict[str, tuple[dict[str, Any], ...]] = {"specforge": ({"compact_teacher": True}, {"compact_teacher": False})}


@dataclass(frozen=True)
class SideSpec:
    """One side.

    Args:
        name: as in the table.
        python: interpreter of its environment.
        settings: what its worker is told beyond the case.
        ways: further settings, of which each case takes the fastest.
    """

    name: str
    python: Path
    settings: dict[str, Any] = field(default_factory=dict)
    ways: tuple[dict[str, Any], ...] = ({},)

    def command(self, case_folder: Path) -> list[str]:
        """How its worker is started."""
        return [str(self.python), "-m", f"benchmarks.peers.{self.name}_worker", str(case_folder)]

    @property
    def there(self) -> bool:
        """Whether its environment is."""
        return self.python.exists()


def environment_of(peer: str) -> Path:
    """The interpreter of a peer's environment: `SPECFORGE_VENV`, `SPECULATORS_VENV`, or `.venv-<peer>`."""
    return Path(os.environ.get(f"{peer.upper()}_VENV") or f".venv-{peer}").absolute() / "bin" / "python"


def open_sides(names: list[str], settings: list[str]) -> list[SideSpec]:
    """The sides of that name, peers before us.

    Args:
        names: of `PEERS`, in the order of their turns.
        settings: `side.key=value`.

    Raises:
        ConfigError: an environment that is not there, or a setting that cannot be read.
    """
    told: dict[str, dict[str, Any]] = {name: {} for name in (*names, OURS)}
    for setting in settings:
        left, equals, value = setting.partition("=")
        side, dot, key = left.partition(".")
        if not (equals and dot) or side not in told:
            known = ", ".join(told)
            raise ConfigError("no such setting", where="--set", why=setting, mend=f"side.key=value, of {known}")
        told[side][key] = _value(value)
    sides = [SideSpec(name, environment_of(name), told[name], _ways(name, told[name])) for name in names]
    for spec in sides:
        if not spec.there:
            raise ConfigError("a peer is not set up", where=spec.name, why=f"no {spec.python}", mend="run make peers")
    return [*sides, SideSpec(OURS, Path(sys.executable), told[OURS])]


def _ways(name: str, told: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """The peer's ways that differ in more than what it was told."""
    ways = [{key: value for key, value in way.items() if key not in told} for way in WAYS.get(name, ({},))]
    return tuple(way for number, way in enumerate(ways) if way not in ways[:number])


def _value(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
