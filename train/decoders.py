"""Who reads and decodes stored states: this process, or worker processes that write into memory shared with it.

Workers are processes, not threads, so that none of them takes Python's lock while the training loop launches kernels,
and each keeps to one thread of its own. They are started by executing a program anew, never by forking this one, whose
threads and CUDA context a fork would tear.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from eagle3.errors import RedraftError
from eagle3.shard_file import RecordPlace
from eagle3.state_read import Spent, StateReader, Want
from train.telling import error_of


class Region:
    """Memory that this process and its workers share, from byte `address` on. A page takes memory once it is written.

    Args:
        size: bytes.
        shared: with worker processes, through the file `file`; else the memory is this process's alone, and no file,
            for which limits on file sizes would count.
    """

    def __init__(self, size: int, shared: bool = True) -> None:
        self.size = -(-max(size, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        self.file = os.memfd_create("redraft-batches", os.MFD_CLOEXEC) if shared else -1
        if shared:
            os.ftruncate(self.file, self.size)
        self._map = mmap.mmap(self.file, self.size)
        self.address = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr()

    def tensor(self, at: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """A tensor that begins at byte `at`; to autograd it is none of the region's others, which are overwritten."""
        return torch.frombuffer(self._map, dtype=dtype, count=shape[0] * shape[1], offset=at).view(shape)

    def at(self, tensor: Tensor) -> int:
        """Byte at which a tensor in the region begins."""
        return tensor.data_ptr() - self.address

    def close(self) -> None:
        """Let go; the memory is freed once no tensor is in it."""
        if self.file >= 0:
            os.close(self.file)
        del self._map


class Decoders:
    """Reads states into the region, with `count` worker processes, or in the calling thread when it is 0.

    `read` may be called by as many threads at a time as there are workers (by one when there are none).

    Args:
        count: workers.
        region: where the rows asked for lie.
        forget: drop what was read from the page cache.
    """

    def __init__(self, count: int, region: Region, forget: bool) -> None:
        self.count, self.spent, self._lock = count, Spent(), threading.Lock()
        self._reader = StateReader(forget)
        self._workers = [_Worker(region, forget) for _ in range(count)]
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)

    @property
    def processes(self) -> list[int]:
        """The workers' process ids."""
        return [worker.process.pid for worker in self._workers]

    def read(self, place: RecordPlace, wants: Sequence[Want]) -> None:
        """Read states of one record, all of whose bytes are compared with its checksum.

        Raises:
            IntegrityError: a file cannot be read or is damaged; the text is the same wherever it was found.
            RedraftError: a worker died.
        """
        if not self.count:
            self._reader.read(place, wants)
            self.spent = self._reader.spent
            return
        worker = self._idle.get()
        try:
            spent = worker.ask(place, wants)
        finally:
            self._idle.put(worker)
        with self._lock:
            self.spent.add(spent)

    def end_workers(self) -> None:
        """End the workers at once; a `read` that still waits for one raises."""
        for worker in self._workers:
            worker.end()

    def close(self) -> None:
        """End the workers and close the files, once nothing reads any more."""
        self.end_workers()
        for worker in self._workers:
            worker.close()
        self._reader.close()


class _Worker:
    """One worker process."""

    def __init__(self, region: Region, forget: bool) -> None:
        self.region = region
        command = [sys.executable, "-m", "train.decode_worker", str(region.file), str(region.size)]
        self.process = subprocess.Popen(
            [*command, *(["--forget"] if forget else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(region.file,),
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        )

    def ask(self, place: RecordPlace, wants: Sequence[Want]) -> Spent:
        """Have it read; one thread at a time."""
        line = json.dumps({"place": asdict(place), "wants": [self._told(*want) for want in wants]}) + "\n"
        assert self.process.stdin and self.process.stdout
        try:
            self.process.stdin.write(line.encode())
            self.process.stdin.flush()
            reply = self.process.stdout.readline()
        except (OSError, ValueError):  # its end of the pipe is gone
            reply = b""
        if not reply.endswith(b"\n"):
            raise self._died(place)
        told: dict[str, Any] = json.loads(reply)
        if "kind" in told:
            raise error_of(told)
        return Spent(**told["spent"])

    def _told(self, name: str, out: Tensor, first: int) -> list[Any]:
        return [name, [*out.shape, out.stride(0)], self.region.at(out), first]

    def _died(self, place: RecordPlace) -> RedraftError:
        code = self.process.wait()
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return RedraftError(
            "a loader worker ended early",
            where=f"{place.path}, record {place.record}",
            why=f"{how}; SIGKILL often means that memory ran out",
            mend="run the same command again to go on from the newest checkpoint, with train.loader_workers or "
            "train.prefetch_mib lowered if memory was short",
        )

    def end(self) -> None:
        """Kill it: all it does is write to memory that nobody will read."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """Close the pipes."""
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):  # what was not sent yet has no reader
                if pipe:
                    pipe.close()
