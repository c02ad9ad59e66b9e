"""Which SGLang an interpreter has, and whose id convention it follows, without importing it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from eagle3.atomic import read_json
from eagle3.conventions import convention, explain, sglang_convention
from eagle3.errors import RedraftError, WiringError
from eagle3.sglang_tree import TreeVerdict, convention_of_tree
from eagle3.wiring import Wiring

_ASK = """
import importlib.metadata, importlib.util, json
spec = importlib.util.find_spec("{package}")
tree = list(spec.submodule_search_locations)[0] if spec and spec.submodule_search_locations else ""
versions = []
for name in {distributions}:
    try:
        versions.append(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps([tree, (versions or [""])[0]]))
"""


@dataclass(frozen=True)
class Build:
    """An installed engine: the version its package names, and the folder that its interpreter imports."""

    version: str
    tree: Path


@dataclass(frozen=True)
class Choice:
    """A convention, what it was concluded from, and what else the build's source says.

    Args:
        name: key in `eagle3.conventions.CONVENTIONS`.
        source: in words.
        late_graphs: its CUDA graphs feed the default layers whatever the ids (`eagle3.sglang_tree.graphs`).
        stops: why it would stop at start-up with any draft for this target; "" when it would not.
        read: the convention that its source follows, where that could be read; `name` when nobody named another.
        half: which parts of the embedding patch are missing or wrong where others are there.
    """

    name: str
    source: str
    late_graphs: bool = False
    stops: str = ""
    read: str = ""
    half: str = ""


def find_build(
    python: str, env: Mapping[str, str], package: str, distributions: tuple[str, ...] | None = None
) -> Build:
    """Ask an interpreter which build of `package` it has; the package itself is not imported.

    Raises:
        RedraftError: there is no such interpreter, or it has no such package.
    """
    code = _ASK.format(package=package, distributions=list(distributions or (package,)))
    mend = "set eval.server.python to the interpreter that has it, or eval.server.url to a running server"
    try:
        done = subprocess.run(
            [python, "-c", code],
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            timeout=120,
            stdin=subprocess.DEVNULL,
        )
        tree, version = json.loads(done.stdout.strip().splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as err:
        raise RedraftError("cannot ask the interpreter", where=f"eval.server.python={python}", why=str(err), mend=mend)  # noqa: B904
    if not tree:
        raise RedraftError(f"{package} is not installed there", where=f"eval.server.python={python}", mend=mend)
    return Build(version, Path(tree))


def choose_convention(named: str, tree: Path | None, version: str, target: Path, model_type: str) -> Choice:
    """Whose ids to write for an SGLang build: the named convention, else what its source says, else its version.

    Args:
        named: `eval.server.convention`; "auto" = find out.
        tree: its source, where it can be read.
        version: what the build calls itself.
        target: folder of the target, for the class that serves it.
        model_type: of the target's text model.

    Raises:
        WiringError: an unknown name, or a build whose rule is not known.
        RedraftError: the source has no such model.
    """
    if named != "auto":
        name, source = convention(named).name, "eval.server.convention"
        with contextlib.suppress(RedraftError):  # a build that cannot be read is why one names the convention
            if tree is not None:
                verdict = _read(tree, target, model_type)
                parts = [one for one in verdict.reasons if "MISSING" in one] or verdict.reasons
                half = "; ".join(parts) if verdict.patch == "half" else ""
                return Choice(name, source, verdict.late_graphs, verdict.stops, verdict.convention or "", half)
        return Choice(name, source)
    if tree is None:
        return Choice(sglang_convention(version).name, f"the version the server gives, {version}")
    verdict = _read(tree, target, model_type)
    if verdict.convention is None:
        raise WiringError(
            "this SGLang's rule for layer ids is not known",
            where=str(tree),
            why="; ".join(verdict.reasons),
            mend="measure what it feeds (python -m eval.probe live) and name it in eval.server.convention",
            page="wiring",
        )
    source = f"the source of SGLang {verdict.version or version}, {verdict.file}"
    return Choice(verdict.convention, source, verdict.late_graphs, verdict.stops, verdict.convention)


def check_feeds(choice: Choice, wiring: Wiring, flags: Sequence[str]) -> None:
    """Refuse a launch that would not feed the wiring although its ids are right.

    Raises:
        WiringError: the server would stop at start-up, its CUDA graphs would feed the default layers, its embedding
            patch is there by half, or its source reads the ids of the named convention as other sites.
    """
    if choice.stops:
        mend = "serve with a build that can (docs/wiring.md lists those that were read)"
        what = "this SGLang cannot serve a draft for this target"
        raise WiringError(what, where=choice.source, why=choice.stops, mend=mend)
    if choice.half:
        raise WiringError(
            "this SGLang carries the embedding patch by half",
            where=choice.source,
            why=choice.half,
            mend="restore its own files (python scripts/sglang_patch.py revert), then apply the whole patch",
            page="sglang_patch",
        )
    _check_named(choice, wiring)
    without_graphs = any(flag in ("--disable-cuda-graph", "--device=cpu", "cpu") for flag in flags)
    if choice.late_graphs and not without_graphs and not convention(choice.name).render_default_ok(wiring):
        raise WiringError(
            "this SGLang's CUDA graphs would feed the default layers",
            where=choice.source,
            why=f"it captures them before it sets the draft's ids, so {', '.join(wiring.names)} would not be fed",
            mend="add --disable-cuda-graph to eval.server.extra_args, or serve with 0.5.13 or newer",
            page="engines",
        )


def _check_named(choice: Choice, wiring: Wiring) -> None:
    """Refuse a named convention whose ids this build's own source reads otherwise."""
    if choice.read in ("", choice.name):
        return
    ids = convention(choice.name).render(wiring)
    try:
        lines = explain(wiring, convention(choice.read).parse_like(ids, wiring, wiring.teacher))
    except WiringError as err:
        lines = [": ".join(part for part in (err.what, err.why) if part)]
    if lines:
        raise WiringError(
            "the ids would be written for another build than this one",
            where=f"{choice.source}={choice.name}",
            why=f"its ids {ids} are read as {choice.read} by this build's source: {'; '.join(lines)}",
            mend=f"set eval.server.convention=auto, or {choice.read}",
            page="engines",
        )


def _read(tree: Path, target: Path, model_type: str) -> TreeVerdict:
    architectures = read_json(target / "config.json").get("architectures") or [""]
    return convention_of_tree(tree, model_type, architectures[0])
