"""One workshop for all tests of a file: its uninterrupted runs are made once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from crash_stages import Workshop


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory, tiny_llama_path: Path) -> Iterator[Workshop]:
    workshop = Workshop(tmp_path_factory.mktemp("crash"), tiny_llama_path)
    yield workshop
    workshop.close()
