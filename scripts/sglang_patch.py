"""Teach an SGLang tree to feed the embedding for layer id -1: `python scripts/sglang_patch.py apply TREE`.

apply   patch the DeepSeek model file; refuse unknown code; safe to repeat
verify  is the patch whole? exit code 0 whole, 1 not, 2 unreadable
revert  put the originals back, byte for byte
status  version, convention and parts, and what the record says

TREE is the sglang package folder, its site-packages, a repository with python/sglang, or a Python interpreter.
See docs/sglang_patch.md.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from eagle3.command_line import Parser, one_line_errors
from eagle3.conventions import convention
from eagle3.errors import RedraftError
from eagle3.sglang_tree import SglangTree, read_tree
from eagle3.sglang_tree.patch import WHOLE, Finding, apply, findings, record_state, revert, state_of
from eagle3.wiring import EMBEDDING, Wiring


@one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; exit code 2 and one line on an expected failure."""
    parser = Parser(
        prog="python scripts/sglang_patch.py",
        description=__doc__,
        examples="""
        python scripts/sglang_patch.py status .venv-sglang/bin/python
        python scripts/sglang_patch.py apply sglang/python/sglang --model-type deepseek_v3
        """,
    )
    parser.add_argument("command", choices=sorted(_COMMANDS), help="what to do, see above")
    parser.add_argument("tree", type=Path, help="where SGLang is")
    parser.add_argument(
        "--model-type",
        action="append",
        metavar="TYPE",
        help="target's model_type, repeatable; default: deepseek_v3, and kimi_k25 where the tree serves it",
    )
    args = parser.parse_args(argv)
    lines, code = _COMMANDS[args.command](read_tree(args.tree), args.model_type)
    print("\n".join(lines))
    return code


Answer = tuple[list[str], int]


def _apply(tree: SglangTree, model_types: list[str] | None) -> Answer:
    for one in findings(tree, model_types) if model_types else []:
        if not one.of_the_patch:
            return [_not_needed(one)], 0
    changes = apply(tree) or ["nothing to do: the patch is whole"]
    lines, code = _verify(tree, model_types)
    return [*changes, *lines], code


def _verify(tree: SglangTree, model_types: list[str] | None) -> Answer:
    found = findings(tree, model_types)
    lines = [
        f"{one.model_type}: {part.name}: {'yes' if part.good else 'NO'}: {part.why}"
        for one in found
        for part in one.parts
    ]
    state = state_of(found)
    lines.append(f"SGLang {tree.version or '(no version)'}: the patch is {_STATES[state]}")
    return lines, 0 if state == WHOLE else 1


def _revert(tree: SglangTree, model_types: list[str] | None) -> Answer:
    return [f"restored {name}" for name in revert(tree)], 0


def _status(tree: SglangTree, model_types: list[str] | None) -> Answer:
    lines = [f"SGLang {tree.version or '(no version)'} in {tree.root}"]
    for one in findings(tree, model_types):
        name = one.verdict.convention or "unknown"
        lines.append(f"{one.model_type}: convention {name}; the patch is {_STATES[one.verdict.patch]}")
        lines += [f"  {reason}" for reason in one.verdict.reasons]
    return [*lines, record_state(tree)], 0


def _not_needed(one: Finding) -> str:
    """What to do with a target that the patch is not about.

    Raises:
        RedraftError: this build cannot feed that target's embedding at all.
    """
    name = one.verdict.convention
    if name is not None and convention(name).feeds_embedding(one.model_type) and not one.verdict.aliased_embedding:
        (written,) = convention(name).render(Wiring((EMBEDDING,), "final", one.model_type, 61, 1))
        return f"{one.model_type}: nothing to patch: this build ({name}) feeds the embedding for id {written} already"
    raise RedraftError(
        "the patch is for DeepSeek and Kimi targets",
        where=f"{one.verdict.file}, {one.model_type}",
        why="; ".join(one.verdict.reasons),
        mend="serve this target with a build that feeds its embedding (0.5.23), or train a draft on layers only",
    )


_STATES = {
    "whole": "whole",
    "half": "there by HALF",
    "none": "not applied",
    "unknown": "UNKNOWN: the code is of another shape",
}
_COMMANDS = {"apply": _apply, "verify": _verify, "revert": _revert, "status": _status}

if __name__ == "__main__":
    sys.exit(main())
