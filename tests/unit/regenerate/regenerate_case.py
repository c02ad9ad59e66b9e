"""What the regeneration's tests share; a module of its own name, for child processes import it by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SET = {"temperature": 0.7, "top_p": 0.9, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON lines file."""
    return [json.loads(line) for line in path.read_bytes().splitlines()]
