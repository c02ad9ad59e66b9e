"""Which SGLang an interpreter has, and whose id convention it follows, without importing it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from eagle3.atomic import read_json
from eagle3.conventions import convention, sglang_convention
from eagle3.errors import RedraftError, WiringError

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
    """A convention and what it was concluded from."""

    name: str
    source: str


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
    """
    if named != "auto":
        return Choice(convention(named).name, "eval.server.convention")
    if tree is not None:
        return _from_tree(tree, target, model_type)
    return Choice(sglang_convention(version).name, f"the version the server gives, {version}")


def _from_tree(tree: Path, target: Path, model_type: str) -> Choice:
    from eagle3.sglang_tree import convention_of_tree

    architectures = read_json(target / "config.json").get("architectures") or [""]
    verdict = convention_of_tree(tree, model_type, architectures[0])
    if verdict.convention is None:
        raise WiringError(
            "this SGLang's rule for layer ids is not known",
            where=str(tree),
            why="; ".join(verdict.reasons),
            mend="measure what it feeds (python -m eval.probe live) and name it in eval.server.convention",
        )
    return Choice(verdict.convention, f"the source of SGLang {verdict.version}, {verdict.file}")
