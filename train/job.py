"""What a training process is told (`TrainJob`, JSON) and what it tells back (`TrainResult`, JSON)."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from eagle3.atomic import read_json, sha256_file, write_json
from eagle3.checked_fields import filled
from eagle3.checked_json import read_checked
from eagle3.errors import ConfigError, IntegrityError
from train.config import ObjectiveConfig, TrackConfig, TrainConfig
from train.decoders import Decoders

# Settings of TrainConfig that change neither the weights nor the loss curve; all others belong to the identity.
# A ZeRO stage that is chosen (-1) and an offloaded optimizer enter the identity as what they come to (`Loop`).
FREE_SETTINGS = (
    "save_every",
    "keep_checkpoints",
    "val_every",
    "log_every",
    "processes",
    "nodes",
    "micro_batch_size",
    "gpu_memory_gib",
    "memory_margin",
    "offload_optimizer",
    "activation_checkpointing",
    "overlap_comm",
    "bucket_elements",
    "prefetch_steps",
    "prefetch_mib",
    "loader_workers",
)
# Settings that came later, with what training did before there were any: at that value they stay out of the identity,
# so that older checkpoints go on.
LATER_SETTINGS: dict[str, Any] = {
    "objective": {
        "kind": "soft_ce",
        "ce_weight": 0.5,
        "ce_fade": 0.0,
        "teacher_temperature": 1.0,
        "outside": "drop",
    },
    "step_weights": [],
    "feature_noise": 0.0,
    "schedule": "cosine",
    "decay_ratio": 0.2,
}
# Settings of which 0 has come to mean "chosen", with their default before: at 0 the identity says that, so that older
# checkpoints go on. What is chosen differs from it by rounding alone.
FORMER_DEFAULTS = {"head_chunk": 1024}


@dataclass(frozen=True)
class SourceFiles:
    """What samples are read from, by which the loader chooses how.

    Args:
        encoded: states have to be decoded, which takes a processor's time.
        remote: not on a local or mounted file system.
        bytes: of the files, all together.
    """

    encoded: bool = False
    remote: bool = False
    bytes: int = 0


class TrainSample(Protocol):
    """One conversation, already shifted: row t predicts the token after `token_ids[t]`."""

    @property
    def record_id(self) -> str:
        """The conversation's name."""

    @property
    def features(self) -> Tensor:
        """[N, A*H] aux states."""

    @property
    def token_ids(self) -> Tensor:
        """[N] int64."""

    @property
    def teacher(self) -> Tensor:
        """[N, H] teacher states."""

    @property
    def loss_mask(self) -> Tensor:
        """[N] bool."""


@dataclass(frozen=True)
class RowShape:
    """What a row of a batch holds: `features` and `teacher` are its widths, in numbers of `dtype`."""

    features: int
    teacher: int
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Bytes of a row's states."""
        return (self.features + self.teacher) * self.dtype.itemsize


class SampleSource(Protocol):
    """Random access to samples, whole by `get`, or as the loader reads them: tokens, and states into their place."""

    @property
    def lengths(self) -> Sequence[int]:
        """Rows N of every sample."""

    @property
    def row(self) -> RowShape:
        """What each row holds."""

    @property
    def files(self) -> SourceFiles:
        """What the samples are read from."""

    def __len__(self) -> int: ...

    def get(self, index: int) -> TrainSample:
        """Read one sample (CPU tensors); what `tokens` and `fill` give, in the plain way."""

    def tokens(self, index: int) -> tuple[Tensor, Tensor]:
        """`token_ids` [N] int64 and `loss_mask` [N] bool of one sample. One thread calls this and `advise`."""

    def advise(self, index: int) -> None:
        """A sample will be filled in soon: have the disk begin."""

    def fill(self, index: int, features: Tensor, teacher: Tensor, decoders: Decoders) -> None:
        """Write the states of one sample: `features` [N, A*H] and `teacher` [N, H]. Several threads may call it."""

    def close(self) -> None:
        """Close the files that reading has opened."""


@dataclass
class TrainJob:
    """A training run, complete and JSON-able: a process needs nothing else.

    Args:
        run_dir: folder of checkpoints, `metrics.jsonl`, `final.safetensors` and `result.json`.
        train: optimization settings.
        track: experiment tracking settings.
        wiring: `Wiring.to_dict()` of what the features hold.
        source: "module:function" that is called as `function(split, **source_args)` with split "train" or "val" and
            returns a `SampleSource` (or None for "val").
        source_args: JSON-able keyword arguments of `source`.
        model: "module:function" that is called as `function(**model_args)` and returns `train.model.TrainParts`.
        model_args: JSON-able keyword arguments of `model`.
        identity: whatever else the weights depend on (store fingerprint, target, draft shape, vocabulary key).
        name: run name shown by the tracker.
        stop_at: end this call after so many steps, with a checkpoint; 0 = at the last. No part of the identity: the
            same job goes on from there.
    """

    run_dir: str
    train: TrainConfig
    track: TrackConfig
    wiring: dict[str, Any]
    source: str
    source_args: dict[str, Any]
    model: str
    model_args: dict[str, Any]
    identity: dict[str, Any] = field(default_factory=dict)
    name: str = "redraft"
    stop_at: int = 0

    def save(self, path: Path) -> None:
        """Write as JSON, atomically."""
        write_json(path, asdict(self))

    @classmethod
    def load(cls, path: Path) -> TrainJob:
        """Read what `save` wrote.

        Raises:
            IntegrityError: the file is missing, not JSON, or no job of this version.
        """
        try:
            return cls.from_dict(read_json(path))
        except (KeyError, TypeError, ValueError, AttributeError) as err:
            mend = "start the train stage again, which writes it"
            raise IntegrityError("not a training job", where=str(path), why=str(err), mend=mend) from None

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> TrainJob:
        """Build from `dataclasses.asdict` of a job."""
        train = dict(data["train"])
        train["objective"] = ObjectiveConfig(**train.get("objective", {}))
        return cls(**{**data, "train": TrainConfig(**train), "track": TrackConfig(**data["track"])})

    def full_identity(self) -> dict[str, Any]:
        """Everything that decides the weights; a checkpoint of another identity is refused."""
        settings = {
            name: value or FORMER_DEFAULTS.get(name, value)
            for name, value in asdict(self.train).items()
            if name not in FREE_SETTINGS and not (name in LATER_SETTINGS and value == LATER_SETTINGS[name])
        }
        return {**{f"train.{k}": v for k, v in settings.items()}, "wiring": self.wiring, **self.identity}


@dataclass
class TrainResult:
    """Outcome of a run: `run_dir/result.json`.

    Args:
        steps: optimizer steps taken in all, earlier runs of the same job included.
        resumed_from: step of the checkpoint this run started from; 0 = from scratch.
        weights: `final.safetensors`, the draft's trained weights and its d2t/t2d under their served names; "" when the
            call was to stop before the last step.
        metrics: `metrics.jsonl`.
        train: last training metrics; val: last validation metrics (empty without validation samples).
        seconds: wall time of this run's steps.
        weights_sha256: of `weights`; "" in results of older versions.
    """

    steps: int
    resumed_from: int
    weights: str
    metrics: str
    train: dict[str, Any]
    val: dict[str, Any]
    seconds: float
    weights_sha256: str = ""

    @classmethod
    def read(cls, path: Path, mend: str = "run the train stage again") -> TrainResult:
        """Read a result.

        Raises:
            IntegrityError: there is none, or it is not what was written.
        """
        try:
            return filled(cls, read_checked(path, mend))
        except TypeError as err:
            raise IntegrityError("not a training result", where=str(path), why=str(err), mend=mend) from None

    def damage(self) -> str:
        """What is wrong with the trained weights ("" when they are as they were written)."""
        path = Path(self.weights)
        if not path.is_file():
            return "it is missing"
        return "its checksum differs" if self.weights_sha256 not in ("", sha256_file(path)) else ""


def resolve(path: str) -> Callable[..., Any]:
    """Import "module:function".

    Raises:
        ConfigError: there is no such function.
    """
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as err:
        mend = "write module:function"
        raise ConfigError("not an importable function", where=path, why=str(err), mend=mend) from None
