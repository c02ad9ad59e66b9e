"""States on their way to the parent: one safetensors file in shared memory, filled beside the next forward pass."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate, pairwise

import torch

CODES = {
    torch.int64: "I64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
}


def write_states(fd: int, tensors: dict[str, torch.Tensor]) -> None:
    """Make file `fd` a safetensors file of these tensors, copied straight from where they are.

    A file in memory keeps its pages from batch to batch, so that only the first of each size has to be given any.

    Args:
        fd: a file that can be mapped; its old content is lost.
        tensors: on any device; a tensor is copied once.
    """
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))  # so that each is aligned
    ends = list(accumulate((tensor.nbytes for tensor in tensors.values()), initial=0))
    spans = dict(zip(tensors, pairwise(ends), strict=True))
    told = {
        name: {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": spans[name]}
        for name, tensor in tensors.items()
    }
    text = json.dumps(told, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    first, size = 8 + len(text), 8 + len(text) + ends[-1]
    os.ftruncate(fd, size)
    memory = mmap.mmap(fd, size)
    memory[:first] = len(text).to_bytes(8, "little") + text
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    for name, tensor in tensors.items():
        begin, end = spans[name]
        if end > begin:
            whole[first + begin : first + end].view(tensor.dtype).view(tensor.shape).copy_(tensor)


class Sender:
    """One thread that writes a batch's states and tells of them, while the engine computes the next batch.

    Args:
        failed: called in that thread with what went wrong, the last thing that happens in this process.
    """

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        self._failed = failed
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="states")
        self._under_way: Future[None] | None = None
        self._stream: torch.cuda.Stream | None = None

    def send(self, fd: int, tensors: dict[str, torch.Tensor], tell: Callable[[], None]) -> None:
        """Write the states into `fd` and then `tell`; waits for the batch before, so that two are held at most."""
        self.settle()
        device = next((t.device for t in tensors.values() if t.device.type == "cuda"), None)
        ready = torch.cuda.current_stream(device).record_event() if device is not None else None
        self._under_way = self._pool.submit(self._send, fd, tensors, tell, device, ready)

    def settle(self) -> None:
        """Wait for what is under way."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def _send(
        self,
        fd: int,
        tensors: dict[str, torch.Tensor],
        tell: Callable[[], None],
        device: torch.device | None,
        ready: torch.cuda.Event | None,
    ) -> None:
        try:
            if device is None or ready is None:
                write_states(fd, tensors)
            else:
                self._stream = self._stream or torch.cuda.Stream(device)
                with torch.cuda.stream(self._stream):  # not behind what the engine has been given meanwhile
                    self._stream.wait_event(ready)
                    write_states(fd, tensors)
            tell()
        except BaseException as err:
            self._failed(err)
            raise
