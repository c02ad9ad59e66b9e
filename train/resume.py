"""Checkpoints that are whole or do not count: each folder's `complete.json`, written last, lists its files.

A folder without that marker was interrupted; one whose files disagree with it is damaged. Both are passed over, and
training goes on from the newest whole one. A whole checkpoint of *another* job is refused, never mixed in.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from eagle3.atomic import sha256_file, sync
from eagle3.checked_json import read_checked, write_checked
from eagle3.errors import ConfigError, IntegrityError, RedraftError
from eagle3.inside import is_inside
from train.rng import load_rng, save_rng
from train.world import World

MARKER = "complete.json"
PREFIX = "step-"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose marker is there; `marker` = step, identity, processes, files."""

    folder: Path
    marker: dict[str, Any]

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return int(self.marker["step"])

    def damage(self) -> str:
        """What is wrong with the files ("" when they are all as written)."""
        if self.folder.name != f"{PREFIX}{self.step:08d}":
            return f"it is of step {self.step}"
        for name, want in self.marker["files"].items():
            path = self.folder / name
            if not is_inside(name):
                return f"it lists {name!r}, which lies outside"
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != want["size"]:
                return f"{name} holds {path.stat().st_size} bytes of {want['size']}"
            if sha256_file(path) != want["sha256"]:
                return f"{name} has another checksum than when it was written"
        return ""


def _folders(root: Path) -> list[Path]:
    """Checkpoint folders, whole or not, newest first."""
    return sorted(Path(root).glob(f"{PREFIX}*"), reverse=True)


def _open(folder: Path) -> tuple[Checkpoint | None, str]:
    """The checkpoint in `folder`, if it is whole, else why it does not count."""
    if not (folder / MARKER).is_file():
        return None, "it was not written to its end"
    try:
        checkpoint = Checkpoint(folder, read_checked(folder / MARKER, ""))
        damage = checkpoint.damage()
    except IntegrityError as err:
        return None, f"{MARKER} is damaged: {err.why}"
    except (KeyError, TypeError, AttributeError, ValueError) as err:
        return None, f"{MARKER} is none: {type(err).__name__} {err}"
    return (None, damage) if damage else (checkpoint, "")


def newest_whole(root: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that is whole, and a line on each one passed over on the way to it."""
    notes: list[str] = []
    for folder in _folders(root):
        checkpoint, reason = _open(folder)
        if checkpoint is not None:
            return checkpoint, notes
        notes.append(f"passed over {folder}: {reason}")
    return None, notes


def recorded(root: Path, name: str) -> Any:
    """One entry of the newest marked checkpoint's identity, its files unread; None without one."""
    for folder in _folders(root):
        if (folder / MARKER).is_file():
            with contextlib.suppress(IntegrityError):
                identity = read_checked(folder / MARKER, "").get("identity")
                return identity.get(name) if isinstance(identity, dict) else None
    return None


def check_same_job(checkpoint: Checkpoint, identity: dict[str, Any], world_size: int) -> None:
    """Refuse a checkpoint of another job, or of another number of processes.

    Raises:
        ConfigError: naming each entry of the identity that differs.
    """
    found = checkpoint.marker["identity"]
    differing = [
        f"{key} was {found.get(key)!r} and is {identity.get(key)!r}"
        for key in sorted({*found, *identity})
        if found.get(key) != identity.get(key)
    ]
    if differing:
        raise ConfigError(
            "the run folder holds a checkpoint of another job",
            where=str(checkpoint.folder),
            why="; ".join(differing),
            mend="restore those settings to go on with it, or name another run folder to start anew",
        )
    if checkpoint.marker["processes"] != world_size:
        raise ConfigError(
            "the checkpoint was written by another number of processes",
            where=str(checkpoint.folder),
            why=f"{checkpoint.marker['processes']} then, {world_size} now; the optimizer's state is split over them",
            mend=f"set train.processes={checkpoint.marker['processes']}",
        )


def save_checkpoint(engine: Any, root: Path, step: int, identity: dict[str, Any], world: World, keep: int) -> None:
    """Write the whole training state after `step` steps and drop all but the newest `keep`.

    Every process must call it. Weights, optimizer and loss scale go through DeepSpeed; the learning rate and the
    place in the data are functions of the step.
    """
    folder = Path(root) / f"{PREFIX}{step:08d}"
    if world.first:
        shutil.rmtree(folder, ignore_errors=True)  # an interrupted attempt at the same step
        folder.mkdir(parents=True)
    world.barrier()
    with _write_failures(folder):
        engine.save_checkpoint(str(root), tag=folder.name, client_state={"step": step}, save_latest=False)
        save_rng(folder / f"rng-{world.rank:05d}.safetensors")
        world.barrier()
        files = _describe_files(folder, world)
    if world.first:
        write_checked(folder / MARKER, {"step": step, "identity": identity, "processes": world.size, "files": files})
        sync(Path(root))
        _drop_old(root, folder, keep)
    world.barrier()


@contextlib.contextmanager
def _write_failures(folder: Path) -> Iterator[None]:
    """One line for a full disk; torch reports it as a RuntimeError of its stream writer.

    Raises:
        RedraftError: the checkpoint could not be written; without its marker it will be passed over.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as err:
        if isinstance(err, RuntimeError) and "writ" not in str(err):
            raise
        raise RedraftError(
            "cannot write the checkpoint",
            where=str(folder),
            why=str(err).splitlines()[0],
            mend="free space, then run the same command again: it goes on from the checkpoint before",
        ) from err


def _describe_files(folder: Path, world: World) -> dict[str, dict[str, Any]]:
    """Size and checksum of every file, flushed to disk; the processes share the work."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    mine = {}
    for name in names[world.rank :: world.size]:
        with open(folder / name, "rb") as handle:
            os.fsync(handle.fileno())
        mine[name] = {"size": (folder / name).stat().st_size, "sha256": sha256_file(folder / name)}
    parts: list[Any] = [None] * world.size
    torch.distributed.all_gather_object(parts, mine)
    return {name: entry for part in parts for name, entry in sorted(part.items())}


def _drop_old(root: Path, newest: Path, keep: int) -> None:
    """Keep `newest` and the `keep - 1` marked ones before it; whatever else is there was passed over or is too old."""
    marked = [folder for folder in _folders(root) if folder.name <= newest.name and (folder / MARKER).is_file()]
    for folder in _folders(root):
        if folder not in marked[:keep]:
            (folder / MARKER).unlink(missing_ok=True)  # first: a half-deleted folder must not count
            shutil.rmtree(folder, ignore_errors=True)


def _drop_interrupted(root: Path) -> None:
    """Remove what a killed run had not written to its end, or not removed to its end."""
    for folder in _folders(root):
        if not (folder / MARKER).is_file():
            shutil.rmtree(folder, ignore_errors=True)


def find_checkpoint(root: Path, identity: dict[str, Any], world: World) -> tuple[Checkpoint | None, list[str]]:
    """What to go on from, agreed on by all processes; rank 0 looks.

    Raises:
        ConfigError: on every process, when the newest whole checkpoint is another job's.
    """
    found = None
    notes: list[str] = []
    if world.first:
        checkpoint, notes = newest_whole(root)
        found = None if checkpoint is None else (str(checkpoint.folder), checkpoint.marker)
    found = world.broadcast(found)
    if found is None:
        return None, notes
    checkpoint = Checkpoint(Path(found[0]), found[1])
    check_same_job(checkpoint, identity, world.size)
    if world.first:
        _drop_interrupted(root)
    return checkpoint, notes


def load_checkpoint(engine: Any, checkpoint: Checkpoint, world: World) -> None:
    """Put engine and random generators where the checkpoint left them. Every process must call it.

    Raises:
        IntegrityError: the files are not those of the marker's step.
    """
    folder = checkpoint.folder
    _, client = engine.load_checkpoint(str(folder.parent), tag=folder.name)
    if client is None or client.get("step") != checkpoint.step:
        mend = "delete this folder and run again"
        raise IntegrityError("a checkpoint that does not load", where=str(folder), mend=mend)
    load_rng(folder / f"rng-{world.rank:05d}.safetensors")
