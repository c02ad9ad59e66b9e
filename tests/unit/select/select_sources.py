"""Sources made on the spot."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from data_prep.select.config import SelectConfig, SourceConfig

WORDS = [a + b for a in ("ba", "ke", "li", "mo", "nu", "pra", "sti") for b in ("dor", "fen", "gal", "him", "jus")]


def sentence(rng: random.Random, words: int = 14) -> str:
    """Random words: two of them share next to no shingles."""
    return " ".join(rng.choice(WORDS) + rng.choice(WORDS) for _ in range(words))


def ask(text: str, answer: str | None = None, **extra: Any) -> dict[str, Any]:
    """A record in OpenAI form."""
    messages = [{"role": "user", "content": text}]
    if answer is not None:
        messages.append({"role": "assistant", "content": answer})
    return {"messages": messages, **extra}


def write_lines(path: Path, records: Iterable[Any]) -> Path:
    """JSON lines; a text stands as it is."""
    lines = [one if isinstance(one, str) else json.dumps(one, ensure_ascii=False) for one in records]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def source(path: Path, name: str, **settings: Any) -> SourceConfig:
    """A source whose language is given, unless the settings say otherwise."""
    return SourceConfig(**({"path": str(path), "name": name, "language": "en"} | settings))


def config(*sources: SourceConfig, **settings: Any) -> SelectConfig:
    """A selection that goes on with what there is, unless the settings say otherwise."""
    return SelectConfig(**({"sources": list(sources), "shortfall": "report", "total": 1000} | settings))


def read_selected(out: Path) -> list[dict[str, Any]]:
    """The records written."""
    return [json.loads(line) for line in (out / "selected.jsonl").read_text(encoding="utf-8").splitlines()]


def texts(records: Iterable[dict[str, Any]]) -> list[str]:
    """What the user says first in each record."""
    return [next(m["content"] for m in one["messages"] if m["role"] == "user") for one in records]
