"""What an installed or source SGLang makes of a draft's layer ids, read from its code, without starting it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from eagle3.conventions import convention, explain
from eagle3.errors import WiringError
from eagle3.sglang_tree import TreeVerdict, convention_of_tree
from eagle3.wiring import EMBEDDING, Wiring
from eval.probe.verdict import Verdict, cannot_tell

_PATCH = "python scripts/sglang_patch.py"
_MEASURE = "measure what the running server feeds: python -m eval.probe live"


def probe_static(
    tree_or_python: Path,
    model_type: str,
    architecture: str = "",
    wiring: Wiring | None = None,
    *,
    cuda_graphs: bool = True,
) -> Verdict:
    """Read a tree and say which ids make it feed a wiring, or why none do.

    Args:
        tree_or_python: an SGLang tree or a Python that has one (see `eagle3.sglang_tree.read_tree`).
        model_type: the target's, "kimi_k25".
        architecture: the target's class; "" = the usual one of `model_type`.
        wiring: what the draft must be fed; None = only say which convention the code follows.
        cuda_graphs: the server will use them (False with `--disable-cuda-graph`, and on a CPU).

    Returns:
        ok when the convention is known and can feed the wiring; `facts["ids"]` are then the ids to write. It cannot
        tell when the code has a shape that is not known.

    Raises:
        RedraftError: no SGLang there, or it has no such model.
    """
    read = convention_of_tree(tree_or_python, model_type, architecture)
    facts: dict[str, Any] = {
        "version": read.version,
        "file": read.file,
        "convention": read.convention,
        "patch": read.patch,
    }
    where = f"SGLang {read.version or '(no version)'}, {model_type}"
    if read.patch == "half":
        mend = f"{_PATCH} verify {tree_or_python}; restore SGLang's own file, then apply"
        return Verdict(False, f"{where}: the embedding patch is there by half", read.reasons, mend, facts=facts)
    if read.convention is None:
        return cannot_tell(f"{where}: its rule for layer ids is not known", read.reasons, _MEASURE, facts=facts)
    if read.stops:
        mend = f"{_PATCH} apply {tree_or_python}, or use 0.5.10 or newer"
        return Verdict(
            False, f"{where}: a server with an EAGLE-3 draft stops at start-up", read.reasons, mend, facts=facts
        )
    if wiring is None:
        patch = "whole" if read.patch == "whole" else "not applied"
        what = f"{where}: follows {read.convention}; the embedding patch is {patch}"
        return Verdict(True, what, read.reasons, "", facts=facts)
    return _for_wiring(where, read, wiring, str(tree_or_python), cuda_graphs, facts)


def with_folder(verdict: Verdict, ids: Sequence[int] | None, wiring: Wiring) -> Verdict:
    """The verdict on a tree, turned where it reads a draft folder's own ids as other sites than `wiring`'s.

    Args:
        verdict: of `probe_static`.
        ids: those in the folder's `eagle_config`; None = none there, so the build's default.
        wiring: what the draft was trained on.
    """
    name = verdict.facts.get("convention")
    if not verdict.ok or name is None:
        return verdict
    try:
        lines = explain(wiring, convention(name).parse_like(ids, wiring, wiring.teacher))
    except WiringError as err:
        lines = [one for one in (err.what, err.why) if one]
    if not lines:
        return verdict
    given = "no ids" if ids is None else f"ids {list(ids)}"
    return replace(
        verdict,
        ok=False,
        what=f"{verdict.what}; the draft's folder holds {given}, which this build reads as other sites",
        reasons=[*lines, *verdict.reasons],
        mend=f"export the draft again with export.convention={name}; its ids are {verdict.facts['ids']}",
    )


def _for_wiring(
    where: str, read: TreeVerdict, wiring: Wiring, tree: str, cuda_graphs: bool, facts: dict[str, Any]
) -> Verdict:
    assert read.convention is not None
    follows = convention(read.convention)
    sites = ", ".join(wiring.names)
    try:
        ids = follows.render(wiring)
    except WiringError as err:
        reasons = [one for one in (err.what, err.why) if one] + read.reasons
        return Verdict(False, f"{where}: cannot feed {sites}", reasons, _mend(err, wiring, tree), facts=facts)
    spoilt = list(_spoilt(read, wiring, ids, tree, cuda_graphs))
    facts["ids"], facts["default_ok"] = ids, follows.render_default_ok(wiring)
    if spoilt:
        reasons = [why for why, _ in spoilt] + read.reasons
        return Verdict(False, f"{where}: ids {ids} would not hold {sites}", reasons, spoilt[0][1], facts=facts)
    note = ["no ids at all feed the same here"] if facts["default_ok"] else []
    return Verdict(
        True, f"{where}: write ids {ids} to feed {sites} ({follows.name})", note + read.reasons, "", facts=facts
    )


def _spoilt(
    read: TreeVerdict, wiring: Wiring, ids: list[int], tree: str, cuda_graphs: bool
) -> Iterator[tuple[str, str]]:
    """Reasons, with their mends, why a build feeds something else than its ids say."""
    assert read.convention is not None
    if read.late_graphs and cuda_graphs and not convention(read.convention).render_default_ok(wiring):
        yield (
            f"this build captures CUDA graphs with its default layers before it sets the ids {ids}",
            f"{_PATCH} apply {tree}, or serve with --disable-cuda-graph, or train on the default wiring",
        )


def _mend(err: WiringError, wiring: Wiring, tree: str) -> str:
    patchable = convention("sglang-0.5.9-patched").feeds_embedding(wiring.model_type)
    if EMBEDDING in wiring.aux and patchable and not convention("sglang-0.5.9").feeds_embedding(wiring.model_type):
        return f"{_PATCH} apply {tree}"
    return err.mend
