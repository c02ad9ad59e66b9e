"""Threads that encode records for any number of shards being written."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch

Item = TypeVar("Item")
Encoded = TypeVar("Encoded")


class Encoders:
    """A pool of threads, each of which computes alone: torch would else give every one of them all the cores.

    Args:
        threads: how many; the codecs release Python's lock.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._of_torch = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="encoder", initializer=_compute_alone)

    def map(self, work: Callable[[Item], Encoded], items: Iterable[Item]) -> Iterator[Encoded]:
        """`work` of each item, in order; no more results lie ready than two a thread."""
        ahead: deque[Future[Any]] = deque()
        for item in items:
            ahead.append(self._pool.submit(work, item))
            if len(ahead) > 2 * self.threads:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()

    def __enter__(self) -> Encoders:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True)
        torch.set_num_threads(self._of_torch)  # what threads begun from here on will find


def _compute_alone() -> None:
    """Holds for this thread, and for threads that begin later and do not say otherwise."""
    torch.set_num_threads(1)
