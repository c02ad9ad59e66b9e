"""The bench on which both tables of faults are run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from planted_bench import Bench


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, tiny_llama_path: Path) -> Iterator[Bench]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Bench(tmp_path_factory.mktemp("bench"), tiny_llama_path)
    torch.set_num_threads(threads)
