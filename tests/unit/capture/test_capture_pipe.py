"""States that the SGLang worker writes while it computes the next batch."""

from __future__ import annotations

import os
import threading
from itertools import pairwise
from pathlib import Path

import pytest
import test_capture_sglang as common
import torch
from safetensors.torch import load_file, save

from data_prep.capture.sglang_worker.worker_states import Sender, write_states


def test_a_file_in_memory_holds_what_safetensors_would_write() -> None:
    fd = os.memfd_create("test")
    gen = torch.Generator().manual_seed(0)
    for rows in (5, 9, 2, 0):  # larger, smaller, nothing
        tensors = {
            "tokens": torch.arange(rows),
            "aux": torch.randn(rows, 21, generator=gen).bfloat16(),
            "teacher": torch.randn(rows, 7, generator=gen),
            "site.layer_1": torch.randn(7, rows, generator=gen).half().T,  # not contiguous
        }
        write_states(fd, tensors)
        found = load_file(f"/proc/self/fd/{fd}")
        assert list(map(str, sorted(found))) == sorted(tensors)
        for name, tensor in tensors.items():
            assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
        plain = save({name: tensor.contiguous() for name, tensor in tensors.items()})
        assert os.fstat(fd).st_size <= len(plain) + 64
    os.close(fd)


def test_a_sender_tells_once_the_states_are_there_and_holds_two_batches_at_most() -> None:
    fds = [os.memfd_create(f"test{slot}") for slot in range(2)]
    gate, told = threading.Event(), []
    sender = Sender(lambda err: pytest.fail(str(err)))

    def tell() -> None:
        assert gate.wait(30)
        told.append(load_file(f"/proc/self/fd/{fds[0]}")["aux"])

    states = torch.ones(3, 2)
    sender.send(fds[0], {"aux": states}, tell)
    second = threading.Thread(target=lambda: sender.send(fds[1], {"aux": 2 * states}, lambda: None))
    second.start()
    second.join(0.1)
    assert second.is_alive() and not told  # the batch before is still on its way
    gate.set()
    second.join(30)
    sender.settle()
    assert torch.equal(told[0], states) and torch.equal(load_file(f"/proc/self/fd/{fds[1]}")["aux"], 2 * states)
    for fd in fds:
        os.close(fd)


def test_a_sender_that_cannot_write_says_so() -> None:
    failed: list[BaseException] = []
    sender = Sender(failed.append)
    sender.send(-1, {"aux": torch.ones(2, 2)}, lambda: pytest.fail("told"))
    with pytest.raises(OSError, match="Bad file descriptor"):
        sender.settle()
    assert isinstance(failed[0], OSError)


def test_batches_under_way_keep_to_two_slots_and_give_each_its_own(tmp_path: Path) -> None:
    """The third of five records fills a part of its own, so that batches are cut into parts, some sent later."""
    with common.start(tmp_path) as capture:
        sent: list[tuple[int, int]] = []
        send = capture.worker.send

        def watch(message: dict[str, int]) -> None:
            sent.append((message["batch"], message["slot"]))
            assert len(capture._sent) <= 2
            send(message)

        capture.worker.send = watch  # type: ignore[method-assign,assignment]
        first, second = capture.begin(common.BATCH), capture.begin(common.BATCH[::-1])
        samples, again = first(), second()[::-1]
        (third,) = capture.run(common.BATCH[:1])
    assert [number for number, _ in sent] == list(range(1, len(sent) + 1)) and len(sent) > 4
    assert all(a[1] != b[1] for a, b in pairwise(sent))
    for (record_id, tokens, _), one, other in zip(common.BATCH, samples, again, strict=True):
        assert one.record_id == other.record_id == record_id
        for k in (2, 3, 5):
            assert torch.equal(one.sites[f"layer_{k}"], common.expected(k, tokens))
            assert torch.equal(other.sites[f"layer_{k}"], one.sites[f"layer_{k}"])
    assert torch.equal(third.final, samples[0].final)
