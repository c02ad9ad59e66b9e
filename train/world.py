"""The group of training processes: joining it, leaving it, and adding numbers up over it."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

RENDEZVOUS = "REDRAFT_RENDEZVOUS"  # the file in which the processes of one machine meet
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # set by torchrun and its like


@dataclass(frozen=True)
class World:
    """This process's place: `rank` of `size`, working on `device`."""

    rank: int
    size: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this process writes the shared files and talks to the user."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Sum of a CPU or device tensor over all processes, on the CPU."""
        on_device = values.to(self.device, copy=True)
        torch.distributed.all_reduce(on_device)
        return on_device.cpu()

    def least(self, value: int) -> int:
        """The smallest of all processes' values."""
        on_device = torch.tensor([value], dtype=torch.int64, device=self.device)
        torch.distributed.all_reduce(on_device, op=torch.distributed.ReduceOp.MIN)
        return int(on_device.item())

    def barrier(self) -> None:
        """Wait for all processes."""
        torch.distributed.barrier()

    def broadcast(self, value: Any) -> Any:
        """Rank 0's JSON-able value, given to all."""
        box = [value]
        torch.distributed.broadcast_object_list(box, src=0, device=self.device)
        return box[0]


def launched() -> bool:
    """Whether an outer launcher (torchrun, deepspeed, srun with the same variables) started this process."""
    return all(name in os.environ for name in LAUNCHED)


def free_port() -> int:
    """A TCP port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the duration of the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def choose_accelerator() -> None:
    """Tell DeepSpeed that there is no GPU, before anything imports it: else it warns that it found none."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def import_deepspeed() -> ModuleType:
    """Import DeepSpeed for the accelerator at hand, quietly and without its slow first-run build.

    On a CPU, joining a process group makes DeepSpeed compile `deepspeed_shm_comm` with g++ (minutes, once a
    machine). That operator serves one call only, `inference_all_reduce`, which training never makes, and DeepSpeed
    falls back to gloo when its table of compatible operators says no. The table is made on first use, by trial
    compilations; an empty one put there first says no to all operators, and training on a CPU needs none.
    """
    choose_accelerator()
    import deepspeed
    import deepspeed.ops

    deepspeed.utils.logger.setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\..*")  # DeepSpeed's calls
    if not torch.cuda.is_available():
        vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False
    return deepspeed


@contextlib.contextmanager
def joined() -> Iterator[World]:
    """Join the process group an outer launcher describes, or make one of this process alone; leave it at the end.

    Inside another `joined` it is that one's group, which stays. A group of this machine alone meets in memory or in a
    file, and its sockets are on the loopback interface: no other machine can speak to it.
    """
    if torch.distributed.is_initialized():
        yield _world()
        return
    outside = launched() and RENDEZVOUS not in os.environ
    with environment({} if outside else {**_here(), **({} if launched() else ALONE)}):
        deepspeed = import_deepspeed()
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        if not outside:
            place, rank, size = os.environ.get(RENDEZVOUS), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            store = torch.distributed.FileStore(place, size) if place else torch.distributed.HashStore()
            torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=size)
        deepspeed.init_distributed(backend, verbose=False)  # which takes the group that is there
        try:
            yield _world()
        finally:
            deepspeed.comm.destroy_process_group()


def _here() -> dict[str, str]:
    """Names the loopback interface to the libraries that open sockets, unless the user has named one."""
    loopback = "lo" if any(name == "lo" for _, name in socket.if_nameindex()) else ""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {name: loopback for name in names if loopback and name not in os.environ}


def _world() -> World:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    return World(torch.distributed.get_rank(), torch.distributed.get_world_size(), device)
