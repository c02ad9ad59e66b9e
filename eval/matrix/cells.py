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
        style: whose ids are written: a key of `STYLES`.
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


def cell(draft: str, trained: Wiring, build: str, style: str) -> Cell:
    """Compute one cell."""
    rule = convention(build)
    try:
        serve_with: tuple[int, ...] | None = tuple(rule.render(trained))
    except WiringError:
        serve_with = None
    try:
        ids = tuple(convention(STYLES[style]).render(trained))
    except WiringError as err:
        return Cell(draft, build, style, (), trained, None, f"no {style}-style ids: {err.what}", serve_with)
    try:
        fed = rule.parse_like(ids, trained, trained.teacher)
    except WiringError as err:
        return Cell(draft, build, style, ids, trained, None, f"{err.what}: {err.why}", serve_with)
    return Cell(draft, build, style, ids, trained, fed, "; ".join(trained.differences(fed)), serve_with)


def matrix(drafts: dict[str, Wiring], builds: Sequence[str] = BUILDS) -> list[Cell]:
    """Every cell, draft by draft, then build by build."""
    return [cell(name, wiring, build, style) for name, wiring in drafts.items() for build in builds for style in STYLES]
