"""The computed half: what each build feeds a draft for each style of ids, from the wirings alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eagle3.conventions import convention
from eagle3.errors import WiringError
from eagle3.wiring import Wiring

# How people write ids: each style is the reading of the builds it was written for.
STYLES = {
    "old": "sglang-0.5.9-patched",  # every id + 1; -1 is the embedding, where the build is patched
    "new": "sglang-0.5.23",  # a DeepSeek target's ids are layers as they stand; 0 is the embedding
}
OTHER = "other"  # the ids that are right, on that build, for another draft: the mistake that no shape check sees
# Every SGLang reading of ids there is, oldest first; the matrix is computed for all and measured on those installed.
BUILDS = (
    "sglang-0.5.9",
    "sglang-0.5.9-patched",
    "sglang-0.5.13",
    "sglang-0.5.14",
    "sglang-0.5.23",
    "sglang-0.5.23-patched",
)


@dataclass(frozen=True)
class Cell:
    """One draft on one build with one style of ids.

    Args:
        draft: the draft's name.
        build: the build's convention.
        style: whose ids are written: a key of `STYLES`, or `other`.
        ids: what stands in the draft's config; empty where that style has no ids for the wiring.
        trained: what the draft learnt from.
        fed: what the build feeds for `ids`; None where it refuses them or stops.
        why: in words, when `fed` is not `trained`.
        serve_with: ids that make this build feed `trained`; None where none do.
    """

    draft: str
    build: str
    style: str
    ids: tuple[int, ...]
    trained: Wiring
    fed: Wiring | None
    why: str
    serve_with: tuple[int, ...] | None

    @property
    def verdict(self) -> str:
        """`right`, `wrong` (served, but fed other tensors) or `refused`."""
        if self.fed is None:
            return "refused"
        return "right" if self.fed == self.trained else "wrong"

    @property
    def key(self) -> str:
        """Names the cell in results."""
        return f"{self.draft}|{self.build}|{self.style}"


def matrix(drafts: dict[str, Wiring], builds: Sequence[str] = BUILDS) -> list[Cell]:
    """Every cell, draft by draft, then build by build."""
    out = []
    for name, trained in drafts.items():
        others = [wiring for wiring in drafts.values() if wiring != trained]
        for build in builds:
            out += [_cell(name, trained, build, style, _ids(STYLES[style], trained)) for style in STYLES]
            given = [_ids(build, other) for other in others]
            out += [_cell(name, trained, build, OTHER, ids) for ids in given if isinstance(ids, tuple)]
    return out


def _ids(convention_name: str, wiring: Wiring) -> tuple[int, ...] | WiringError:
    try:
        return tuple(convention(convention_name).render(wiring))
    except WiringError as err:
        return err


def _cell(draft: str, trained: Wiring, build: str, style: str, ids: tuple[int, ...] | WiringError) -> Cell:
    right = _ids(build, trained)
    serve_with = right if isinstance(right, tuple) else None
    if isinstance(ids, WiringError):
        return Cell(draft, build, style, (), trained, None, f"no {style}-style ids: {ids.what}", serve_with)
    try:
        fed = convention(build).parse_like(ids, trained, trained.teacher)
    except WiringError as err:
        return Cell(draft, build, style, ids, trained, None, f"{err.what}: {err.why}", serve_with)
    return Cell(draft, build, style, ids, trained, fed, "; ".join(trained.differences(fed)), serve_with)
