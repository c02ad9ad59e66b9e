"""Commands that serve a draft, as they are shown to people."""

from __future__ import annotations

import json
import shlex

from eval.engines.flags import sglang_speculation


def serving_command(engine: str, target: str, draft: str, steps: int) -> list[str]:
    """The shortest command that serves `draft` with `target` in "sglang" or "vllm", a chain of `steps` proposals."""
    if engine == "vllm":
        setting = {"method": "eagle3", "model": draft, "num_speculative_tokens": steps}
        return ["vllm", "serve", target, "--speculative-config", json.dumps(setting)]
    return ["python", "-m", "sglang.launch_server", "--model-path", target, *sglang_speculation(draft, steps)]


def in_lines(command: list[str], flags: int = 2) -> str:
    """A shell command, `flags` flags a line behind the first line of as many."""
    lines: list[list[str]] = [[]]
    for word in command:
        full = sum(known.startswith("--") for known in lines[-1]) == flags
        if word.startswith("--") and full:
            lines.append([])
        lines[-1].append(word)
    return " \\\n  ".join(shlex.join(line) for line in lines)
