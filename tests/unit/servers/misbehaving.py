"""A server on loopback that all clients of the product can ask, and that misbehaves as a plan says, request by request.

It speaks what they ask for: SGLang's `/generate` (counts, or hidden states), vLLM's `/v1/completions`, and
`/v1/chat/completions`. It can die, with every connection, and come back at its address.
"""

from __future__ import annotations

import contextlib
import json
import math
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

STEPS, HIDDEN, AUX = 3, 4, 3
SLOW = ("hang", "trickle")  # nothing whole in time
STATUS = {"500": {}, "503": {"Retry-After": "7"}, "429": {"Retry-After": "100000"}}
BROKEN = ("reset", "half", "short", "html", *STATUS)  # what another try may not meet
DYING = "die"
Plan = Callable[[int], str]  # number of the request, from 0 on -> what becomes of it; "" = it is answered well


def counted(most: int) -> tuple[list[int], list[int]]:
    """A text, and what each verify kept of the proposals made for it: 0, 1, 2, 3, 0, ..."""
    tokens, kept = [10], []
    while len(tokens) < most:
        kept.append(len(kept) % (STEPS + 1))
        tokens += range(10 + len(tokens), 11 + len(tokens) + kept[-1])
    return tokens[:most], kept


def sglang_text(body: Any, wrong: bool) -> dict[str, Any]:
    """`/generate` of a server with a draft."""
    tokens, kept = counted(body["sampling_params"]["max_new_tokens"])
    meta = {
        "finish_reason": {"type": "length"}, "completion_tokens": len(tokens), "spec_verify_ct": len(kept) + wrong,
        "spec_num_correct_drafts": sum(kept), "spec_num_proposed_drafts": STEPS * len(kept),
        "spec_correct_drafts_histogram": [kept.count(c) for c in range(STEPS + 1)],
    }  # fmt: skip
    return {"output_ids": tokens, "meta_info": meta}


def vllm_text(body: Any, wrong: bool) -> dict[str, Any]:
    """`/v1/completions` with metrics step by step."""
    tokens, kept = counted(body["max_tokens"])
    draft = {
        "acceptance_histogram": [kept.count(c) for c in range(STEPS + 1)], "num_spec_tokens": STEPS,
        "num_accepted_draft_tokens": sum(kept) + wrong, "per_step_accepted": kept,
        "per_step_drafted": [STEPS] * len(kept),
    }  # fmt: skip
    choice = {"finish_reason": "length", "token_ids": tokens}
    return {
        "choices": [choice],
        "usage": {"completion_tokens": len(tokens)},
        "metrics": {"speculative_decoding": draft},
    }


def states(body: Any, width: int, wrong: bool) -> dict[str, Any]:
    """`/generate` of a server that returns hidden states, one row a token; too few when `wrong`."""
    ids = body["input_ids"]
    rows = [[math.sin(token + 0.5 * column) for column in range(width)] for token in ids]
    meta = {"hidden_states": [rows[wrong:]], "cached_tokens": 0, **({"id": body["rid"]} if "rid" in body else {})}
    return {"output_ids": [5], "meta_info": meta}


def chat(body: Any, wrong: bool) -> dict[str, Any]:
    """`/v1/chat/completions`; without counts when `wrong`."""
    said = {"role": "assistant", "content": f"answer to {body['messages'][-1]['content']}"}
    usage = {} if wrong else {"prompt_tokens": 3, "completion_tokens": 4}
    return {"model": "tiny", "choices": [{"finish_reason": "stop", "message": said}], "usage": usage}


ANSWERS: dict[str, Callable[[Any, bool], Any]] = {
    "/generate": sglang_text,
    "/v1/completions": vllm_text,
    "/v1/chat/completions": chat,
    "/aux/generate": lambda body, wrong: states(body, AUX * HIDDEN, wrong),
    "/last/generate": lambda body, wrong: states(body, HIDDEN, wrong),
}


@dataclass
class Misbehaving:
    """The server; `plan` is looked at for each request that asks for something, and may be changed at any time."""

    plan: Plan = lambda _number: ""
    asked: list[str] = field(default_factory=list)  # what became of each request
    url: str = ""
    on_slow: Callable[[], None] = lambda: None  # called when an answer begins to be late
    _port: int = 0
    _listener: socket.socket | None = None
    _open: set[socket.socket] = field(default_factory=set)
    _lock: Any = field(default_factory=threading.Lock)
    _closing: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """Listen, at the address of before where there was one."""
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self._port))
        listener.listen(64)
        self._listener, self._port = listener, listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self._closing = threading.Event()
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    @property
    def listens(self) -> bool:
        """Whether it is there."""
        return self._listener is not None

    def die(self) -> None:
        """Stop listening, and cut every connection; harmless on a dead one."""
        listener, self._listener = self._listener, None
        self._closing.set()
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        with self._lock:
            for connection in self._open:
                cut(connection)
            self._open.clear()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, address = listener.accept()
            except OSError:
                return
            with self._lock:
                self._open.add(connection)
            threading.Thread(target=self._serve, args=(connection, address), daemon=True).start()

    def _serve(self, connection: socket.socket, address: Any) -> None:
        with contextlib.suppress(OSError, ValueError):
            _Handler(connection, address, self)  # type: ignore[arg-type]
        with self._lock:
            self._open.discard(connection)
        connection.close()

    def next(self) -> str:
        """What becomes of the next request."""
        with self._lock:
            fault = self.plan(len(self.asked))
            self.asked.append(fault)
        return fault

    def wait(self, seconds: float | None = None) -> bool:
        """Until the server closes, or for some seconds; whether it closes."""
        return self._closing.wait(seconds)


def cut(connection: socket.socket) -> None:
    """Reset a connection: what is on its way is lost."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RD)  # wakes a handler that waits for the next request
    connection.close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Quiet."""

    @property
    def fake(self) -> Misbehaving:
        return self.server  # type: ignore[return-value]

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            return self._send(200, {"data": [{"id": "tiny"}]})
        return self._send(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        fault = self.fake.next()
        whole = json.dumps(ANSWERS[self.path](body, fault == "wrong")).encode()
        if fault == DYING:
            return self.fake.die()
        if fault in STATUS:
            return self._send(int(fault), {"error": {"message": "the scheduler is asleep"}}, STATUS[fault])
        if fault == "html":
            return self._send(200, b"<!doctype html><title>Welcome to the proxy</title>", {"Content-Type": "text/html"})
        if fault == "short":
            return self._send(200, whole[: len(whole) // 2])
        if fault in ("", "wrong"):
            return self._send(200, whole)
        return self._break_off(fault, whole)

    def _break_off(self, fault: str, whole: bytes) -> None:
        self.close_connection = True
        if fault in ("half", "trickle"):
            self._head(200, len(whole), {})
        if fault in SLOW:
            self.fake.on_slow()
        if fault == "hang":
            self.fake.wait()
        if fault == "half":
            self.wfile.write(whole[: len(whole) // 2])
            self.wfile.flush()
        for byte in whole if fault == "trickle" else b"":
            self.wfile.write(bytes([byte]))
            if self.fake.wait(0.02):
                return
        if fault == "reset":
            cut(self.connection)

    def _head(self, status: int, length: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **headers, "Content-Length": str(length)}.items():
            self.send_header(name, value)
        self.end_headers()

    def _send(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        self._head(status, len(raw), headers or {})
        self.wfile.write(raw)


@contextlib.contextmanager
def misbehaving() -> Iterator[Misbehaving]:
    """A server that is up; gone when the block is left."""
    server = Misbehaving()
    server.start()
    try:
        yield server
    finally:
        server.die()
