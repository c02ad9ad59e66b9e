"""A server that speaks SGLang's HTTP, without a model: its answers follow from the prompt, its faults from `--fault`.

It is started by the adapter's own launch path, takes the flags that the real one takes, and answers `/health`,
`/server_info`, `/generate` and, for the tests, `/seen`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

EOS = 2


def kept_in(verify: int, steps: int) -> int:
    """Proposals kept by the n-th verify: 0, 1, ..., steps, 0, 1, ..."""
    return verify % (steps + 1)


def answer(prompt: list[int], most: int, steps: int, style: str = "new") -> dict[str, Any]:
    """The text for `prompt`: 10, 11, 12, ... from its prefill and verifies; a first id of 7 ends it at place 7."""
    end = 7 if prompt[0] == 7 else None
    tokens, histogram, verifies = [10], [0] * (steps + 1), 0
    while len(tokens) < most and (end is None or len(tokens) <= end):
        kept = kept_in(verifies, steps)
        histogram[kept] += 1
        verifies += 1
        tokens += range(10 + len(tokens), 10 + len(tokens) + kept + 1)
    tokens = tokens[:most]
    reason: dict[str, Any] = {"type": "length", "length": most}
    if end is not None and end < len(tokens):
        tokens = [*tokens[:end], EOS]
        reason = {"type": "stop", "matched": EOS}
    meta: dict[str, Any] = {"finish_reason": reason, "completion_tokens": len(tokens), "prompt_tokens": len(prompt)}
    correct = sum(c * n for c, n in enumerate(histogram))
    names = {
        "new": ("spec_num_correct_drafts", "spec_num_proposed_drafts", "spec_correct_drafts_histogram"),
        "old": ("spec_accept_token_num", "spec_draft_token_num", "spec_accept_histogram"),
    }[style]
    if steps and verifies:
        meta |= {
            "spec_verify_ct": verifies,
            names[0]: correct,
            names[1]: verifies * steps,
            names[2]: histogram,
            "spec_accept_length": len(tokens) / verifies,
        }
    return {"text": "", "output_ids": tokens, "meta_info": meta}


class State:
    """What the server has seen so far."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.asked = self.in_flight = self.most_in_flight = 0
        self.bodies: list[Any] = []


class Handler(BaseHTTPRequestHandler):
    """The server's paths; `args` and `state` are set on the class before it serves."""

    args: argparse.Namespace
    state: State

    def do_GET(self) -> None:
        if self.path == "/health":
            self.reply(503 if self.args.fault == "never_ready" else 200, b"")
        elif self.path == self.args.info_path:
            self.reply(200, json.dumps(info(self.args)).encode())
        elif self.path == "/seen":
            seen = {name: getattr(self.state, name) for name in ("asked", "most_in_flight", "bodies")}
            self.reply(200, json.dumps(seen).encode())
        else:
            self.reply(404, b"not here")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with self.state.lock:
            self.state.asked += 1
            number = self.state.asked
            self.state.bodies.append(body)
            self.state.in_flight += 1
            self.state.most_in_flight = max(self.state.most_in_flight, self.state.in_flight)
        try:
            time.sleep(self.args.delay)
            self.reply(*self.outcome(body, number))
        finally:
            with self.state.lock:
                self.state.in_flight -= 1

    def outcome(self, body: Any, number: int) -> tuple[int, bytes]:
        """Status and body of the n-th `/generate`."""
        fault = self.args.fault
        if fault == "error_twice" and number <= 2:
            return 500, json.dumps({"error": {"message": "the scheduler is asleep"}}).encode()
        if fault == "refuses":
            return 400, json.dumps({"error": {"message": "the prompt is longer than 8"}}).encode()
        if fault == "hangs":
            time.sleep(3600)
        if fault == "dies_in_the_middle" and number > 3:
            print("[2030-01-01 00:00:00 TP0] Scheduler hit an exception: Traceback (most recent call last):")
            print("RuntimeError: the device fell off the bus", flush=True)
            os._exit(9)
        steps = self.args.speculative_num_steps or 0
        made = answer(body["input_ids"], body["sampling_params"]["max_new_tokens"], steps, self.args.style)
        if fault == "wrong_counts":
            made["meta_info"]["spec_num_correct_drafts"] += 1
        if fault == "no_counts":
            made["meta_info"] = {k: v for k, v in made["meta_info"].items() if not k.startswith("spec_")}
        text = json.dumps(made).encode()
        return 200, text[: len(text) // 2] if fault == "half_json" else text

    def reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nothing."""


def info(args: argparse.Namespace) -> dict[str, Any]:
    out = {key: value for key, value in vars(args).items() if key not in ("fault", "children", "style", "info_path")}
    if args.fault == "other_values":
        out["speculative_num_draft_tokens"] = 2
    return {**out, "version": args.version, "internal_states": [{"effective_max_running_requests_per_dp": 4}]}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name in ("--fault", "--children", "--model-path", "--host", "--dtype", "--speculative-algorithm"):
        parser.add_argument(name)
    parser.add_argument("--speculative-draft-model-path")
    parser.add_argument("--version", default="0.5.23")
    parser.add_argument("--style", default="new")
    parser.add_argument("--info-path", default="/server_info")
    parser.add_argument("--delay", type=float, default=0.0)
    for name in ("--port", "--tp-size", "--speculative-num-steps", "--speculative-eagle-topk"):
        parser.add_argument(name, type=int)
    parser.add_argument("--speculative-num-draft-tokens", type=int)
    parser.add_argument("--disable-radix-cache", action="store_true")
    parser.add_argument("--trust-remote-code", action="store_true")
    return parser.parse_args()


def start_children(pids: str) -> None:
    """A child that shrugs off SIGTERM, and one in a session of its own; their ids are written to `pids`."""
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(3600)"
    one = subprocess.Popen([sys.executable, "-c", stubborn])
    two = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
    with open(f"{pids}.tmp", "w") as handle:
        handle.write(f"{os.getpid()} {one.pid} {two.pid}")
    os.replace(f"{pids}.tmp", pids)


def main() -> None:
    args = parse()
    if args.children:
        start_children(args.children)
    if args.fault == "dies_at_start":
        print("[2030-01-01 00:00:00] loading weights", flush=True)
        raise RuntimeError("not enough memory on device 0")
    Handler.args, Handler.state = args, State()
    server = ThreadingHTTPServer((args.host, args.port), Handler)
    server.daemon_threads = True
    server.serve_forever()


if __name__ == "__main__":
    main()
