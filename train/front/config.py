"""The whole configuration in one typed tree, and the checks that span its parts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from data_prep.config import CaptureConfig, DataConfig, StoreConfig
from data_prep.regenerate.config import RegenerateConfig
from data_prep.rounds import parse_size
from data_prep.select.config import SelectConfig
from eagle3.checked_fields import check_fields
from eagle3.config import DraftConfig, ExportConfig, TargetConfig, WiringConfig, require
from eagle3.conventions import convention
from eagle3.errors import ConfigError, RedraftError, WiringError
from eagle3.place import refuse_password
from eagle3.wiring import Site, Wiring
from eval.config import EvalConfig
from train.config import TrackConfig, TrainConfig
from train.hardware import HardwareConfig

PROJECT_ROOT = Path(__file__).resolve().parents[2]
LISTED = "`python train/run.py --cfg job` lists every key with its value; train/front/config.py has the types"
LARGEST = 2**53  # integers up to it survive as JSON and as floating point
STAGES = ("plan", "select", "regenerate", "prepare", "extract", "train", "export", "eval")


@dataclass
class PathsConfig:
    """Artifacts that several runs may share."""

    selected: str = "???"  # conversations to be answered
    answers: str = "???"  # the target's own answers to them
    prepared: str = "???"  # tokens and loss masks
    store: str = "???"  # hidden states: a folder, or a URL such as s3://bucket/folder (credentials: environment)

    def validate(self) -> None:
        """Raise ConfigError when the store's URL carries a password."""
        try:
            refuse_password(self.store)
        except RedraftError as err:
            raise ConfigError(err.what, where="paths.store", why=err.where, mend=err.mend) from None


@dataclass
class CardConfig:
    """What the model card in the served folder says beside what the run knows."""

    base_model: str = ""  # the target's name on the Hugging Face hub; "" = target.name
    license: str = ""  # of the draft, as the hub names it, e.g. "apache-2.0"; "" = the card names none

    def validate(self) -> None:
        """Raise ConfigError on the first bad field."""
        plain = re.fullmatch(r"[a-z0-9.+-]*", self.license) is not None
        require(plain, "card.license", self.license, 'a licence as the hub names it, e.g. "apache-2.0", or nothing')
        named = re.fullmatch(r"([\w.-]+/)?[\w.-]+|", self.base_model) is not None
        require(named, "card.base_model", self.base_model, 'a name on the hub, e.g. "org/model", or nothing')


@dataclass
class RedraftConfig:
    """Everything a run is made of."""

    name: str = "???"
    run_dir: str = "???"
    stages: list[str] = field(default_factory=list)
    disk_budget: str = ""  # most that the store may take: "2TB", "500GiB"; extract and train alternate when it is less
    mark_latest: bool = True  # let `runs/latest` point at this run
    paths: PathsConfig = field(default_factory=PathsConfig)
    target: TargetConfig = field(default_factory=TargetConfig)
    wiring: WiringConfig = field(default_factory=WiringConfig)
    select: SelectConfig = field(default_factory=SelectConfig)
    regenerate: RegenerateConfig = field(default_factory=RegenerateConfig)
    data: DataConfig = field(default_factory=DataConfig)
    capture: CaptureConfig = field(default_factory=CaptureConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    track: TrackConfig = field(default_factory=TrackConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    card: CardConfig = field(default_factory=CardConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)  # what `stages=[plan]` reckons with
    plan_json: str = ""  # file that `stages=[plan]` writes its numbers to; "" = none: a plan touches nothing

    def validate(self) -> None:
        """Check each part, then what spans parts. Loads nothing.

        Raises:
            ConfigError: naming the first bad field.
        """
        for stage in self.stages:
            require(stage in STAGES, "stages", stage, "only " + " ".join(STAGES))
        require(bool(self.stages), "stages", self.stages, "at least one of " + " ".join(STAGES))
        if self.disk_budget:
            parse_size(self.disk_budget, "disk_budget")
        parts = (
            self.paths,
            self.target,
            self.select,
            self.regenerate,
            self.data,
            self.capture,
            self.store,
            self.draft,
            self.train,
            self.track,
            self.export,
            self.card,
            self.eval,
            self.hardware,
        )
        for part in parts:
            part.validate()
        self.check_convention(self.build_wiring())
        require(
            self.draft.vocab_size <= self.target.vocab_size,
            "draft.vocab_size",
            self.draft.vocab_size,
            f"at most target.vocab_size = {self.target.vocab_size}",
        )
        world = self.train.nodes * max(self.train.processes, 1) * self.train.micro_batch_size
        require(
            self.train.global_batch_size % world == 0,
            "train.global_batch_size",
            self.train.global_batch_size,
            f"a multiple of train.nodes x train.processes x train.micro_batch_size = {world}",
        )

    def build_wiring(self) -> Wiring:
        """The run's wiring, for the declared target.

        Raises:
            ConfigError: naming `wiring.aux` or `wiring.teacher`.
        """
        shape = (self.target.model_type, self.target.num_layers, self.target.hidden_size)
        try:
            if not self.wiring.aux:
                return Wiring.native(*shape, teacher=self.wiring.teacher)
            return Wiring(tuple(Site.parse(text) for text in self.wiring.aux), self.wiring.teacher, *shape)
        except WiringError as err:
            raise ConfigError(err.what, where=err.where or "wiring.aux", why=err.why, mend=err.mend) from None

    def check_convention(self, wiring: Wiring) -> None:
        """Refuse a wiring that the engine convention of the export cannot express.

        Raises:
            ConfigError: naming `export.convention`.
        """
        try:
            convention(self.export.convention).render(wiring)
        except WiringError as err:
            raise ConfigError(err.what, where="export.convention", why=err.why, mend=err.mend) from None


def register() -> None:
    """Make the schema and the `project_root` resolver known to Hydra."""
    ConfigStore.instance().store(name="schema", node=RedraftConfig)
    if not OmegaConf.has_resolver("project_root"):
        OmegaConf.register_new_resolver("project_root", lambda: str(PROJECT_ROOT))


def typed(cfg: DictConfig) -> RedraftConfig:
    """Turn a composed config into the validated dataclass tree.

    Raises:
        ConfigError: a key, type or value is wrong; `where` names the field.
    """
    if not isinstance(cfg, DictConfig):
        raise ConfigError("bad configuration", why="the primary config is a list", mend="give a mapping of settings")
    known = {one.name for one in fields(RedraftConfig)}
    for name in sorted({str(key) for key in cfg} - known):  # "++name=" gets past the schema
        raise ConfigError("bad configuration", where=name, why="no such setting", mend=LISTED)
    try:
        merged = OmegaConf.merge(OmegaConf.structured(RedraftConfig), cfg)
        config: Any = OmegaConf.to_object(merged)
    except OmegaConfBaseException as err:
        raise omegaconf_error(err) from None
    try:
        check_fields(config)  # a reference, "${name}", may stand for a value of another type
    except TypeError as err:
        raise ConfigError("bad configuration", where=str(err).partition(" is ")[0], why=str(err), mend=LISTED) from None
    for name, value in settings(config):
        check_plain(name, value)
    config.validate()
    return config


def settings(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every number, text and switch of a configuration with its full name, those in lists and mappings too."""
    inside: list[tuple[str, Any]] = []
    if is_dataclass(value):
        known = [one.name for one in fields(value)]
        for extra in sorted(set(vars(value)) - set(known)):  # left there by "++section.name="
            raise ConfigError("bad configuration", where=f"{name}.{extra}", why="no such setting", mend=LISTED)
        inside = [(f"{name}.{key}" if name else key, getattr(value, key)) for key in known]
    elif isinstance(value, Mapping):
        inside = [(f"{name}.{key}", one) for key, one in value.items()]
    elif isinstance(value, list):
        inside = [(f"{name}[{place}]", one) for place, one in enumerate(value)]
    else:
        yield name, value
    for key, one in inside:
        yield from settings(one, key)


def check_plain(name: str, value: Any) -> None:
    """Refuse a number that no computation can take, and a text that no path or flag can hold.

    Raises:
        ConfigError: naming the field.
    """
    if isinstance(value, float):
        require(math.isfinite(value), name, value, "a finite number")
    elif isinstance(value, int):
        require(abs(value) < LARGEST, name, value, "a number below 2^53")
    elif isinstance(value, str):
        require("\0" not in value, name, value, "a text without NUL characters")


def omegaconf_error(err: OmegaConfBaseException) -> ConfigError:
    """One line for a wrong key or type."""
    first = (str(err.msg) if err.msg else str(err)).strip().splitlines()[0].rstrip(".")
    mend = LISTED
    if "is not in struct" in first:  # Hydra's word for a mapping that lacks the entry
        mend = f"to give a mapping a new entry write ++{err.full_key}=VALUE, or put the mapping into a file of conf/"
    return ConfigError("bad configuration", where=str(err.full_key or "?"), why=first, mend=mend)


def composition_error(err: Exception, arguments: Sequence[str]) -> ConfigError:
    """One line for a command line, or a file of the configuration, that Hydra cannot compose."""
    if isinstance(err.__cause__, OmegaConfBaseException):
        err = err.__cause__
    if isinstance(err, OmegaConfBaseException):
        return omegaconf_error(err)
    if isinstance(err, YAMLError):
        why = " ".join(str(err).split())
        return ConfigError("a file of the configuration is not YAML", why=why, mend="mend it at that line")
    if isinstance(err, HydraException):
        told = re.sub(r"\s*(See https?://\S+ for details|Config search path:.*)", "", str(err), flags=re.DOTALL)
        where = getattr(err, "override", None) or getattr(err, "missing_cfg_file", None) or "command line"
        mend = "write KEY=VALUE, KEY=[A,B] or KEY='any text'; `python train/run.py --cfg job` lists every key"
        return ConfigError("bad configuration", where=str(where), why=told.rstrip(". "), mend=mend)
    folder = next((after for flag, after in pairwise(arguments) if flag in ("--config-path", "-cp")), "conf")
    mend = "save them as UTF-8" if isinstance(err, UnicodeDecodeError) else "mend the file"
    why = str(err).splitlines()[0]
    return ConfigError("the configuration cannot be composed", where=f"files of {folder}", why=why, mend=mend)
