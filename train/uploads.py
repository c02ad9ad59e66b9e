"""Copies batches to the GPU while it works on the one before."""

from __future__ import annotations

import torch

from eagle3.ttt import PackedBatch
from train.decoders import Region


class Upload:
    """A batch on its way to the GPU."""

    def __init__(self, batch: PackedBatch, done: torch.cuda.Event) -> None:
        self._batch, self._done = batch, done

    def take(self) -> PackedBatch:
        """The batch on the GPU; work queued from now on waits for it, the caller does not."""
        stream = torch.cuda.current_stream()
        stream.wait_event(self._done)
        batch = self._batch
        for tensor in (batch.features, batch.token_ids, batch.teacher, batch.loss_mask):
            tensor.record_stream(stream)  # its memory is not given to the next upload while this stream uses it
        return batch

    def wait(self) -> None:
        """Stand still until the host's memory has been read."""
        self._done.synchronize()


class Uploads:
    """A stream of copies of its own, from memory locked in place, which the GPU reads by itself.

    Args:
        device: a CUDA device.
        region: the host's memory that batches lie in. Where it cannot be locked, copies are slower, no less right.
    """

    def __init__(self, device: torch.device, region: Region) -> None:
        self.device, self._region, self._stream = device, region, torch.cuda.Stream(device)
        self.locked = int(torch.cuda.cudart().cudaHostRegister(region.address, region.size, 0)) == 0

    def begin(self, batch: PackedBatch) -> Upload:
        """Queue the copies of a batch that is complete."""
        with torch.cuda.stream(self._stream):
            there = PackedBatch(
                features=batch.features.to(self.device, non_blocking=True),
                token_ids=batch.token_ids.to(self.device, non_blocking=True),
                teacher=batch.teacher.to(self.device, non_blocking=True),
                loss_mask=batch.loss_mask.to(self.device, non_blocking=True),
                doc_lengths=batch.doc_lengths,
            )
            return Upload(there, self._stream.record_event())

    def close(self) -> None:
        """Unlock the memory, once all copies are done."""
        self._stream.synchronize()
        if self.locked:
            torch.cuda.cudart().cudaHostUnregister(self._region.address)
