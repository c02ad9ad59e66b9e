"""What a list of layer ids means to whom, and which ids make an engine feed a given wiring.

The same `[2, 30, 58]` names different tensors to different programs, and to different builds of one program. This
is the door to that knowledge: `convention(name).render(wiring)` gives the ids to write, `.parse(ids, ...)` what ids
found somewhere feed, `parse_all` what they mean to everyone, `explain` how two wirings differ. No engine is imported.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from eagle3.convention_table import CONVENTIONS
from eagle3.engine_convention import EngineConvention, Shape, TargetShape
from eagle3.errors import WiringError
from eagle3.explain import explain
from eagle3.wiring import Wiring

__all__ = [
    "CONVENTIONS",
    "EngineConvention",
    "Shape",
    "TargetShape",
    "convention",
    "explain",
    "parse_all",
    "sglang_convention",
]


def convention(name: str) -> EngineConvention:
    """Look a convention up by name.

    Raises:
        WiringError: unknown name; the line lists the known ones.
    """
    if name not in CONVENTIONS:
        raise WiringError(
            "unknown engine convention",
            why=f"found {name!r}",
            mend=f"use one of {', '.join(sorted(CONVENTIONS))}",
            page="wiring",
        )
    return CONVENTIONS[name]


def sglang_convention(version: str, *, patched: bool = False) -> EngineConvention:
    """The convention of an SGLang release: the newest one read that is not newer than `version`.

    Releases before 0.5.9 share its rule (read back to 0.5.6.post2). A source build between two releases may differ:
    measure it with the probe.

    Args:
        version: "0.5.23", "0.5.6.post2", ...
        patched: the build's DeepSeek file carries the embedding patch (`scripts/sglang_patch.py`), whole.

    Raises:
        WiringError: not a release number, or older than 0.5.6.
    """
    match = re.match(r"v?(\d+)\.(\d+)\.(\d+)", version)
    release = tuple(int(part) for part in match.groups()) if match else (0, 0, 0)
    if release < (0, 5, 6):
        raise WiringError(
            "no id convention known for this SGLang",
            why=f"version {version!r}",
            mend="use release 0.5.6 or newer",
            page="wiring",
        )
    known = ((0, 5, 23), (0, 5, 14), (0, 5, 13))
    newest = next((one for one in known if release >= one), (0, 5, 9))
    name = "sglang-" + ".".join(str(part) for part in newest)
    return convention(name + "-patched" if patched else name)


def parse_all(ids: Sequence[int] | None, shape: TargetShape) -> dict[str, Wiring | WiringError]:
    """What `ids` mean to everyone: the wiring each program would feed, or why it would not."""
    out: dict[str, Wiring | WiringError] = {}
    for name, one in CONVENTIONS.items():
        try:
            out[name] = one.parse_like(ids, shape)
        except WiringError as err:
            out[name] = err
    return out
