"""Entry: `python sglang_worker <parent-pid> <reply-fd> <states-fd> <states-fd>`; a job on stdin, then the batches.

A job and each batch are one JSON line. Replies are JSON lines on `reply-fd`; the states of a batch lie as safetensors
in the file that its `slot` (0 or 1) names, so that the parent reads one while the next is written; stdout and stderr
are the log. Ends when stdin ends, and never outlives the parent: the kernel kills it, and each rank with it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import threading
import traceback
from multiprocessing import connection
from typing import Any

import torch
import worker_rank

# For each purpose the spellings that builds know, the first known one is taken; `True` = refuse a build with none.
# Graphs would hide the hooks; fused all-reduces leave partial sums in the residual stream (sglang#28343).
FLAGS: tuple[tuple[bool, tuple[tuple[str, ...], ...]], ...] = (
    (
        True,
        (("--cuda-graph-backend-decode=disabled", "--cuda-graph-backend-prefill=disabled"), ("--disable-cuda-graph",)),
    ),
    (False, (("--disable-piecewise-cuda-graph",),)),
    (True, (("--disable-radix-cache",),)),
    (True, (("--chunked-prefill-size=-1",),)),
    (True, (("--disable-overlap-schedule",),)),
    (False, (("--enforce-disable-flashinfer-allreduce-fusion",),)),
    (False, (("--disable-aiter-allreduce-fusion-in-prefill",),)),
    (False, (("--skip-tokenizer-init",),)),
)


def server_arguments(job: dict[str, Any], bench: Any) -> Any:
    """The engine's arguments: ours, those of the job, then those that the user adds."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    bench.ServerArgs.add_cli_args(parser)
    known = parser._option_string_actions
    argv = [f"--model-path={job['model']}", f"--tp-size={job['tp']}", f"--dtype={job['dtype']}", "--log-level=warning"]
    for required, spellings in FLAGS:
        usable = next((s for s in spellings if all(flag.split("=")[0] in known for flag in s)), ())
        if required and not usable:
            raise ValueError(f"this build knows none of the flags {spellings}")
        argv += usable
    if job["trust_remote_code"]:
        argv.append("--trust-remote-code")
    if job["mem_fraction"]:
        argv.append(f"--mem-fraction-static={job['mem_fraction']}")
    arguments = bench.ServerArgs.from_cli_args(parser.parse_args(argv + job["extra_args"]))
    if hasattr(arguments, "resolve_once"):  # newer builds settle defaults in a step of its own
        arguments.resolve_once()
    return arguments


def start_followers(job: dict[str, Any], bench: Any, arguments: Any, ports: Any) -> tuple[dict[int, Any], list[Any]]:
    """Start ranks 1 to tp-1. Returns their pipes by rank, and the processes."""
    spawn = multiprocessing.get_context("spawn")
    pipes, processes = {}, []
    for rank in range(1, job["tp"]):
        pipes[rank], theirs = spawn.Pipe()
        with bench.maybe_reindex_device_id(rank) as gpu:
            process = spawn.Process(
                target=worker_rank.follow, args=(os.getpid(), job, arguments, ports, gpu, rank, theirs)
            )
            process.start()
        theirs.close()
        processes.append(process)
    return pipes, processes


def watch(processes: list[Any], leader: worker_rank.Leader) -> None:
    """End this rank when another one dies: it would wait in a collective forever."""
    if processes:
        first = connection.wait([process.sentinel for process in processes])[0]
        if not leader.closing:
            rank = 1 + next(i for i, process in enumerate(processes) if process.sentinel == first)
            processes[rank - 1].join()
            leader.say("error", kind="rank", why=f"rank {rank} died with exit code {processes[rank - 1].exitcode}")
            os._exit(1)


def work(job: dict[str, Any], reply: Any, states_fds: list[int]) -> None:
    """Set the engine up and serve until stdin ends."""
    bench = worker_rank.benchmark()
    arguments = server_arguments(job, bench)
    bench._set_envs_and_config(arguments)
    ports = bench.PortArgs.init_new(arguments)
    pipes, processes = start_followers(job, bench, arguments, ports)
    leader = worker_rank.Leader(reply, states_fds, pipes)
    threading.Thread(target=watch, args=(processes, leader), daemon=True).start()
    with bench.maybe_reindex_device_id(0) as gpu:
        worker_rank.run_rank(job, arguments, ports, gpu, 0, leader)


def main() -> int:
    """Serve; a failure becomes one reply line and exit code 1, its traceback goes to the log."""
    worker_rank.die_with(int(sys.argv[1]))
    reply = os.fdopen(int(sys.argv[2]), "w")
    try:
        work(json.loads(sys.stdin.readline()), reply, [int(fd) for fd in sys.argv[3:5]])
    except torch.OutOfMemoryError as err:
        _fail(reply, "memory", err)
        raise
    except Exception as err:
        _fail(reply, "engine", err)
        raise
    return 0


def _fail(reply: Any, kind: str, err: Exception) -> None:
    lines = str(err).strip().splitlines() or [""]
    reply.write(json.dumps({"event": "error", "kind": kind, "why": f"{type(err).__name__}: {lines[0]}"}) + "\n")
    reply.flush()


if __name__ == "__main__":
    try:
        code = main()
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the engine's threads would keep the process, and so would ranks that wait for this one
