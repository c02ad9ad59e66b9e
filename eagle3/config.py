"""Configuration of the domain core: which target, which wiring, which draft."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from eagle3.errors import ConfigError
from eagle3.redact import first_secret

STATE_CODECS = ("raw", "lossless", "fp8", "int8")  # how a store keeps hidden states (`eagle3.state_codec`)


def require(ok: bool, name: str, found: Any, expected: str) -> None:
    """Raise a ConfigError that names the field unless `ok`."""
    if not ok:
        raise ConfigError("bad configuration value", where=name, why=f"found {found!r}", mend=f"give {name} {expected}")


def is_web_address(text: str) -> bool:
    """Whether a text is `http://host[:port]...` with a host, no password, and, if any, a port that exists."""
    try:
        web = urlsplit(text)
        return web.scheme in ("http", "https") and bool(web.hostname) and web.port != 0 and web.username is None
    except ValueError:  # a port past 65535, half an IPv6 address
        return False


def refuse_keys(name: str, found: Iterable[str]) -> None:
    """Refuse variables or flags, the setting `name`, that hold a key: settings are written into files and reports.

    Raises:
        ConfigError: naming the first, without its value.
    """
    secret = first_secret(found)
    if secret:
        raise ConfigError(
            "a key in the configuration",
            where=name,
            why=f"{secret} would be written into config.yaml and reports",
            mend="leave it out: what is started here inherits the environment, so set it there",
            page="security",
        )


@dataclass
class TargetConfig:
    """The language model whose tokens the draft proposes."""

    name: str = "???"  # short name used in paths and reports
    path: str = "???"  # Hugging Face folder: config.json, safetensors (or one GGUF), tokenizer
    maker: str | None = None  # builds `path` when it is absent: "smollm2", "tiny_kimi", or null
    trust_remote_code: bool = False  # run Python shipped inside the target's folder
    # What the folder must turn out to be; lets `stages=[plan]` work before the weights are here.
    model_type: str = "???"  # text model's type: "llama", "deepseek_v3", "kimi_k25", ...
    num_layers: int = 0
    hidden_size: int = 0
    vocab_size: int = 0
    active_parameters_b: float = 0.0  # billions that work on one token, for the plan's hours; 0 = as a dense model's

    def validate(self) -> None:
        """Raise ConfigError on the first bad field."""
        for name in ("name", "path", "model_type"):
            require(bool(getattr(self, name).strip()), f"target.{name}", getattr(self, name), "a text")
        require(self.maker in (None, "smollm2", "tiny_kimi"), "target.maker", self.maker, "smollm2, tiny_kimi or null")
        for name in ("num_layers", "hidden_size", "vocab_size"):
            require(getattr(self, name) > 0, f"target.{name}", getattr(self, name), "a positive integer")
        active = self.active_parameters_b
        require(active >= 0, "target.active_parameters_b", active, "0 (estimated) or a number of billions")


@dataclass
class WiringConfig:
    """Which of the target's tensors feed the draft (`eagle3.wiring.Wiring` is built from this)."""

    aux: list[str] = field(default_factory=list)  # ordered sites: "layer_3", "embedding"; empty = the engines' default
    teacher: str = "final"  # "final" (before the final norm) or "final_normed"


@dataclass
class DraftConfig:
    """Shape of the EAGLE-3 draft; zeros mean "as the target has it"."""

    kind: str = "llama"  # "llama": grouped heads; "mla": latent attention as DeepSeek targets have, a small cache
    vocab_size: int = 32000  # draft vocabulary; equal to the target's = no d2t
    intermediate_size: int = 0
    num_attention_heads: int = 0
    num_key_value_heads: int = 0  # this and the next: unread with kind "mla", whose heads have two parts
    head_dim: int = 0
    q_lora_rank: int = 0  # this and the next four: kind "mla" only
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    fc_norm: bool = False  # EAGLE 3.1: each aux state has a norm of its own before fc
    norm_before_fc: bool = False  # one norm over the joined aux states before fc; "llama" only
    norm_output: bool = False  # EAGLE 3.1: what feeds the next step is normed
    init_lm_head: str = "target"  # "target": start the draft head from the target's rows; "random"
    init_norm_scale: float = 1.0  # factor on the copied norm; below 1, the first guesses are less sure
    # "random"; "last": the draft starts by passing the last aux site's state through; "fitted": by the best linear
    # guess of the target's next state, least squares over the run's first `fit_rows` rows (eagle3/draft_fit.py)
    init_fc: str = "random"
    fit_rows: int = 65536
    # "random"; "target_mlp": the MLP of the target's last layer; "target": its attention too, on the hidden half of the
    # input. "llama" only, and only where the sizes are the target's.
    init_layer: str = "random"
    warm_start: str | None = None  # served folder to start from; its d2t is kept

    def validate(self) -> None:
        """Raise ConfigError on the first bad field."""
        require(self.vocab_size > 0, "draft.vocab_size", self.vocab_size, "a positive integer")
        require(self.kind in ("llama", "mla"), "draft.kind", self.kind, "llama or mla")
        mla = self.kind == "mla"
        latent = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        for name in () if mla else latent:
            require(getattr(self, name) == 0, f"draft.{name}", getattr(self, name), "0 with draft.kind=llama")
        require(not (mla and self.norm_before_fc), "draft.norm_before_fc", True, "false with draft.kind=mla")
        require(self.init_lm_head in ("target", "random"), "draft.init_lm_head", self.init_lm_head, "target or random")
        starts = ("last", "random", "fitted")
        require(self.init_fc in starts, "draft.init_fc", self.init_fc, " or ".join(starts))
        fitted = self.init_fc == "fitted"
        require(self.fit_rows >= 1, "draft.fit_rows", self.fit_rows, "a positive integer")
        require(not (fitted and mla), "draft.init_fc", self.init_fc, "last or random with draft.kind=mla")
        whole = fitted and self.init_layer == "target"
        require(not whole, "draft.init_layer", self.init_layer, "random or target_mlp with draft.init_fc=fitted")
        layers = ("random", "target_mlp", "target")
        require(self.init_layer in layers, "draft.init_layer", self.init_layer, " or ".join(layers))
        require(not (mla and self.init_layer != "random"), "draft.init_layer", self.init_layer, "random with kind mla")
        require(self.init_norm_scale > 0, "draft.init_norm_scale", self.init_norm_scale, "a positive number")
        for name in ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", *latent):
            require(getattr(self, name) >= 0, f"draft.{name}", getattr(self, name), "0 or a positive integer")


@dataclass
class ExportConfig:
    """The folder that an engine serves."""

    convention: str = "sglang-0.5.23"  # whose layer ids `eagle_config` holds (docs/wiring.md lists the conventions)
    dtype: str = "bfloat16"
    with_embedding: bool = False  # store the target's embedding too; engines take the target's own

    def validate(self) -> None:
        """Raise ConfigError on the first bad field."""
        dtypes = ("bfloat16", "float16", "float32")
        require(self.dtype in dtypes, "export.dtype", self.dtype, " or ".join(dtypes))
