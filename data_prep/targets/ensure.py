"""Make sure that the target's folder stands and is the model that the configuration says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from data_prep.targets.folder import RECORD
from data_prep.targets.smollm2 import make_smollm2
from data_prep.targets.tiny_kimi import make_tiny_kimi
from eagle3.config import TargetConfig
from eagle3.errors import ConfigError, RedraftError
from eagle3.target_weights import TargetWeights

MAKERS: dict[str, Callable[[Path], Path]] = {"smollm2": make_smollm2, "tiny_kimi": make_tiny_kimi}


def make_target(name: str, path: Path) -> Path:
    """Build the named target at `path`, or return at once where it stands.

    Raises:
        ConfigError: no maker of that name.
        RedraftError: what the maker needs is missing.
    """
    if name not in MAKERS:
        raise ConfigError("no such target maker", why=f"found {name!r}", mend=f"use one of {', '.join(sorted(MAKERS))}")
    return MAKERS[name](Path(path))


def ensure_target(cfg: TargetConfig) -> Path:
    """Return the target's folder, built first by `cfg.maker` where it is absent.

    Raises:
        ConfigError: the folder holds another model than the configuration declares; names the field.
        RedraftError: the folder is absent and no maker is named.
        IntegrityError: the folder has no weights or no config.json.
    """
    path = Path(cfg.path)
    if cfg.maker and _ours_to_build(path):
        make_target(cfg.maker, path)
    if not path.is_dir():
        mend = "put the model's folder there, or point target.path to it"
        raise RedraftError("target not found", where=f"target.path: {cfg.path}", why="no such folder", mend=mend)
    _check_declared(cfg, TargetWeights(path))
    return path


def _ours_to_build(path: Path) -> bool:
    """Whether the maker is to run: the folder is absent, empty, or of our making (then the maker checks its recipe)."""
    return not path.is_dir() or not any(path.iterdir()) or (path / RECORD).exists()


def _check_declared(cfg: TargetConfig, weights: TargetWeights) -> None:
    found = {
        "model_type": (weights.model_type, weights.text_model_type),
        "num_layers": (weights.num_layers,),
        "hidden_size": (weights.hidden_size,),
        "vocab_size": (weights.vocab_size,),
    }
    for name, values in found.items():
        declared = getattr(cfg, name)
        if declared not in values:
            why = f"the configuration says {declared!r}, {weights.path / 'config.json'} says {values[0]!r}"
            mend = f"set target.{name}={values[0]}, or point target.path to the model you mean"
            raise ConfigError("the target is another model", where=f"target.{name}", why=why, mend=mend)
