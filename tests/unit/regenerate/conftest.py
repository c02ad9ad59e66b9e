"""A source, a configuration with short patience, and the fake server's module, for the tests of the regeneration."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from regenerate_case import SET

from data_prep.regenerate.config import RegenerateConfig


@pytest.fixture
def quick() -> Callable[..., RegenerateConfig]:
    """A configuration whose waits are short."""

    def make(**changes: Any) -> RegenerateConfig:
        short = {"concurrency": 4, "max_tokens": 50, "retries": 3, "backoff_s": 0.01, "timeout_s": 5.0, "outage_s": 0.5}
        return RegenerateConfig(**{**SET, **short, **changes})

    return make


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """24 conversations that hold somebody else's answers."""
    path = tmp_path / "selected.jsonl"
    records = [
        {
            "id": f"r{i:02d}",
            "messages": [
                {"role": "user", "content": f"question {i}"},
                {"role": "assistant", "content": "somebody else's words"},
            ],
            "domain": "math" if i % 3 else "chat",
            "language": "en",
            "provenance": {"record": i},
        }
        for i in range(24)
    ]
    path.write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")
    return path
