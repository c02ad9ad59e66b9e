"""What the engine tests share besides fixtures: sizes, wirings, and a stand-in server started by other hands."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from eagle3.wiring import Site, Wiring
from eval.engines.process import free_port, server_process

FAKE = Path(__file__).with_name("fake_sglang.py")
LAYERS, HIDDEN, VOCAB, STEPS = 8, 16, 40, 3


def wiring_of(*layers: int) -> Wiring:
    return Wiring(tuple(Site(k) for k in layers), "final", "llama", LAYERS, HIDDEN)


TRAINED = wiring_of(1, 4, 6)


@contextlib.contextmanager
def running(flags: list[str], tmp_path: Path, script: Path = FAKE) -> Iterator[str]:
    """The stand-in, started by other hands; yields its URL."""
    port = free_port("127.0.0.1")
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, str(script), "--host", "127.0.0.1", "--port", str(port), *flags]
    with server_process("stand-in", command, url, tmp_path / "other.log") as server:
        server.wait_ready("/health", 60.0)
        yield url
