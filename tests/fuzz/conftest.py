"""How deep the fuzz tests dig: `make test` runs the same few examples each time, `make fuzz` new ones by the thousand.

REDRAFT_FUZZ is the number of examples a test; HYPOTHESIS_SEED (pytest's --hypothesis-seed) repeats a deep run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

DEEP = int(os.environ.get("REDRAFT_FUZZ", "0"))
_QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]

settings.register_profile("quick", max_examples=10, derandomize=True, deadline=None, suppress_health_check=_QUIET)
settings.register_profile("deep", max_examples=DEEP or 1, print_blob=True, deadline=None, suppress_health_check=_QUIET)
settings.load_profile("deep" if DEEP else "quick")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
