"""Copy the real rows of padded states out of the device that computes them, beside what it goes on computing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

Streams: TypeAlias = dict[torch.device, torch.cuda.Stream]


class RowCopies:
    """The copies of one batch.

    On a GPU the rows are gathered in the order of its work, then leave through a stream of their own into pinned
    memory, so that neither the layers that follow nor the next batch waits for them. Nothing here makes the host wait.

    Args:
        lengths: tokens of each record; states are [B, L, H], L the largest of them, with padding on the right.
        dtype: of the copies on the host.
        streams: of each device, for copying; made when needed, and kept from batch to batch.
    """

    def __init__(self, lengths: list[int], dtype: torch.dtype, streams: Streams) -> None:
        self.lengths, self.dtype, self.streams = lengths, dtype, streams
        self._longest = max(lengths)
        self._indices: dict[torch.device, torch.Tensor] = {}

    def rows(self, state: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The rows that are no padding, [N, H] on the state's device, record by record: a copy in `dtype`."""
        if min(self.lengths) == self._longest:
            return state.reshape(-1, state.shape[-1]).to(dtype, copy=True)
        if state.device.type != "cpu":
            return state.reshape(-1, state.shape[-1]).index_select(0, self._index(state.device)).to(dtype)
        out = torch.empty(sum(self.lengths), state.shape[-1], dtype=dtype)
        for part, padded, length in zip(out.split(self.lengths), state, self.lengths, strict=True):
            part.copy_(padded[:length])  # gathers and converts in one pass
        return out

    def to_host(self, state: torch.Tensor) -> torch.Tensor:
        """The same on the CPU, in `dtype`; from a GPU it is there once the function of `wait_for` returned."""
        rows = self.rows(state, self.dtype)
        if rows.device.type == "cpu":
            return rows
        if rows.device not in self.streams:
            self.streams[rows.device] = torch.cuda.Stream(rows.device)
        stream = self.streams[rows.device]
        stream.wait_stream(torch.cuda.current_stream(rows.device))
        host = torch.empty(rows.shape, dtype=self.dtype, pin_memory=True)
        with torch.cuda.stream(stream):
            host.copy_(rows, non_blocking=True)
        rows.record_stream(stream)  # else its memory would be given away while it is read
        return host

    def wait_for(self) -> Callable[[], None]:
        """What waits for the copies asked for so far."""
        events = [stream.record_event() for stream in self.streams.values()]

        def wait() -> None:
            for event in events:
                event.synchronize()

        return wait

    def _index(self, device: torch.device) -> torch.Tensor:
        """[N] places of the real rows among the B * L; worked out on the host, for a mask would make it wait."""
        if device not in self._indices:
            places = [row * self._longest + torch.arange(length) for row, length in enumerate(self.lengths)]
            self._indices[device] = torch.cat(places).to(device, non_blocking=True)
        return self._indices[device]
