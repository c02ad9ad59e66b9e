"""Commands that serve a draft, as they are shown to people: one place for the engines' flags."""

from __future__ import annotations

import json
import shlex
from pathlib import Path


def speculative_flags(draft: str | Path, steps: int, topk: int = 1, draft_tokens: int = 0) -> dict[str, str]:
    """SGLang's flags for a draft, by name.

    Args:
        draft: its served folder.
        steps: proposals after one another.
        topk: branches of each.
        draft_tokens: tokens that the target verifies at once; 0 = those of a chain, `steps + 1`.
    """
    return {
        "speculative-algorithm": "EAGLE3",
        "speculative-draft-model-path": str(draft),
        "speculative-num-steps": str(steps),
        "speculative-eagle-topk": str(topk),
        "speculative-num-draft-tokens": str(draft_tokens or steps + 1),
    }


def flag_words(options: dict[str, str]) -> list[str]:
    """`--name value` for each."""
    return [part for name, value in options.items() for part in (f"--{name}", value)]


def serving_command(engine: str, target: str, draft: str, steps: int) -> list[str]:
    """The shortest command that serves `draft` with `target` in "sglang" or "vllm", a chain of `steps` proposals."""
    if engine == "vllm":
        setting = {"method": "eagle3", "model": draft, "num_speculative_tokens": steps}
        return ["vllm", "serve", target, "--speculative-config", json.dumps(setting)]
    options = {"model-path": target, **speculative_flags(draft, steps)}
    return ["python", "-m", "sglang.launch_server", *flag_words(options)]


def in_lines(command: list[str], flags: int = 2) -> str:
    """A shell command, `flags` flags a line behind the first line of as many."""
    lines: list[list[str]] = [[]]
    for word in command:
        full = sum(known.startswith("--") for known in lines[-1]) == flags
        if word.startswith("--") and full:
            lines.append([])
        lines[-1].append(word)
    return " \\\n  ".join(shlex.join(line) for line in lines)
