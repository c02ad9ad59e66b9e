"""Any setting with any value: a ConfigError that names it, or a configuration; never another exception."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
from bad_values import scalars, taken_or_refused, values
from hydra import compose, initialize_config_dir
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from eagle3.errors import ConfigError
from train import run as front_door
from train.front.config import omegaconf_error, register, typed
from train.front.config import settings as every_setting

ROOT = Path(__file__).resolve().parents[2]
register()


def _composed() -> DictConfig:
    with initialize_config_dir(version_base="1.3", config_dir=str(ROOT / "conf")):
        return compose(config_name="config", overrides=["conf=kimi_k25"])


SOUND = _composed()
NAMES = sorted({name.partition("[")[0] for name, _ in every_setting(typed(SOUND))})
SECTIONS = sorted({name.rpartition(".")[0] for name in NAMES} - {""})


def _with(name: str, value: Any) -> Any:
    """The configuration with one setting changed, as a preset or the command line changes it."""
    cfg = copy.deepcopy(SOUND)
    try:
        with open_dict(cfg):
            OmegaConf.update(cfg, name, value, merge=False, force_add=True)
    except OmegaConfBaseException as err:
        raise omegaconf_error(err) from None
    return typed(cfg)


@given(
    name=st.sampled_from(NAMES),
    value=values() | st.sampled_from(["auto", "???", "${nosuch}", "${name}", "http://[::1"]),
)
@example(name="train.lr", value=float("inf"))
@example(name="train.epochs", value=10**30)
@example(name="regenerate.url", value="http://host:99999")
@example(name="eval.server.url", value="http://[::1")
@example(name="paths.store", value="http://[::1")
@example(name="target.path", value="")
@example(name="run_dir", value="a\0b")
@example(name="eval.batch_sizes", value="${name}")
def test_a_setting_of_any_value_is_taken_or_refused(name: str, value: Any) -> None:
    taken_or_refused(lambda: _with(name, value))


@given(section=st.sampled_from(SECTIONS), key=st.from_regex(r"[a-z_]{1,12}", fullmatch=True), value=scalars)
@example(section="train", key="lrr", value=1)
def test_a_key_that_is_none_is_refused_by_name(section: str, key: str, value: Any) -> None:
    name = f"{section}.{key}"
    if name in NAMES or any(one.startswith(f"{name}.") for one in NAMES) or section.endswith(("kwargs", "env")):
        return
    if any(isinstance(OmegaConf.select(SOUND, section), kind) for kind in (dict,)) or _is_mapping(section):
        return
    with pytest.raises(ConfigError, match=key):
        _with(name, value)


def _is_mapping(section: str) -> bool:
    """Whether a section is a mapping of the user's own keys."""
    node = OmegaConf.select(SOUND, section)
    return not isinstance(node, DictConfig) or OmegaConf.get_type(node) is dict


@settings(max_examples=8)
@given(text=st.text(alphabet="ab.[]{}=,+~@:/'\"\\$! é\u202e\0", max_size=12) | st.text(max_size=8))
@example(text="--resolve")
@example(text="--cfg")
@example(text="wiring.aux=[layer_²]")
def test_a_command_line_of_any_text_gives_one_line(text: str) -> None:
    argv = ["train/run.py", "--config-path", str(ROOT / "conf"), "stages=[nowhere]", text]
    with pytest.MonkeyPatch.context() as patch, pytest.MonkeyPatch.context():
        patch.setattr(sys, "argv", argv)
        said: list[str] = []
        patch.setattr("builtins.print", lambda *words, **_: said.append(" ".join(map(str, words))))
        try:
            code: Any = front_door.cli()
        except SystemExit as left:  # "--help" and its like, which print what was asked for
            code = left.code
    assert code in (0, 2)
    assert code == 0 or (len(said) == 1 and "\n" not in said[0])
