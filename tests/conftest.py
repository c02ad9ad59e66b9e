"""Targets that tests share, made once and kept under `.cache/` in the repository."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

CACHE = Path(__file__).resolve().parent.parent / ".cache" / "targets"


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that ask a server again do so at once."""
    monkeypatch.setattr("eagle3.patient_http.sleep", lambda _seconds: None)


def _cached(name: str, recipe: dict[str, Any], make: Callable[[Path], Path]) -> Path:
    """The folder of this very recipe; one test process makes it while others wait."""
    from eagle3.atomic import sha256_json

    path = CACHE / f"{name}-{sha256_json(recipe)[:16]}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return make(path)


@pytest.fixture(scope="session")
def tiny_kimi_path() -> Path:
    """A trained 61-layer DeepSeek-V3 (hidden 64, vocabulary 1024) whose continuations of the corpus make sense."""
    from data_prep.targets import tiny_kimi

    return _cached("tiny_kimi", tiny_kimi.recipe(tiny_kimi.STEPS, 0), tiny_kimi.make_tiny_kimi)


@pytest.fixture(scope="session")
def tiny_llama_path() -> Path:
    """A random 8-layer Llama (hidden 64, 4/2 heads, vocabulary 320) with the same kind of tokenizer and template."""
    from data_prep.targets import tiny_llama

    return _cached("tiny_llama", tiny_llama.recipe(0), tiny_llama.make_tiny_llama)


@pytest.fixture(scope="session")
def kimi_mini_path() -> Path:
    """A trained miniature of Kimi-K2.5: its layout, int4 experts, slow tokenizer (hidden 64, 61 layers)."""
    from kimi import make_miniature

    return _cached("kimi_mini", make_miniature.recipe(), make_miniature.make_miniature)
