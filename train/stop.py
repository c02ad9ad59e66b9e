"""A polite request to stop (SIGTERM, as batch systems send before a kill): finish the step, save, leave."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


class StopRequest:
    """Set by SIGTERM."""

    def __init__(self) -> None:
        self.asked = False

    def _ask(self, *_: object) -> None:
        self.asked = True


@contextlib.contextmanager
def listening() -> Iterator[StopRequest]:
    """Listen for SIGTERM during the block (main thread only; elsewhere nothing is ever asked)."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = signal.signal(signal.SIGTERM, request._ask)
    try:
        yield request
    finally:
        signal.signal(signal.SIGTERM, before)
