"""A chat server on loopback that behaves as it is told, well or badly; real HTTP, in this process or a child's."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

RESET = "reset"  # what a script returns to have the connection cut without an answer
HALF = "half"  # ... half a JSON
Script = Callable[[dict[str, Any], int], Any]  # (request body, how often this very request came before) -> answer


def text_for(body: dict[str, Any]) -> str:
    """The one answer of this target: it hangs on the messages, the seed and the sampling alone."""
    keys = ("messages", "seed", "temperature", "top_p", "max_tokens", "chat_template_kwargs", "tools")
    digest = hashlib.sha256(json.dumps([body.get(key) for key in keys], sort_keys=True).encode()).hexdigest()
    return " ".join(digest[i : i + 4] for i in range(0, 40, 4))


def completion(
    body: dict[str, Any],
    content: str | None = None,
    finish: str = "stop",
    ids: list[int] | None = None,
    **message: Any,
) -> dict[str, Any]:
    """A sound answer."""
    content = text_for(body) if content is None else content
    choice: dict[str, Any] = {
        "index": 0, "finish_reason": finish, "message": {"role": "assistant", "content": content, **message},
    }  # fmt: skip
    if ids is not None:
        choice |= {"response_token_ids": ids, "prompt_token_ids": [1, 2, 3]}
    usage = {"prompt_tokens": 3, "completion_tokens": len(ids) if ids else len(content.split()) + 1}
    return {"object": "chat.completion", "model": body["model"], "choices": [choice], "usage": usage}


@dataclass
class FakeChat:
    """What the server does, and what it saw."""

    script: Script = lambda body, _nth: completion(body)
    info: dict[str, Any] | None = None  # /server_info; None = 404, as on a server that is no SGLang
    models: list[dict[str, Any]] = field(default_factory=lambda: [{"id": "tiny"}])
    prompt_text: Callable[[list[int]], str] | None = None  # /detokenize: text of token ids; None = 404
    key: str = ""
    delay_s: float = 0.0
    requests: list[dict[str, Any]] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)
    most_at_once: int = 0
    at_once: int = 0
    peers: set[Any] = field(default_factory=set)  # connections
    lock: Any = field(default_factory=threading.Lock)
    url: str = ""

    def get(self, path: str) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, {"object": "list", "data": self.models}
        if path == "/server_info" and self.info is not None:
            return 200, self.info
        return 404, {"detail": "Not Found"}

    def chat(self, body: dict[str, Any]) -> tuple[int, Any, dict[str, str]]:
        """(status, answer, headers) of one chat request."""
        name = json.dumps(body, sort_keys=True)
        with self.lock:
            nth = self.seen[name]
            self.seen[name] += 1
            self.requests.append(body)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            time.sleep(self.delay_s)
            made = self.script(body, nth)
        finally:
            with self.lock:
                self.at_once -= 1
        return made if isinstance(made, tuple) else (200, made, {})


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fake: FakeChat

    def log_message(self, *_: Any) -> None:
        """Quiet."""

    def _send(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(raw)

    def _known(self) -> bool:
        wanted = f"Bearer {self.fake.key}"
        if self.fake.key and self.headers.get("Authorization") != wanted:
            got = self.headers.get("Authorization")
            self._send(401, {"error": {"message": f"the key in {got!r} is not valid"}})
            return False
        return True

    def do_GET(self) -> None:
        if self._known():
            self._send(*self.fake.get(self.path))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.fake.peers.add(self.client_address)
        if not self._known():
            return
        if self.path == "/detokenize" and self.fake.prompt_text is not None:
            return self._send(200, {"text": self.fake.prompt_text(body["tokens"])})
        if self.path != "/v1/chat/completions":
            return self._send(404, {"detail": "Not Found"})
        status, answer, headers = self.fake.chat(body)
        if answer is RESET:
            self.close_connection = True
            return self.connection.close()
        if answer is HALF:
            return self._send(200, json.dumps(completion(body)).encode()[:-20])
        return self._send(status, answer, headers)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, *_: Any) -> None:
        """A client that went away is no error."""


@contextmanager
def serving(fake: FakeChat, port: int = 0) -> Iterator[FakeChat]:
    """Serve `fake` on loopback; `fake.url` says where."""
    server = _Server(("127.0.0.1", port), type("Handler", (_Handler,), {"fake": fake}))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    fake.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
