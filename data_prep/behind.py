"""Work behind the caller's back: several threads, a bound on the bytes that wait for them, the first failure raised."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from eagle3.errors import RedraftError


class Behind:
    """Runs pieces of work in threads, each piece holding memory until it is done. Used by one thread.

    Memory is asked for with `reserve` before it is filled, and handed on to a piece of work with `start`. So what is
    reserved and not yet worked off never exceeds `limit`, but for what the caller has reserved and not handed on.

    Args:
        threads: pieces done at a time.
        limit: bytes.
    """

    def __init__(self, threads: int, limit: int) -> None:
        self.limit = limit
        self.held = 0  # bytes reserved and not worked off
        self.peak = 0
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="shard-writer")
        self._pending: dict[Future[None], int] = {}
        self._failed = threading.Event()

    def reserve(self, size: int) -> None:
        """Wait until `size` bytes more are within the limit, or nothing is left to wait for; they count from here on.

        Raises:
            Whatever a piece of work raised.
        """
        self._collect(block=False)
        while self._pending and self.held + size > self.limit:
            self._collect(block=True)
        self.held += size
        self.peak = max(self.peak, self.held)

    def start(self, work: Callable[[], None], size: int) -> None:
        """Do `work`; `size` of the bytes reserved are free once it is done."""
        self._pending[self._pool.submit(self._run, work)] = size

    def settle(self) -> None:
        """Wait for all work.

        Raises:
            Whatever a piece of work raised, the first that did.
        """
        while self._pending:
            self._collect(block=True)

    def _run(self, work: Callable[[], None]) -> None:
        if self._failed.is_set():  # what failed once, as a full disk does, is not tried again with all that waits
            return
        try:
            work()
        except BaseException:
            self._failed.set()
            raise

    def _collect(self, block: bool) -> None:
        """Let go of what is done."""
        done, _ = wait(self._pending, None if block else 0, FIRST_COMPLETED)
        failure: BaseException | None = None
        for future in done:
            self.held -= self._pending.pop(future)
            failure = failure or future.exception()
        if failure is not None:
            raise failure

    def __enter__(self) -> Behind:
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for all work; its failures are not raised here: the caller has one already, or has settled before."""
        with contextlib.suppress(RedraftError):
            self.settle()
        self._pool.shutdown(wait=True)
