"""One tensor-parallel rank: lets SGLang set itself up, then captures batch after batch.

SGLang's own single-batch benchmark is the seam. In every build read (0.5.6 to 0.5.23) it sets a rank up, loads the
model, and runs one prefill over given requests without a scheduler: so no radix cache, no chunked prefill and no
overlap exist to cut or mix states. This module takes over where the benchmark would have started to measure.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from worker_states import Sender
from worker_taps import Decoder, Taps, disagreement, probe

PR_SET_PDEATHSIG = 1
BENCHMARKS = ("sglang.benchmark.one_batch", "sglang.bench_one_batch")


class Channel(Protocol):
    """How a rank hears commands and answers."""

    def ready(self, facts: dict[str, Any]) -> None: ...
    def commands(self) -> Iterator[dict[str, Any]]: ...
    def answer(self, command: dict[str, Any], capture: RankCapture, batch: Captured) -> None: ...


class Finished(Exception):
    """The last command was served; unwinds the engine's benchmark, whose measuring part is never reached."""


def benchmark() -> Any:
    """SGLang's single-batch benchmark module.

    Raises:
        ImportError: this build has it under neither known name, or it cannot be imported.
    """
    missing = ""
    for name in BENCHMARKS:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as err:
            if err.name is None or not name.startswith(err.name):
                raise
            missing = str(err)
    raise ImportError(f"this SGLang has no single-batch benchmark to run the model with ({missing})")


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the one that started it dies."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def follow(parent: int, job: dict[str, Any], arguments: Any, ports: Any, gpu: int, rank: int, pipe: Any) -> None:
    """Main function of a rank other than 0."""
    die_with(parent)
    run_rank(job, arguments, ports, gpu, rank, Follower(pipe))
    os._exit(0)


def run_rank(job: dict[str, Any], server_args: Any, port_args: Any, gpu_id: int, rank: int, channel: Channel) -> None:
    """Set up rank `rank`, load the model, serve `channel` until it closes."""
    bench = benchmark()
    load = bench.load_model

    def take_over(*args: Any) -> None:
        runner, _tokenizer = load(*args)
        _serve(RankCapture(job, bench, runner), channel)
        raise Finished

    bench.get_tokenizer = lambda *_args, **_kwargs: None  # tokens come as ids
    bench.load_model = take_over
    sizes = SimpleNamespace(batch_size=(1,), input_len=(1,), output_len=(1,))  # never used: the take-over comes first
    with contextlib.suppress(Finished):
        bench.latency_test(server_args, port_args, sizes, gpu_id, rank)


def _serve(capture: RankCapture, channel: Channel) -> None:
    channel.ready(capture.facts())
    for command in channel.commands():
        channel.answer(command, capture, capture.run(command))


class Captured:
    """One batch on one rank: the taps' states and what the engine says about its requests."""

    def __init__(self, taps: Taps, keys: list[str], rows: list[int]) -> None:
        if taps.aux is None or taps.teacher_state is None or taps.tokens is None:
            raise ValueError("the forward pass returned no hidden states: is a CUDA graph or another runner in use?")
        self.taps, self.keys, self.rows = taps, keys, rows
        self.aux, self.teacher = taps.aux, taps.teacher_state

    def probe(self) -> dict[str, Any]:
        """A sample of the states, for the ranks to compare."""
        return probe({"aux": self.aux, "teacher": self.teacher})

    def tensors(self) -> dict[str, torch.Tensor]:
        """Tokens, states and, where measured, sites; where they were computed."""
        tensors = {"tokens": self.taps.tokens, "aux": self.aux, "teacher": self.teacher}
        return {**tensors, **{f"site.{name}": state for name, state in self.taps.sites.items()}}


class RankCapture:
    """The loaded model on this rank, with the aux layers set."""

    def __init__(self, job: dict[str, Any], bench: Any, runner: Any) -> None:
        self.job, self.bench, self.runner = job, bench, runner
        self.engine = getattr(runner, "torch_runner", runner)  # newer builds wrap the model runner
        model = self.engine.model
        if not hasattr(model, "set_eagle3_layers_to_capture"):
            raise ValueError(f"{type(model).__name__} of this build cannot feed an EAGLE-3 draft: it has no setter")
        self.decoder = Decoder(model, job["num_layers"])
        model.set_eagle3_layers_to_capture(list(job["ids"]))
        info = importlib.import_module("sglang.srt.model_executor.forward_batch_info")
        self.full = info.CaptureHiddenMode.FULL

    def facts(self) -> dict[str, Any]:
        """What the parent plans with: versions, dtype, and how much fits in one forward pass."""
        return {
            "version": importlib.import_module("sglang").__version__,
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "model": type(self.engine.model).__name__,
            "dtype": str(self.engine.dtype).removeprefix("torch."),
            "max_tokens": int(self.engine.max_total_num_tokens),
            "max_requests": int(self.engine.req_to_token_pool.size),
            "max_length": int(self.engine.model_config.context_len),
        }

    def run(self, command: dict[str, Any]) -> Captured:
        """One prefill over `command["ids"]`, request by request, keyed by `command["keys"]`."""
        requests = self.bench.prepare_synthetic_inputs_for_latency_test(len(command["ids"]), 0, command["ids"])
        for request, key in zip(requests, command["keys"], strict=True):
            request.rid = key
            request.return_hidden_states = True
            if hasattr(request, "return_hidden_states_mode"):
                request.return_hidden_states_mode = self.full
        taps = Taps(self.decoder, self.job["teacher"], command.get("measure", 0))
        with torch.no_grad(), taps:
            batch = self._extend(requests)[2]
        captured = Captured(taps, [str(r.rid) for r in batch.reqs], [int(n) for n in batch.extend_lens])
        self.engine.req_to_token_pool.clear()
        self.engine.token_to_kv_pool_allocator.clear()
        return captured

    def _extend(self, requests: list[Any]) -> Any:
        if self.runner is self.engine:
            return self.bench.extend(requests, self.runner)
        return self.runner.extend(requests)


class Follower:
    """A rank other than 0: hears rank 0's commands and sends it a sample of its states."""

    def __init__(self, pipe: Any) -> None:
        self.pipe = pipe

    def ready(self, facts: dict[str, Any]) -> None:
        """Tell rank 0 that this rank is up."""
        self._send(facts)

    def commands(self) -> Iterator[dict[str, Any]]:
        """Commands until rank 0 says stop or is gone."""
        while True:
            try:
                command = json.loads(self.pipe.recv_bytes())
            except EOFError:
                return
            if command["op"] == "stop":
                return
            yield command

    def answer(self, command: dict[str, Any], capture: RankCapture, batch: Captured) -> None:
        """Send the sample."""
        self._send(batch.probe())

    def _send(self, value: dict[str, Any]) -> None:
        self.pipe.send_bytes(json.dumps(value).encode())


class Leader:
    """Rank 0: hears the parent, passes commands on, compares the ranks and has the states sent."""

    def __init__(self, reply: Any, states_fds: list[int], followers: dict[int, Any]) -> None:
        self.reply, self.states_fds, self.followers = reply, states_fds, followers
        self.closing = False  # from here on the other ranks may end
        self._sender = Sender(self._fail)

    def say(self, event: str, **facts: Any) -> None:
        """One line to the parent."""
        self.reply.write(json.dumps({"event": event, **facts}) + "\n")
        self.reply.flush()

    def _fail(self, err: BaseException) -> None:
        """The states could not be sent: the parent waits for them, and the main thread for its next command."""
        traceback.print_exception(err)
        sys.stderr.flush()
        kind = "memory" if isinstance(err, torch.OutOfMemoryError) else "engine"
        self.say("error", kind=kind, why=f"{type(err).__name__}: {str(err).splitlines()[0] if str(err) else ''}")
        os._exit(1)

    def ready(self, facts: dict[str, Any]) -> None:
        """Wait for the other ranks, then tell the parent."""
        others = self._hear()
        limits = ("max_tokens", "max_requests")
        for one in others.values():
            facts.update({name: min(facts[name], one[name]) for name in limits})
        self.say("ready", **facts)

    def commands(self) -> Iterator[dict[str, Any]]:
        """Commands until the parent closes its end."""
        for line in sys.stdin:
            command = json.loads(line)
            self._tell(command)
            yield command
        self._sender.settle()
        self.closing = True
        self._tell({"op": "stop"})

    def answer(self, command: dict[str, Any], capture: RankCapture, batch: Captured) -> None:
        """Compare the ranks' samples, and have the states sent to the parent while the next command is served."""
        mine = batch.probe()
        ranks = {str(rank): disagreement(mine, other) for rank, other in self._hear().items()}
        records = [{"key": key, "rows": rows} for key, rows in zip(batch.keys, batch.rows, strict=True)]
        tell = partial(self.say, "batch", batch=command["batch"], records=records, ranks=ranks)
        self._sender.send(self.states_fds[command["slot"]], batch.tensors(), tell)

    def _tell(self, command: dict[str, Any]) -> None:
        for pipe in self.followers.values():
            pipe.send_bytes(json.dumps(command).encode())

    def _hear(self) -> dict[int, dict[str, Any]]:
        return {rank: json.loads(pipe.recv_bytes()) for rank, pipe in self.followers.items()}
