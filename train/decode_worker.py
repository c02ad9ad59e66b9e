"""One worker of the loader: `python -m train.decode_worker FD BYTES [--forget]`, started by `train.decoders`.

Reads stored states into memory that it shares with the training process (`FD`, an anonymous file of `BYTES`). A line
of JSON on stdin asks for the states of one record, a line on stdout answers. It ends when stdin does, so with the
training process, however that ends; signals meant for a whole process group are left to the training process.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import sys
from typing import Any

import torch
from torch import Tensor

from eagle3.errors import RedraftError
from eagle3.shard_file import RecordPlace, Spans
from eagle3.state_read import Spent, StateReader
from train.telling import parts_of


def main(arguments: list[str]) -> int:
    """Answer until stdin ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a library prints is no answer
    region = torch.frombuffer(mmap.mmap(int(arguments[0]), int(arguments[1])), dtype=torch.uint8)
    reader = StateReader(forget="--forget" in arguments)
    for line in sys.stdin.buffer:
        print(json.dumps(answer(reader, region, json.loads(line))), file=answers, flush=True)
    return 0


def answer(reader: StateReader, region: Tensor, asked: dict[str, Any]) -> dict[str, Any]:
    """Read what is asked for; what was spent, or the error as its parts."""
    reader.spent = Spent()
    told = asked["place"]
    states = {name: _spans(spans) for name, spans in told.pop("states").items()}
    place = RecordPlace(states=states, tail=_spans(told.pop("tail")), **told)
    dtype = getattr(torch, place.dtype)
    wants = [(name, rows_in(region, dtype, rows, at), first) for name, rows, at, first in asked["wants"]]
    try:
        reader.read(place, wants)
    except RedraftError as err:
        return parts_of(err)
    return {"spent": vars(reader.spent)}


def _spans(told: list[list[int]]) -> Spans:
    return tuple((begin, end) for begin, end in told)


def rows_in(region: Tensor, dtype: torch.dtype, shape: list[int], at: int) -> Tensor:
    """Rows [R, H] of `dtype` in shared memory: `shape` is R, H and the numbers from a row to the next, `at` a byte."""
    rows, width, stride = shape
    return region.view(dtype).as_strided((rows, width), (stride, 1), at // dtype.itemsize)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
