"""Load a target as a Hugging Face model, and refuse one that is not whole."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from eagle3.atomic import read_json
from eagle3.errors import IntegrityError, RedraftError
from eagle3.packed_experts import packed_scheme
from eagle3.packed_target import dequantized_text_weights, text_model_config

MEND = "download or build the target again"


def choose_device(device: str) -> str:
    """`auto` becomes `cuda` where there is a GPU, else `cpu`."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


def choose_dtype(compute_dtype: str, device: str) -> torch.dtype:
    """`auto` becomes float32 on CPU (bf16 products are several times slower there) and bfloat16 on GPU."""
    if compute_dtype == "auto":
        return torch.float32 if device == "cpu" else torch.bfloat16
    return getattr(torch, compute_dtype)


def load_target(
    path: Path, device: str, dtype: torch.dtype, trust_remote_code: bool = False, with_head: bool = False
) -> nn.Module:
    """Load a Hugging Face folder (or a folder holding one GGUF file) in eval mode, from disk alone.

    On several GPUs the layers are spread over them. `with_head` says that the language-model head will be run too.
    Of a checkpoint with packed int4 weights (Kimi-K2.5's experts) the text model alone is loaded, dequantized.

    Raises:
        RedraftError: the folder is not there, or transformers cannot load it.
        IntegrityError: weights are missing, which transformers would have filled with random numbers.
    """
    path = Path(path)
    if not path.is_dir():
        raise RedraftError("target folder not found", where=str(path), mend="set target.path to the model's folder")
    options: dict[str, Any] = {
        "dtype": dtype,
        "local_files_only": True,
        "output_loading_info": True,
        "trust_remote_code": trust_remote_code,
        "device_map": "auto" if device == "cuda" and torch.cuda.device_count() > 1 else device,
    }
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1 and not list(path.glob("*.safetensors")):
        options["gguf_file"] = ggufs[0].name
    try:
        with _quiet():
            model, info = _from_pretrained(path, trust_remote_code, options)
    except RedraftError:
        raise
    except Exception as err:  # transformers raises a dozen kinds, from safetensors' own to ImportError
        raise RedraftError(
            "cannot load the target",
            where=str(path),
            why=f"{type(err).__name__}: {str(err)[:300]}",
            mend="check that the folder is a complete download and that its model type is supported",
        ) from err
    _refuse_missing(path, model, info, with_head)
    return model.eval()


def _from_pretrained(path: Path, trust_remote_code: bool, options: dict[str, Any]) -> tuple[nn.Module, Any]:
    """The model, and transformers' account of missing and unexpected weights."""
    file = path / "config.json"
    config = read_json(file, mend=MEND) if file.exists() else {}
    scheme = None if "gguf_file" in options else packed_scheme(config, str(file))
    if scheme is None:
        return _auto_class(path, trust_remote_code, options).from_pretrained(str(path), **options)
    import transformers

    own = text_model_config(config, str(file))
    weights = dequantized_text_weights(path, scheme, options["dtype"])
    text_class: Any = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING[type(own)]
    model, info = text_class.from_pretrained(None, config=own, state_dict=weights, **options)
    if (path / "generation_config.json").exists():  # holds the token that ends a turn, which config.json may not
        model.generation_config = transformers.GenerationConfig.from_pretrained(str(path), local_files_only=True)
    unexpected = sorted(info["unexpected_keys"])
    if unexpected:
        why = f"{len(unexpected)} tensors are not the text model's, first {unexpected[0]}"
        raise IntegrityError("the target's weights are another model's", where=str(path), why=why, mend=MEND)
    return model, info


def _auto_class(path: Path, trust_remote_code: bool, options: dict[str, Any]) -> Any:
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    extra = {"gguf_file": options["gguf_file"]} if "gguf_file" in options else {}
    config = transformers.AutoConfig.from_pretrained(
        str(path), local_files_only=True, trust_remote_code=trust_remote_code, **extra
    )
    own_code = getattr(config, "auto_map", None) or {}
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or "AutoModelForCausalLM" in own_code:
        return transformers.AutoModelForCausalLM
    return transformers.AutoModelForImageTextToText  # language_model wrappers such as Kimi-K2.5


def _refuse_missing(path: Path, model: nn.Module, info: Any, with_head: bool) -> None:
    """Vision parts are not run here, so only the names of the text body count, and the head's when it will be run."""
    parts = [_prefix(model, model.get_input_embeddings()).rpartition(".")[0]]  # type: ignore[operator]
    if with_head:
        parts.append(_prefix(model, model.get_output_embeddings()))  # type: ignore[operator]
    missing = sorted(name for name in info["missing_keys"] if name.startswith(tuple(parts)))
    if missing:
        raise IntegrityError(
            "the target's weights are incomplete",
            where=str(path),
            why=f"{len(missing)} tensors are missing, first {missing[0]}",
            mend=MEND,
        )


def _prefix(model: nn.Module, wanted: nn.Module) -> str:
    return next(name for name, module in model.named_modules() if module is wanted)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hold back transformers' bars and load report: what matters in them is turned into errors here."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
