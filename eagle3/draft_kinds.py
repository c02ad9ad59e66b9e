"""Kinds of draft as engines tell them apart: what a `config.json` says that its tensors do not.

Two folders may hold tensors of the very same names and shapes and still be two drafts. So every switch that makes an
engine compute something else is either trained here (and read by these functions) or refused.
Read in SGLang 0.5.6 to 0.5.23 (llama_eagle3.py, kimi_k25_eagle3.py) and vLLM 0.32.0 (llama_eagle3.py,
deepseek_eagle3.py).
"""

from __future__ import annotations

from typing import Any

from eagle3.draft_shape import LATENT_SIZES, DraftShape
from eagle3.errors import ConfigError, IntegrityError

ARCHITECTURES = {"llama": "LlamaForCausalLMEagle3", "mla": "Eagle3DeepseekV2ForCausalLM"}
# Not "deepseek_v3": vLLM 0.32.0 (config/speculative.py) takes such a draft for DeepSeek's own prediction layer.
MODEL_TYPES = {"llama": "llama", "mla": "kimi_k2"}

# SGLang builds before these compute a draft without the switch, whatever its config.json says.
_SINCE = {"fc_norm": (0, 5, 13), "norm_output": (0, 5, 13), "mla": (0, 5, 13), "norm_before_fc": (0, 5, 23)}
# Keys whose other values change the computation in one engine or another: the value that is trained here.
_FIXED: dict[str, Any] = {
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "bias": False,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "norm_before_residual": False,
    "logit_scale": 1.0,
    "partial_rotary_factor": 1.0,
    "rope_interleave": True,
}


def kind_of(config: dict[str, Any], where: str) -> str:
    """`DraftShape.kind` of a served folder.

    Raises:
        IntegrityError: another model.
    """
    for kind, architecture in ARCHITECTURES.items():
        if config.get("architectures") == [architecture]:
            return kind
    known = " or ".join(f"['{name}']" for name in ARCHITECTURES.values())
    why = f"architectures is {config.get('architectures')}, expected {known}"
    raise IntegrityError(
        "not an EAGLE-3 draft", where=where, why=why, mend="choose another folder", page="served_folder"
    )


def kind_config(shape: DraftShape) -> dict[str, Any]:
    """The keys of `config.json` that differ from kind to kind, as engines read them."""
    config: dict[str, Any] = {"architectures": [ARCHITECTURES[shape.kind]], "model_type": MODEL_TYPES[shape.kind]}
    if shape.kind == "mla":
        config |= {name: getattr(shape, name) for name in LATENT_SIZES} | {"rope_interleave": True}
    else:
        config |= {"head_dim": shape.head_dim}
    return config | {name: True for name in ("fc_norm", "norm_before_fc", "norm_output") if getattr(shape, name)}


def norms_of(config: dict[str, Any]) -> dict[str, bool]:
    """The norm switches of a `config.json`, looked up where engines look them up."""
    eagle = _eagle(config)
    return {
        "fc_norm": bool(config.get("fc_norm") or config.get("use_aux_norm")),
        "norm_before_fc": bool(eagle.get("norm_before_fc", config.get("norm_before_fc"))),
        "norm_output": bool(config.get("norm_output")),
    }


def refuse_other_kinds(config: dict[str, Any], where: str) -> None:
    """Refuse a draft that an engine would compute otherwise: its weights' names and shapes may be the very same.

    Raises:
        IntegrityError: naming each switch with its value.
    """
    eagle = _eagle(config)
    wrong = [
        f"{name} is {config[name]!r}"
        for name, value in _FIXED.items()
        if config.get(name) is not None and config[name] != value
    ]
    wrong += [
        f"{name} is {eagle[name]!r} inside eagle_config, where no engine reads it"
        for name in ("fc_norm", "use_aux_norm", "norm_output")
        if eagle.get(name)
    ]
    block = config.get("redraft")
    trained = block.get("norms") if isinstance(block, dict) else None
    found = norms_of(config)
    wrong += [
        f"{name} is {found.get(name)}, and the draft was trained with {value}"
        for name, value in (trained or {}).items()
        if found.get(name) != value
    ]
    if kind_of(config, where) == "mla" and found["norm_before_fc"]:
        wrong.append("norm_before_fc is set, which no engine computes for latent attention")
    if eagle.get("use_aux_hidden_state") is False:
        wrong.append("eagle_config.use_aux_hidden_state is False, so only the last state would be fed")
    if "target_hidden_size" in config and config["target_hidden_size"] != config.get("hidden_size"):
        # eagle_utils.py: a draft of another width keeps an embedding of its own; null counts as another width.
        wrong.append(
            f"target_hidden_size is {config['target_hidden_size']!r} beside hidden_size {config.get('hidden_size')!r}, "
            "so the target's embedding would not be shared"
        )
    if wrong:
        raise IntegrityError(
            "an engine would compute another draft than the one trained",
            where=f"{where}/config.json",
            why="; ".join(wrong),
            mend="export the draft again; drafts with these switches, layers or widths are not trained here",
            page="served_folder",
        )


def check_engine(shape: DraftShape, convention: str, where: str) -> None:
    """Refuse to write a folder for an engine build that would compute another draft from it.

    Args:
        shape: the draft's.
        convention: name of the build's id convention, e.g. "sglang-0.5.14-patched".
        where: for the message.

    Raises:
        ConfigError: naming what that build lacks.
    """
    if not convention.startswith("sglang-"):
        return
    if shape.num_aux == 1:
        # Every build tells the target's states from the draft's own by width alone; one state passes for the latter.
        why = "it leaves out fc where the states it is fed are as wide as the draft"
        raise ConfigError("SGLang cannot serve a draft of one aux site", where=where, why=why, mend="wire two or more")
    build = tuple(int(part) for part in convention.removeprefix("sglang-").removesuffix("-patched").split("."))
    used = {name for name in ("fc_norm", "norm_output", "norm_before_fc") if getattr(shape, name)} | {shape.kind}
    lacking = sorted(name for name, since in _SINCE.items() if name in used and build < since)
    if lacking:
        first = max(_SINCE[name] for name in lacking)
        why = f"{convention} has no {', no '.join(lacking)}; SGLang {'.'.join(map(str, first))} has"
        mend = "set export.convention to the build that will serve it, or train without"
        raise ConfigError("that engine build would compute another draft", where=where, why=why, mend=mend)


def _eagle(config: dict[str, Any]) -> dict[str, Any]:
    eagle = config.get("eagle_config")
    return eagle if isinstance(eagle, dict) else {}
