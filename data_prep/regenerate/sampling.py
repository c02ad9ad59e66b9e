"""How each answer is sampled: every value is sent, so that no server fills in one that nobody wrote down.

SGLang (serving_chat.py, `to_sampling_params`, 0.5.23) and vLLM (chat_completion/protocol.py, 0.32) take what a request
leaves out from the model's generation_config.json, unless they were started otherwise.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.regenerate.config import RegenerateConfig
from eagle3.atomic import read_json
from eagle3.errors import ConfigError

NEUTRAL: dict[str, float | int] = {
    "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0,
}  # fmt: skip


@dataclass(frozen=True)
class Sampling:
    """What is sent with each request, and where each value is from."""

    values: dict[str, float | int]
    origin: dict[str, str]

    @property
    def greedy(self) -> bool:
        """The likeliest token each time."""
        return self.values["temperature"] == 0


def resolve_sampling(cfg: RegenerateConfig, model_folder: str, defaults: str) -> Sampling:
    """Every sampling value: set in the configuration, else as served.

    Args:
        cfg: the configuration.
        model_folder: path of the model as the server says it; "" = it does not say.
        defaults: "openai" when the server was started to ignore generation_config.json.

    Raises:
        ConfigError: a value is to be taken as served and the server's generation_config.json cannot be read here.
    """
    values: dict[str, float | int] = {}
    origin: dict[str, str] = {}
    given = {name: getattr(cfg, name) for name in NEUTRAL}
    file: dict[str, Any] | None = None
    for name, neutral in NEUTRAL.items():
        if given[name] is not None:
            values[name], origin[name] = given[name], "configuration"
        elif values.get("temperature") == 0 and name in ("top_p", "top_k", "min_p"):
            values[name], origin[name] = neutral, "greedy"
        else:
            file = _generation_config(cfg, model_folder, defaults, name) if file is None else file
            found = file.get(name)
            if name == "top_k" and found == 0:
                found = -1  # both say "all tokens"
            values[name] = neutral if found is None else found
            origin[name] = "neutral" if found is None else "generation_config.json"
    return Sampling(values, origin)


def _generation_config(cfg: RegenerateConfig, model_folder: str, defaults: str, name: str) -> dict[str, Any]:
    if cfg.generation_config:
        path = Path(cfg.generation_config)
        if not path.exists():
            mend = "give the folder or file of the model's generation_config.json"
            raise ConfigError("file not found", where="regenerate.generation_config", why=str(path), mend=mend)
        path = path / "generation_config.json" if path.is_dir() else path
        return read_json(path, "repair it, or set the sampling values themselves") if path.is_file() else {}
    if defaults == "openai":
        return {}
    folder = Path(model_folder)
    if not model_folder or not (folder / "config.json").is_file():
        raise ConfigError(
            "sampling as served cannot be known",
            where=f"regenerate.{name}",
            why=f"it is null, and the server's model folder ({model_folder or 'not told'}) cannot be read here",
            mend="set regenerate.temperature, top_p, top_k, min_p and repetition_penalty, or point "
            "regenerate.generation_config at a copy of the model's generation_config.json",
            page="samples",
        )
    path = folder / "generation_config.json"
    return read_json(path, "repair it, or set the sampling values themselves") if path.is_file() else {}


def seed_of(seed: int, record_id: str, turn: int) -> int:
    """The seed of one answer, in [0, 2^31): the same in any order of asking."""
    digest = hashlib.sha256(f"{seed}:{turn}:{record_id}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:4], "big") >> 1
