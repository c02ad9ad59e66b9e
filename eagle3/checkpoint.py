"""The served folder: `config.json` and `model.safetensors`, as an engine loads them, the wiring inside.

An engine skips names it does not know and leaves random what it does not find, both silently. So names and shapes
are checked both ways, when the folder is written and whenever it is read.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3.atomic import read_json, sha256_file, sha256_json, sync, write_json
from eagle3.conventions import CONVENTIONS, convention
from eagle3.draft import Eagle3Draft
from eagle3.draft_build import build_draft
from eagle3.draft_kinds import check_engine, kind_config, kind_of, norms_of, refuse_other_kinds
from eagle3.draft_shape import LATENT_SIZES, DraftShape
from eagle3.errors import ConfigError, IntegrityError, RedraftError, WiringError
from eagle3.leftovers import temporary
from eagle3.safetensors_files import read_all
from eagle3.tensor_file import save_tensors
from eagle3.vocab import DraftVocab, maps_key, vocab_from_maps
from eagle3.wiring import Wiring

WEIGHTS, CONFIG = "model.safetensors", "config.json"
_IDS = "eagle_aux_hidden_state_layer_ids"
_EMBEDDING = "embed_tokens.weight"
_MEND = "export the draft again, or use a folder that was downloaded whole"


def save_served(
    folder: Path,
    draft: Eagle3Draft,
    wiring: Wiring,
    *,
    target: dict[str, Any],
    convention_name: str,
    vocab: DraftVocab,
    dtype: torch.dtype = torch.bfloat16,
    with_embedding: bool = False,
    extra: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Write the folder an engine serves, whole or not at all, and read it back before it takes its name.

    Args:
        folder: replaced if it exists.
        draft: trained weights.
        wiring: what the draft was trained on.
        target: identity of the target, kept beside the wiring.
        convention_name: the engine build that `eagle_config`'s ids are written for (`eagle3.conventions`).
        vocab: where `d2t` came from; its key and coverage are kept.
        dtype: of the stored matrices.
        with_embedding: store the target's embedding too; engines take the target's own.
        extra: further JSON-able entries of the `redraft` block.

    Returns:
        The `config.json` written.

    Raises:
        WiringError: that engine cannot feed this wiring, or the draft's width is not the wiring's.
        ConfigError: that engine build cannot compute this kind of draft.
        IntegrityError: a weight is not finite in `dtype`, `vocab` is not the draft's own, or what was written does not
            read back.
    """
    _check_width(draft.shape, wiring, str(folder))
    _check_own(draft, vocab, str(folder))
    check_engine(draft.shape, convention_name, str(folder))
    config = served_config(draft.shape, wiring, target, convention_name, vocab, dtype, extra)
    tensors = _served_tensors(draft, dtype, with_embedding)
    _check_finite(tensors, str(folder))
    with _replacing_folder(Path(folder)) as tmp:
        save_tensors(tmp / WEIGHTS, tensors, {"format": "pt"})
        config = sealed_config(config, sha256_file(tmp / WEIGHTS))
        write_json(tmp / CONFIG, config)
        _check_readback(tmp, draft.shape, tensors)
    return config


def served_config(
    shape: DraftShape,
    wiring: Wiring,
    target: dict[str, Any],
    convention_name: str,
    vocab: DraftVocab,
    dtype: torch.dtype,
    extra: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The `config.json` of a served folder; docs/served_folder.md explains each key.

    Raises:
        WiringError: `convention_name` is unknown or cannot express the wiring.
    """
    ids = convention(convention_name).render(wiring)
    everyone = _ids_of_everyone(wiring)
    config = {
        **kind_config(shape),
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "num_hidden_layers": 1,
        "vocab_size": shape.vocab_size,
        "draft_vocab_size": shape.draft_vocab_size,
        "num_aux_hidden_states": shape.num_aux,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope["rope_theta"],
        "rope_scaling": shape.rope["rope_scaling"],
        "max_position_embeddings": shape.max_position_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "eagle_config": {_IDS: ids, "use_aux_hidden_state": True},
    }
    if "vllm" in everyone:
        config[_IDS] = everyone["vllm"]
    config["redraft"] = {
        **(extra or {}),
        "format": 1,
        "norms": norms_of(config),
        "wiring": wiring.to_dict(),
        "convention": convention_name,
        "ids": everyone,
        "target": target,
        "vocab": {
            "key": vocab.key,
            "maps": maps_key(vocab.d2t),
            "size": vocab.size,
            "filled": vocab.filled,
            "coverage": vocab.coverage,
        },
    }
    return config


def sealed_config(config: dict[str, Any], weights_sha256: str = "") -> dict[str, Any]:
    """`config` with its checksum, and that of the weights where it is given, in its `redraft` block.

    Engines read none of the block. A folder of another tool has no block and is left as it is.
    """
    if not isinstance(config.get("redraft"), dict):
        return config
    block = {name: value for name, value in config["redraft"].items() if name != "checksum"}
    if weights_sha256:
        block["weights_sha256"] = weights_sha256
    plain = json.loads(json.dumps({**config, "redraft": block}))  # as it will be read
    return {**config, "redraft": {**block, "checksum": sha256_json(plain)}}


def load_served(
    folder: Path, embedding: Tensor | None = None, *, wiring: Wiring | None = None, dtype: torch.dtype = torch.float32
) -> tuple[Eagle3Draft, Wiring, dict[str, Any]]:
    """Read a served folder strictly.

    Args:
        folder: holds `config.json` and `model.safetensors`.
        embedding: `[V, H]` the target's; may be None when the folder stores it. It goes before the stored one, as in
            an engine.
        wiring: what the caller expects; compared with the folder's. A folder of another tool names no wiring: then
            the caller's word is taken.
        dtype: of the returned draft.

    Returns:
        `(draft, wiring, config)`.

    Raises:
        IntegrityError: a file is missing or broken, names or shapes are missing, unknown or wrong (all listed), or
            `d2t` is of another vocabulary than the draft was trained with.
        WiringError: another wiring than expected, none at all, or ids that do not mean the folder's own wiring.
    """
    config, tensors = _read(Path(folder))
    with _damage_told_first(Path(folder), config):
        return _loaded(Path(folder), config, tensors, embedding, wiring, dtype)


def _loaded(
    folder: Path,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    embedding: Tensor | None,
    wiring: Wiring | None,
    dtype: torch.dtype,
) -> tuple[Eagle3Draft, Wiring, dict[str, Any]]:
    found = served_wiring(config, str(folder))
    if found is not None and wiring is not None:
        wiring.check_same(found, where=str(folder), mend="use a draft trained on this wiring, or retrain it")
    wiring = found or wiring
    if wiring is None:
        raise WiringError(
            "the draft names no wiring", where=str(folder), mend="say in the configuration what it was trained on"
        )
    shape = _shape(config, tensors, str(folder))
    _check_width(shape, wiring, str(folder))
    draft = _build(shape, tensors, embedding, str(folder))
    _check_maps(draft, _stated_maps(config), str(folder))
    _check_sums(Path(folder), config)
    _check_finite(tensors, str(folder))
    return draft.to(dtype), wiring, config


def check_files_of(folder: Path) -> None:
    """Compare a served folder's files with the checksums that were written with them.

    Raises:
        IntegrityError: a file is missing, or is not what was written.
    """
    _check_sums(Path(folder), read_json(Path(folder) / CONFIG, mend=_MEND))


def warm_start(folder: Path, shape: DraftShape, embedding: Tensor) -> tuple[Eagle3Draft, DraftVocab, Wiring | None]:
    """Start from a served folder, keeping its draft vocabulary; its wiring may be another one.

    Args:
        folder: any folder that `load_served` reads, other tools' included.
        shape: what is to be trained; the folder's sizes must be these, its rotary settings give way to these.
        embedding: `[V, H]` the target's.

    Returns:
        `(float32 draft, its vocabulary, the wiring it was trained on or None)`.

    Raises:
        IntegrityError: as `load_served`.
        ConfigError: a size differs.
    """
    config, tensors = _read(Path(folder))
    with _damage_told_first(Path(folder), config):
        found = _shape(config, tensors, str(folder)).to_dict()
    free = ("rope", "max_position_embeddings", "rms_norm_eps")
    differing = [
        f"{k} is {found[k]}, wanted {v}" for k, v in shape.to_dict().items() if k not in free and found[k] != v
    ]
    if differing:
        raise ConfigError(
            "the draft to start from has other sizes",
            where=str(folder),
            why="; ".join(differing),
            mend="set the draft's sizes to those of draft.warm_start",
        )
    with _damage_told_first(Path(folder), config):
        draft = _build(shape, tensors, embedding, str(folder))
        _check_maps(draft, _stated_maps(config), str(folder))
    _check_sums(Path(folder), config)
    return draft, vocab_from_maps(draft.d2t, draft.t2d, str(folder)), served_wiring(config, str(folder))


def load_state(draft: Eagle3Draft, tensors: dict[str, Tensor], where: str) -> None:
    """Copy `tensors` into `draft`, refusing missing and unknown names and wrong shapes; the embedding may be absent.

    Raises:
        IntegrityError: listing every name that is wrong, `where` they came from.
    """
    _check_names(draft.shape, {name: tuple(t.shape) for name, t in tensors.items()}, where)
    mapped = tensors.get("d2t")
    if mapped is not None and mapped.is_floating_point():
        why = f"d2t is {str(mapped.dtype).removeprefix('torch.')}, not whole numbers"
        raise IntegrityError("not this draft's weights", where=where, why=why, mend=_MEND)
    own = draft.state_dict()
    with torch.no_grad():
        for name, tensor in tensors.items():
            if name in own:
                own[name].copy_(tensor)
        if "t2d" not in tensors:
            draft.t2d.zero_()[draft.to_target_ids(torch.arange(len(draft.d2t), device=draft.d2t.device))] = True
    vocab_from_maps(draft.d2t.cpu(), draft.t2d.cpu(), where)


def served_wiring(config: dict[str, Any], where: str) -> Wiring | None:
    """The wiring written in a served `config.json`, checked against its ids; None in a folder of another tool.

    Raises:
        WiringError: the ids in `eagle_config` mean other tensors than the wiring beside them.
    """
    block = config.get("redraft")
    if not isinstance(block, dict) or "wiring" not in block:
        return None
    wiring = Wiring.from_dict(block["wiring"])
    eagle = config.get("eagle_config")
    said = [(eagle.get(_IDS) if isinstance(eagle, dict) else None, block.get("convention"))]
    if _IDS in config:
        said.append((config[_IDS], "vllm"))
    for ids, name in said:
        if ids is not None and not (isinstance(ids, list) and all(type(one) is int for one in ids)):
            raise WiringError("layer ids that are no list of whole numbers", where=where, why=f"{ids!r}", mend=_MEND)
        wiring.check_same(
            convention(str(name)).parse_like(ids, wiring, wiring.teacher),
            where=f"{where}, ids {ids} as {name} reads them",
            mend="export the draft again; the ids were edited by hand",
        )
    return wiring


def _ids_of_everyone(wiring: Wiring) -> dict[str, list[int]]:
    out = {}
    for name, one in CONVENTIONS.items():
        with contextlib.suppress(WiringError):
            out[name] = one.render(wiring)
    return out


def _served_tensors(draft: Eagle3Draft, dtype: torch.dtype, with_embedding: bool) -> dict[str, Tensor]:
    out = {}
    for name, tensor in draft.state_dict().items():
        if (name == _EMBEDDING and not with_embedding) or (name in ("d2t", "t2d") and draft.shape.full_vocab):
            continue
        kept = tensor.detach().cpu()
        out[name] = (kept.to(dtype) if kept.is_floating_point() else kept).contiguous().clone()
    return out


def _expected(shape: DraftShape) -> tuple[dict[str, tuple[int, ...]], set[str]]:
    """Every name with its shape, and the names that may be absent."""
    with torch.device("meta"):
        names = {name: tuple(t.shape) for name, t in build_draft(shape).state_dict().items()}
    names[_EMBEDDING] = (shape.vocab_size, shape.hidden_size)
    return names, {_EMBEDDING, "t2d"} | ({"d2t"} if shape.full_vocab else set())


def _check_names(shape: DraftShape, found: dict[str, tuple[int, ...]], where: str) -> None:
    expected, optional = _expected(shape)
    complaints = [f"missing {name}" for name in expected if name not in found and name not in optional]
    complaints += [f"unknown {name}" for name in found if name not in expected]
    complaints += [
        f"{name} is {list(found[name])}, expected {list(size)}"
        for name, size in expected.items()
        if name in found and found[name] != size
    ]
    if complaints:
        raise IntegrityError(
            "not this draft's weights", where=where, why="; ".join(complaints), mend=_MEND, page="served_folder"
        )


def _build(shape: DraftShape, tensors: dict[str, Tensor], embedding: Tensor | None, where: str) -> Eagle3Draft:
    tensors = dict(tensors) if embedding is None else {**tensors, _EMBEDDING: embedding}
    if _EMBEDDING not in tensors:
        raise IntegrityError(
            "the folder holds no embedding", where=where, mend="give the target, whose embedding the draft shares"
        )
    draft = build_draft(shape)
    load_state(draft, tensors, where)
    return draft


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config = read_json(folder / CONFIG, mend=_MEND)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise IntegrityError(
            "no safetensors in the folder", where=str(folder), mend="convert the weights to model.safetensors"
        )
    tensors: dict[str, Tensor] = {}
    for file in files:
        found = read_all(file, _MEND)
        twice = sorted(set(found) & set(tensors))
        if twice:
            raise IntegrityError("two files hold one tensor", where=str(file), why=twice[0], mend="keep one copy")
        tensors |= found
    return config, tensors


def _shape(config: dict[str, Any], tensors: dict[str, Tensor], where: str) -> DraftShape:
    """Sizes from `config.json`; what older folders leave out is taken from the tensors."""
    kind = kind_of(config, where)
    refuse_other_kinds(config, where)
    try:
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        fused = tensors["fc.weight"].shape[-1] if "fc.weight" in tensors else 0
        return DraftShape(
            hidden_size=hidden,
            intermediate_size=config["intermediate_size"],
            num_attention_heads=heads,
            **_attention_sizes(config, kind),
            vocab_size=config["vocab_size"],
            draft_vocab_size=config.get("draft_vocab_size") or config["vocab_size"],
            num_aux=config.get("num_aux_hidden_states") or fused // hidden or 3,
            rms_norm_eps=config["rms_norm_eps"],
            rope=_rope(config),
            max_position_embeddings=config["max_position_embeddings"],
            kind=kind,
            **norms_of(config),
        )
    except KeyError as err:
        raise IntegrityError("incomplete config.json", where=where, why=f"no {err.args[0]}", mend=_MEND) from None
    except (TypeError, ValueError, ZeroDivisionError, AttributeError, ConfigError) as err:
        why = f"{err.where}: {err.why}" if isinstance(err, ConfigError) else f"a size of another kind: {err}"
        raise IntegrityError("not a draft's config.json", where=where, why=why, mend=_MEND) from None


def _attention_sizes(config: dict[str, Any], kind: str) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    if kind == "mla":
        sizes = {name: int(config[name] or 0) for name in LATENT_SIZES}
        whole = sizes["qk_nope_head_dim"] + sizes["qk_rope_head_dim"]
        return {**sizes, "num_key_value_heads": heads, "head_dim": whole}
    return {
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
    }


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings, in either spelling: `rope_theta` + `rope_scaling`, or `rope_parameters`."""
    if config.get("rope_parameters"):
        return {"rope_theta": config["rope_parameters"]["rope_theta"], "rope_scaling": config["rope_parameters"]}
    return {"rope_theta": config.get("rope_theta", 10000.0), "rope_scaling": config.get("rope_scaling")}


def _check_width(shape: DraftShape, wiring: Wiring, where: str) -> None:
    if (shape.num_aux, shape.hidden_size) != (len(wiring.aux), wiring.hidden_size):
        raise WiringError(
            "the draft's width is not the wiring's",
            where=where,
            why=f"fc reads {shape.num_aux} x {shape.hidden_size}, the wiring gives {len(wiring.aux)} x "
            f"{wiring.hidden_size}",
            mend="use the wiring the draft was built for",
        )


def _stated_maps(config: dict[str, Any]) -> str:
    """Key of the maps that the draft was trained with; "" where the folder does not say."""
    block = config.get("redraft")
    vocab = block.get("vocab") if isinstance(block, dict) else None
    return str(vocab.get("maps", "")) if isinstance(vocab, dict) else ""


def _check_own(draft: Eagle3Draft, vocab: DraftVocab, where: str) -> None:
    own, found = maps_key(draft.d2t), maps_key(vocab.d2t)
    if own != found:
        raise IntegrityError(
            "the draft vocabulary is not the draft's own",
            where=where,
            why=f"its target ids hash to {found[:12]}; those of the trained d2t to {own[:12]}",
            mend="put back the draft_vocab.safetensors that the draft was trained with, or train again",
        )


def _check_maps(draft: Eagle3Draft, stated: str, where: str) -> None:
    found = maps_key(draft.d2t)
    if stated and found != stated:
        raise IntegrityError(
            "d2t is of another draft vocabulary",
            where=where,
            why=f"the target ids it names hash to {found[:12]}; the draft was trained with {stated[:12]}",
            mend="export the draft again: each row of its head would propose another token than it learnt",
        )


@contextlib.contextmanager
def _damage_told_first(folder: Path, config: dict[str, Any]) -> Iterator[None]:
    """What does not fit because a file was damaged is told as that, with the file's name."""
    try:
        yield
    except (RedraftError, KeyError, TypeError, ValueError, AttributeError) as err:
        if isinstance(err, WiringError) and str(folder) in err.where:
            raise  # it names the ids and what they mean
        try:
            _check_sums(folder, config)
        except IntegrityError as damage:
            shown = f"{err.what}: {err.why}" if isinstance(err, RedraftError) else str(err)
            why = f"{damage.why}; {shown}"
            raise IntegrityError(damage.what, where=damage.where, why=why, mend=damage.mend) from None
        raise


def _check_sums(folder: Path, config: dict[str, Any]) -> None:
    """Compare config.json and the weights with their checksums; a folder of another tool, or an older one, has none."""
    block = config.get("redraft")
    if not isinstance(block, dict) or not {"checksum", "weights_sha256"} & set(block):
        return
    if sealed_config(config) != config:
        why = "its checksum differs: a setting was changed by hand, or a bit by the disk"
        raise IntegrityError("not the config.json that was exported", where=str(folder / CONFIG), why=why, mend=_MEND)
    if not (folder / WEIGHTS).is_file() or sha256_file(folder / WEIGHTS) != block.get("weights_sha256"):
        why = "their checksum differs from the one in config.json"
        raise IntegrityError("not the weights that were exported", where=str(folder / WEIGHTS), why=why, mend=_MEND)


def _check_finite(tensors: dict[str, Tensor], where: str) -> None:
    bad = [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]
    if bad:
        why = f"not finite: {', '.join(bad)}"
        raise IntegrityError("the draft cannot be served", where=where, why=why, mend="export an earlier checkpoint")


def _check_readback(folder: Path, shape: DraftShape, written: dict[str, Tensor]) -> None:
    config, tensors = _read(folder)
    served_wiring(config, str(folder))
    _check_names(shape, {name: tuple(t.shape) for name, t in tensors.items()}, str(folder))
    _check_sums(folder, config)
    broken = [name for name, tensor in written.items() if not torch.equal(tensors[name], tensor)]
    if broken:
        why = f"read back otherwise than written: {', '.join(broken)}"
        raise IntegrityError(
            "the disk changed the draft", where=str(folder), why=why, mend="check the disk, export again"
        )


@contextlib.contextmanager
def _replacing_folder(folder: Path) -> Iterator[Path]:
    """Yield a new sibling folder that takes the name `folder` once everything in it is on disk."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    tmp, old = temporary(folder), temporary(folder, "old")
    tmp.mkdir()
    try:
        yield tmp
        for file in tmp.iterdir():
            with open(file, "rb") as handle:
                os.fsync(handle.fileno())
        sync(tmp)
        if folder.exists():
            os.replace(folder, old)
        os.replace(tmp, folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
