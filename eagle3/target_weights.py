"""Read a target's embedding, final norm and head straight from its files, and say which target it is.

The model is never built and nothing but the asked-for tensor is read, so a checkpoint of a terabyte costs what its
embedding costs. Layouts: safetensors with an index, without one, tied heads, the name prefixes of multimodal
wrappers, and one GGUF file (`eagle3.gguf_weights`).
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from eagle3.atomic import read_json, sha256_json
from eagle3.errors import IntegrityError
from eagle3.gguf_weights import GGUFTensors, read_gguf_config
from eagle3.safetensors_files import SafetensorsTensors
from eagle3.target_identity import TargetIdentity, describe_quantization

# Where a text model's tensors sit: plain, inside a wrapper's `language_model`, inside `model.language_model`.
PREFIXES = (
    "model.",
    "language_model.model.",
    "model.language_model.",
    "model.language_model.model.",
    "language_model.",
    "",
)
HEAD_PREFIXES = ("", "language_model.", "model.language_model.", "model.")
VOLATILE_KEYS = ("_name_or_path", "_model_name_or_path", "transformers_version")
LARGEST = 2**31  # of a size in config.json
MEND_FILES = "download or copy the target again and compare the file's size with its source"


class TensorFiles(Protocol):
    """A folder's weights, by tensor name."""

    @property
    def names(self) -> frozenset[str]:
        """Every tensor name that can be read."""

    def read(self, name: str) -> Tensor:
        """The tensor as stored."""

    def where(self, name: str) -> str:
        """The file that holds, or should hold, `name`."""

    def fingerprint(self) -> str:
        """A cheap hash over headers and sampled bytes."""


class TargetWeights:
    """The target's files, opened lazily.

    Args:
        path: folder with config.json and safetensors, or with one GGUF file.

    Raises:
        IntegrityError: no such folder, no weights in it, or a shard that the index names is absent.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            mend = "set target.path to the model's folder, or target.maker to build it"
            raise IntegrityError("target folder not found", where=str(path), mend=mend)
        gguf = sorted(self.path.glob("*.gguf"))
        has_safetensors = any(self.path.glob("*.safetensors")) or any(self.path.glob("*.safetensors.index.json"))
        self.is_gguf = bool(gguf) and not has_safetensors
        if self.is_gguf and len(gguf) > 1:
            why = f"found {len(gguf)} GGUF files"
            raise IntegrityError(
                "cannot tell which weights to read", where=str(path), why=why, mend="keep one GGUF file"
            )
        if not self.is_gguf and not has_safetensors:
            why = "it holds no .safetensors and no .gguf file"
            mend = "point target.path to a folder with the weights (pickled .bin weights are not read)"
            raise IntegrityError("target folder has no weights", where=str(path), why=why, mend=mend)
        self.files: TensorFiles = GGUFTensors(gguf[0]) if self.is_gguf else SafetensorsTensors(self.path)
        if self.is_gguf and not (self.path / "config.json").exists():
            self.config: dict[str, Any] = read_gguf_config(self.files)
        else:
            self.config = read_json(self.path / "config.json", mend="copy the target's config.json beside its weights")
        self.text_config: dict[str, Any] = text_config_of(self.config)

    def _number(self, key: str, kind: type = int) -> Any:
        """A number above 0."""
        value = self._shape(key)
        if type(value) not in (int, kind) or not 0 < value < LARGEST:
            where = str(self.path / "config.json")
            raise IntegrityError("config.json has an impossible value", where=where, why=f"{key} is {value!r}",
                                 mend=MEND_FILES)  # fmt: skip
        return value

    def _shape(self, key: str) -> Any:
        if self.text_config.get(key) is None:
            where = str(self.path / "config.json")
            raise IntegrityError("config.json lacks a key", where=where, why=f"{key} is absent", mend=MEND_FILES)
        return self.text_config[key]

    @property
    def model_type(self) -> str:
        """`model_type` of the outer model: a wrapper's own name ("kimi_k25") where there is one.

        Engines choose the model file, and with it the id convention, by the outer type.
        """
        return str(self.config.get("model_type") or self._shape("model_type"))

    @property
    def text_model_type(self) -> str:
        """`model_type` of the text model inside, e.g. "deepseek_v3" or "kimi_k2"."""
        return str(self._shape("model_type"))

    @property
    def num_layers(self) -> int:
        """Decoder layers, multi-token-prediction layers not counted."""
        return int(self._number("num_hidden_layers"))

    @property
    def hidden_size(self) -> int:
        """Width H of the residual stream."""
        return int(self._number("hidden_size"))

    @property
    def vocab_size(self) -> int:
        """Rows V of the embedding and the head."""
        return int(self._number("vocab_size"))

    @property
    def rms_norm_eps(self) -> float:
        """Epsilon of the final norm."""
        return float(self._number("rms_norm_eps", float))

    def embedding(self) -> Tensor:
        """Token embedding `[V, H]`, dtype as stored (fp32 from GGUF).

        Raises:
            IntegrityError: absent, quantized, of another shape, or in a truncated file; names file and tensor.
        """
        return self._read(self._find("embed_tokens.weight", PREFIXES), (self.vocab_size, self.hidden_size))

    def final_norm(self) -> Tensor:
        """Weight of the norm before the head `[H]`, dtype as stored.

        Raises:
            IntegrityError: as `embedding`.
        """
        return self._read(self._find("norm.weight", PREFIXES), (self.hidden_size,))

    def head(self) -> Tensor:
        """Output head `[V, H]`, dtype as stored; the embedding where the two are tied.

        Raises:
            IntegrityError: as `embedding`; or config.json says tied and the files hold a head of its own.
        """
        tied = self.tied
        name = self._present("lm_head.weight", HEAD_PREFIXES)
        if name is None:
            if tied is False or self._packed("lm_head", HEAD_PREFIXES):
                self._find("lm_head.weight", HEAD_PREFIXES)  # raises
            return self.embedding()
        head = self._read(name, (self.vocab_size, self.hidden_size))
        if tied and not bool((head == self.embedding()).all()):
            why = "config.json says tie_word_embeddings, and the stored head differs from the embedding"
            mend = "set tie_word_embeddings to false in config.json if the model was trained untied"
            raise IntegrityError(
                "cannot tell which head is right", where=f"{self.files.where(name)}: {name}", why=why, mend=mend
            )
        return head

    def last_layer(self) -> dict[str, Tensor]:
        """Floating-point tensors of the last decoder layer, named from the layer on ("self_attn.q_proj.weight").

        Raises:
            IntegrityError: a GGUF file, whose attention is stored in another order.
        """
        if self.is_gguf:
            mend = "convert the target to safetensors, or set draft.init_layer=random"
            raise IntegrityError("layers are not read from GGUF", where=str(self.path), mend=mend)
        ends = tuple(f"{prefix}layers.{self.num_layers - 1}." for prefix in PREFIXES)
        found = {}
        for name in sorted(self.files.names):
            start = next((end for end in ends if name.startswith(end)), None)
            if start is not None:
                tensor = self.files.read(name)
                if tensor.is_floating_point() and tensor.element_size() >= 2:
                    found[name.removeprefix(start)] = tensor
        return found

    @property
    def tied(self) -> bool | None:
        """`tie_word_embeddings` as written for the text model; None when config.json does not say."""
        # A wrapper's own flag is not asked when the text model has one: wrappers default it to true by accident.
        flag = self.text_config.get("tie_word_embeddings", self.config.get("tie_word_embeddings"))
        return None if flag is None else bool(flag)

    @cached_property
    def _identity(self) -> TargetIdentity:
        stable = {k: v for k, v in self.config.items() if k not in VOLATILE_KEYS}
        architectures = self.config.get("architectures") or self.text_config.get("architectures") or [self.model_type]
        dtype = self.text_config.get("dtype") or self.text_config.get("torch_dtype")
        dtype = dtype or self.config.get("dtype") or self.config.get("torch_dtype") or "unknown"
        return TargetIdentity(
            name=str(architectures[0] if isinstance(architectures, list) else architectures),
            model_type=self.model_type,
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            config_hash=sha256_json(stable),
            weights_fingerprint=self.files.fingerprint(),
            dtype=str(dtype).removeprefix("torch."),
            quantization=describe_quantization(self.config, self.text_config),
        )

    def identity(self) -> TargetIdentity:
        """Which target this is; reads every file's header and a few sampled blocks, never whole files.

        Raises:
            IntegrityError: a file is truncated or absent.
        """
        return self._identity

    def _present(self, tail: str, prefixes: tuple[str, ...]) -> str | None:
        return next((prefix + tail for prefix in prefixes if prefix + tail in self.files.names), None)

    def _packed(self, stem: str, prefixes: tuple[str, ...]) -> str | None:
        tails = (f"{stem}.weight_packed", f"{stem}.qweight", f"{stem}.weight_scale", f"{stem}.weight_scale_inv")
        return next((name for tail in tails if (name := self._present(tail, prefixes))), None)

    def _find(self, tail: str, prefixes: tuple[str, ...]) -> str:
        packed = self._packed(tail.removesuffix(".weight"), prefixes)
        if packed:
            why = f"found {packed}; this tool reads it unquantized only"
            mend = "use a checkpoint whose embedding and head are left unquantized"
            raise IntegrityError("quantized tensor", where=self.files.where(packed), why=why, mend=mend)
        name = self._present(tail, prefixes)
        if name is None:
            why = f"no tensor named {' or '.join(p + tail for p in prefixes[:3])}"
            raise IntegrityError(f"missing tensor {prefixes[0]}{tail}", where=str(self.path), why=why, mend=MEND_FILES)
        return name

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self.files.read(name)
        where = f"{self.files.where(name)}: {name}"
        if tuple(tensor.shape) != shape:
            why = f"shape {list(tensor.shape)} where config.json says {list(shape)}"
            raise IntegrityError("tensor of another shape", where=where, why=why, mend=MEND_FILES)
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            why = f"dtype {tensor.dtype}"
            mend = "use a checkpoint whose embedding and head are left unquantized"
            raise IntegrityError("quantized tensor", where=where, why=why, mend=mend)
        return tensor


def text_config_of(config: dict[str, Any]) -> dict[str, Any]:
    """The text model's part of a config.json: the nested `text_config` (or `llm_config`) or the whole."""
    for key in ("text_config", "llm_config", "language_config"):
        if isinstance(config.get(key), dict):
            return config[key]
    return config


def rope_parameters(text_config: dict[str, Any]) -> dict[str, Any]:
    """What a draft copies from its target about positions and norms.

    Reads both spellings: `rope_theta` + `rope_scaling`, and transformers 5's one `rope_parameters`.

    Returns:
        `{"rope_theta": float, "rope_scaling": dict | None, "max_position_embeddings": int, "rms_norm_eps": float}`;
        a scaling carries both `rope_type` and `type`, since engines read either.
    """
    for name in ("rope_parameters", "rope_scaling"):
        if not isinstance(text_config.get(name) or {}, dict):
            why = f"{name} is {text_config[name]!r}"
            raise IntegrityError("config.json has an impossible value", where="config.json", why=why, mend=MEND_FILES)
    merged = dict(text_config.get("rope_parameters") or {})
    if isinstance(merged.get("full_attention"), dict):  # one entry per attention type
        merged = dict(merged["full_attention"])
    scaling = {**(text_config.get("rope_scaling") or {}), **merged}
    theta = scaling.pop("rope_theta", None) or text_config.get("rope_theta") or 10000.0
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    try:
        return {
            "rope_theta": float(theta),
            "rope_scaling": None if kind == "default" else {**scaling, "rope_type": kind, "type": kind},
            "max_position_embeddings": int(text_config.get("max_position_embeddings") or 2048),
            "rms_norm_eps": float(text_config.get("rms_norm_eps") or 1e-6),
        }
    except (TypeError, ValueError, OverflowError) as err:
        what = "config.json has an impossible value"
        raise IntegrityError(what, where="config.json, positions and norms", why=str(err), mend=MEND_FILES) from None
