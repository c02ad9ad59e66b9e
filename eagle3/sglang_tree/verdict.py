"""What an SGLang tree makes of a draft's layer ids, for one model, with the reasons in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from eagle3.conventions import CONVENTIONS, EngineConvention, Shape, sglang_convention
from eagle3.errors import WiringError
from eagle3.sglang_tree.forward import ADDS, GUARDED
from eagle3.sglang_tree.parts import ModelReading, read_model
from eagle3.sglang_tree.setter import ALWAYS_PLUS_ONE, LAYERS, is_native_default
from eagle3.sglang_tree.tree import SglangTree, read_tree

NONE, WHOLE, HALF, UNKNOWN = "none", "whole", "half", "unknown"


@dataclass(frozen=True)
class TreeVerdict:
    """A tree's reading of ids for one model.

    Args:
        version: the release the tree states; "" when it states none.
        file: the file that decides, relative to the package.
        convention: key in `eagle3.conventions.CONVENTIONS`; None when no convention there has this shape, or the tree
            is patched by half.
        patch: `none`, `whole`, `half` or `unknown`: the embedding patch.
        reasons: sentences, the deciding ones first.
        late_graphs: CUDA graphs hold the default layers whatever the ids (see `eagle3.sglang_tree.graphs`).
        aliased_embedding: the embedding is captured by reference, and later layers overwrite it.
        stops: why a server of this model would stop at start-up with any draft; "" when it would not.
    """

    version: str
    file: str
    convention: str | None
    patch: str
    reasons: list[str]
    late_graphs: bool = False
    aliased_embedding: bool = False
    stops: str = ""


def convention_of_tree(tree: Path, model_type: str, architecture: str = "") -> TreeVerdict:
    """Read the tree at `tree` (see `read_tree`) for a target.

    Raises:
        RedraftError: no SGLang tree there, or it has no such model.
    """
    return verdict_of(read_tree(tree), model_type, architecture)


def verdict_of(tree: SglangTree, model_type: str, architecture: str = "") -> TreeVerdict:
    """`convention_of_tree` for a tree already found.

    Raises:
        RedraftError: it has no such model.
    """
    return judge(tree.version, read_model(tree, model_type, architecture), model_type)


def judge(version: str, model: ModelReading, model_type: str) -> TreeVerdict:
    """Turn a reading into a verdict; the code's shape decides, the version only chooses among equals."""
    patch = patch_state(model)
    fitting = _fitting(model, model_type, patch) if patch in (NONE, WHOLE) else []
    name = _chosen(fitting, version, patch == WHOLE)
    return TreeVerdict(
        version=version,
        file=_deciding_file(model),
        convention=name,
        patch=patch,
        reasons=list(_reasons(model, model_type, version, patch, name)),
        late_graphs=model.graphs.wrong,
        aliased_embedding=model.forward.at_layer == GUARDED,
        stops=next((one.why for one in model.parts if one.name == "wrapper" and not one.good), ""),
    )


def patch_state(model: ModelReading) -> str:
    """`none`, `whole`, `half` or `unknown`."""
    if model.problem:
        return UNKNOWN
    good = [one.good for one in model.embedding_parts]
    if not model.flag and not any(good) and not model.setter.drops_minus_one:
        return NONE
    return WHOLE if not model.missing else HALF


def _deciding_file(model: ModelReading) -> str:
    if any(one.name == "wrapper" and not one.good for one in model.parts):
        return model.classes.outer.file
    return model.classes.inner.file


def _fitting(model: ModelReading, model_type: str, patch: str) -> list[EngineConvention]:
    """SGLang's conventions that say of this model what its code does."""
    if not is_native_default(model.setter):
        return []
    patched = patch == WHOLE
    names = [name for name in CONVENTIONS if name.startswith("sglang-") and name.endswith("-patched") == patched]
    return [CONVENTIONS[name] for name in names if _fits(CONVENTIONS[name], model, model_type, patched)]


def _fits(one: EngineConvention, model: ModelReading, model_type: str, patched: bool) -> bool:
    plus_one = model.setter.rule == ALWAYS_PLUS_ONE
    # A reference that later norms overwrite feeds no embedding either.
    reaches_layer_0 = model.forward.at_layer not in (ADDS, GUARDED)
    zero = -1 if plus_one else 0  # the id that becomes capture point 0 without any patch
    expected = {
        (2, 30, 58): [3, 31, 59] if plus_one else [2, 30, 58],
        (1, 29, 57): [2, 30, 58],
        (zero, 5, 9): ([0, 6, 10] if plus_one else [0, 5, 9]) if reaches_layer_0 or (patched and plus_one) else None,
    }
    if patched:
        expected[(-1, 2, 30)] = [0, 3, 31]
    return bool(model.setter.rule) and all(_places(one, ids, model_type) == want for ids, want in expected.items())


def _places(one: EngineConvention, ids: tuple[int, ...], model_type: str) -> list[int] | None:
    try:
        return [site.layer for site in one.parse_like(list(ids), Shape(model_type, LAYERS, 8)).aux]
    except WiringError:
        return None


def _chosen(fitting: list[EngineConvention], version: str, patched: bool) -> str | None:
    if not fitting:
        return None
    stated = _of_version(version, patched)
    return stated if stated in [one.name for one in fitting] else fitting[-1].name


def _of_version(version: str, patched: bool) -> str:
    try:
        return sglang_convention(version, patched=patched).name
    except WiringError:
        return ""


def _reasons(model: ModelReading, model_type: str, version: str, patch: str, name: str | None) -> Iterator[str]:
    if model.problem:
        yield f"the code cannot be followed: {model.problem}"
        return
    yield f"the setter {model.setter.rule or 'follows no rule that is known here'}; {model.setter.minus_one}"
    yield f"the forward {model.forward.at_layer}, into a {model.forward.kind}"
    if patch != NONE:
        yield from (f"{one.name}: {'' if one.good else 'MISSING OR WRONG: '}{one.why}" for one in model.parts)
    else:
        yield from (one.why for one in model.parts if one.name in ("wrapper", "graphs") and not one.good)
    if model.forward.at_layer == GUARDED:
        yield "the embedding would be captured by reference, and the norms of later layers add into it in place"
    if not is_native_default(model.setter):
        yield f"without ids it captures {model.setter.default} of {LAYERS} layers, unlike every build that was read"
    yield from _version_reasons(version, patch, name, model_type)


def _version_reasons(version: str, patch: str, name: str | None, model_type: str) -> Iterator[str]:
    stated = _of_version(version, patch == WHOLE)
    if name is None and patch in (NONE, WHOLE):
        yield f"no convention in the table is like this code for model_type {model_type!r}"
    elif name is not None and not version:
        yield "the tree states no version"
    elif name is not None and stated != name:
        yield (
            f"the version {version} and the code disagree: that release follows {stated or 'no known convention'}, "
            f"this code {name}; the code decides"
        )
