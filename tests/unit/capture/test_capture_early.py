"""Batches under way, passes that end at the deepest site, and what is kept of padded states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
from torch import nn

from data_prep.capture.finite import all_finite
from data_prep.capture.hf import HFCapture
from data_prep.capture.rows_out import RowCopies
from data_prep.capture.sample import CapturedSample
from data_prep.store import StoreManifest
from data_prep.store.writer import check_sample
from eagle3.errors import DataError, RedraftError, WiringError
from eagle3.hf_states import all_site_states
from eagle3.wiring import Site, Wiring

IDS = [[5, 9, 3, 17, 40, 2, 2, 63], [7, 7, 30], [1, 2, 3, 4, 5]]
H, LAYERS = 16, 6


def wiring(*layers: int, teacher: str = "final") -> Wiring:
    return Wiring(tuple(Site(k) for k in layers), teacher, "llama", LAYERS, H)


def batch(ids: list[list[int]] = IDS) -> list[tuple[str, list[int], list[int]]]:
    return [(f"r{i}", tokens, [0] + [1] * (len(tokens) - 1)) for i, tokens in enumerate(ids)]


@contextmanager
def counted(model: nn.Module) -> Iterator[Counter[int]]:
    """How often each decoder layer computes."""
    calls: Counter[int] = Counter()
    layers = model.model.layers  # type: ignore[union-attr]
    # inside the layer, so that a hook that ends the pass before the layer computes leaves no mark
    handles = [
        layer.mlp.register_forward_hook(lambda *_, k=k: calls.update([k]))
        for k, layer in enumerate(layers)  # type: ignore[arg-type,union-attr]
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("layers", [(1, 3), (3, 1), (0, 2), (4,), (1, 5)])
def test_without_a_teacher_no_layer_above_the_deepest_site_runs(llama: nn.Module, layers: tuple[int, ...]) -> None:
    full = HFCapture.from_model(llama, wiring(*layers), torch.float32).run(batch())
    with counted(llama) as calls:
        short = HFCapture.from_model(llama, wiring(*layers), torch.float32, teacher=False).run(batch())
    assert dict(calls) == {k: 1 for k in range(max(layers))}
    for one, other in zip(short, full, strict=True):
        assert sorted(one.sites) == sorted(other.sites)
        assert all(torch.equal(state, other.sites[name]) for name, state in one.sites.items())
        assert one.final.shape == (0, H) and torch.equal(one.input_ids, other.input_ids)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in llama.modules())


def test_with_a_teacher_every_layer_runs(llama: nn.Module) -> None:
    with counted(llama) as calls:
        HFCapture.from_model(llama, wiring(1)).run(batch())
    assert dict(calls) == {k: 1 for k in range(LAYERS)}


def test_an_error_within_the_pass_is_not_taken_for_its_end(llama: nn.Module) -> None:
    def breaks(*_: object) -> None:
        raise WiringError("broken")

    handle = llama.model.layers[1].register_forward_pre_hook(breaks)  # type: ignore[union-attr,index]
    try:
        with pytest.raises(WiringError, match="broken"):
            HFCapture.from_model(llama, wiring(3), teacher=False).run(batch())
    finally:
        handle.remove()


def test_a_sample_without_its_teacher_fits_no_store(llama: nn.Module) -> None:
    capture = HFCapture.from_model(llama, wiring(1, 3), teacher=False)
    manifest = StoreManifest(wiring(1, 3), {"name": "tiny"}, "tok", "tpl")
    with pytest.raises(DataError, match=r"record r0.*final is \(0, 16\)"):
        check_sample(capture.run(batch())[0], manifest)


@pytest.mark.parametrize("only", [["layer_2"], ["embedding"], ["layer_4", "layer_1"]])
def test_all_site_states_goes_no_deeper_than_asked(llama: nn.Module, only: list[str]) -> None:
    every = all_site_states(llama, IDS[0])
    with counted(llama) as calls:
        some = all_site_states(llama, IDS[0], only=only)
    assert sorted(some) == sorted(only) and all(torch.equal(some[name], every[name]) for name in only)
    assert set(calls) == set(range(max(0 if name == "embedding" else int(name[6:]) for name in only)))


def test_two_batches_under_way_give_each_its_own_states(llama: nn.Module) -> None:
    capture = HFCapture.from_model(llama, wiring(0, 2, 4), torch.float32)
    alone = [capture.run([record])[0] for record in batch()]
    finishes: list[Callable[[], list[CapturedSample]]] = [capture.begin([record]) for record in batch()[:2]]
    got = [finishes[0]()[0]]
    finishes.append(capture.begin(batch()[2:]))
    got += [finish()[0] for finish in finishes[1:]]
    for one, other in zip(got, alone, strict=True):
        assert one.record_id == other.record_id and torch.equal(one.final, other.final)
        assert all(torch.equal(one.sites[name], state) for name, state in other.sites.items())


def test_states_that_are_not_finite_are_found_when_the_batch_is_finished(llama: nn.Module) -> None:
    capture = HFCapture.from_model(llama, wiring(2))
    weight = llama.model.embed_tokens.weight.data  # type: ignore[union-attr]
    before = weight[30].clone()
    weight[30] = float("inf")  # only r1 holds it
    try:
        finish = capture.begin(batch())
        with pytest.raises(RedraftError, match=r"not finite.*record r1"):
            finish()
    finally:
        weight[30] = before


def test_a_padded_batch_gives_what_the_attention_mask_gave(llama: nn.Module) -> None:
    """No mask is passed: on the right of a causal model, no real token reads padding."""
    length = max(map(len, IDS))
    ids = torch.tensor([tokens + [0] * (length - len(tokens)) for tokens in IDS])
    keep = torch.tensor([[1] * len(tokens) + [0] * (length - len(tokens)) for tokens in IDS])
    with torch.no_grad():
        masked = llama.model(input_ids=ids, attention_mask=keep, output_hidden_states=True).hidden_states  # type: ignore[operator]
    samples = HFCapture.from_model(llama, wiring(2, 5), torch.float32).run(batch())
    for row, sample in enumerate(samples):
        for k in (2, 5):
            want = masked[k][row, : sample.tokens]
            torch.testing.assert_close(sample.sites[f"layer_{k}"], want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("lengths", [[4, 4], [3, 1, 5], [2]])
def test_rows_without_padding_are_a_copy_in_order(lengths: list[int], dtype: torch.dtype) -> None:
    state = torch.randn(len(lengths), max(lengths), 8)
    plain = torch.cat([state[i, :n] for i, n in enumerate(lengths)]).to(dtype)
    copies = RowCopies(lengths, dtype, {})
    got = copies.to_host(state)
    copies.wait_for()()
    assert got.dtype == dtype and torch.equal(got, plain)
    state.zero_()
    assert torch.equal(got, plain)  # later layers may write in place
    assert copies._index(state.device).tolist() == [
        r * max(lengths) + t for r, n in enumerate(lengths) for t in range(n)
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_finite_is_what_torch_calls_finite(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    edges = torch.tensor([0.0, -0.0, info.max, info.min, info.tiny, -info.tiny, info.smallest_normal / 2], dtype=dtype)
    assert all_finite(edges) and all_finite(edges.repeat(7, 3)[:, ::2]) and all_finite(edges[:0])
    for bad in (float("inf"), float("-inf"), float("nan"), -float("nan")):
        for place in range(len(edges)):
            state = edges.clone()
            state[place] = bad
            assert not all_finite(state) and not bool(state.isfinite().all())


def test_samples_are_views_of_their_batch_until_they_stand_alone(llama: nn.Module) -> None:
    samples = HFCapture.from_model(llama, wiring(2)).run(batch())
    base = [sample.final.untyped_storage().data_ptr() for sample in samples]
    assert all(a == b for a, b in pairwise(base))
    alone = samples[1].alone()
    assert torch.equal(alone.final, samples[1].final) and torch.equal(
        alone.sites["layer_2"], samples[1].sites["layer_2"]
    )
    assert alone.final.untyped_storage().nbytes() == 3 * H * 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_batches_under_way_give_the_states_of_the_cpu(llama: nn.Module) -> None:
    import copy

    ids = [list(range(1, 60)), *IDS, list(range(2, 30))]
    here = HFCapture.from_model(llama, wiring(0, 2, 5), torch.float32)
    there = HFCapture.from_model(copy.deepcopy(llama).cuda(), wiring(0, 2, 5), torch.float32)
    records = batch(ids)
    finishes = [there.begin(records[:3]), there.begin(records[3:])]
    got = [sample for finish in finishes for sample in finish()]
    for a, b in zip(got, here.run(records), strict=True):
        assert a.final.device.type == "cpu"
        torch.testing.assert_close(a.final, b.final, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(a.sites["layer_5"], b.sites["layer_5"], atol=1e-3, rtol=1e-3)
