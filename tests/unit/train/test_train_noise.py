"""Feature noise: its size, and that it is a function of (seed, step, place in the global batch)."""

from __future__ import annotations

import torch

from eagle3.ttt import PackedBatch
from train.noise import with_noise


def packed(lengths: list[int], width: int = 6) -> PackedBatch:
    rows = sum(lengths)
    features = torch.randn(rows, width, generator=torch.Generator().manual_seed(1))
    features[:, width // 2 :] *= 100  # the second site's states are far larger
    zeros = torch.zeros(rows, dtype=torch.int64)
    return PackedBatch(features, zeros, torch.zeros(rows, 3), zeros.bool(), lengths)


def test_no_noise_is_the_batch_itself() -> None:
    batch = packed([3, 2])
    assert with_noise(batch, 0.0, 2, seed=1, step=0, places=[0, 1]) is batch


def test_noise_is_bounded_by_each_states_own_size() -> None:
    batch = packed([50, 30], width=64)
    kept = batch.features.clone()
    noisy = with_noise(batch, 0.5, 2, seed=1, step=0, places=[0, 1])
    assert torch.equal(batch.features, kept)
    change = (noisy.features - batch.features).unflatten(1, (2, -1))  # [N, A, H]
    bound = 0.5 * batch.features.unflatten(1, (2, -1)).abs().mean(-1, keepdim=True)
    assert (change.abs() <= bound * 1.001).all()
    assert float((change / bound).abs().max()) > 0.9 and abs(float((change / bound).mean())) < 0.02
    for name in ("token_ids", "teacher", "loss_mask"):
        assert torch.equal(getattr(noisy, name), getattr(batch, name))


def test_the_same_place_has_the_same_noise_however_the_batch_is_cut() -> None:
    whole = packed([3, 2, 4])
    noisy = with_noise(whole, 0.5, 2, seed=1, step=7, places=[4, 5, 6]).features
    head = PackedBatch(whole.features[:5], whole.token_ids[:5], whole.teacher[:5], whole.loss_mask[:5], [3, 2])
    tail = PackedBatch(whole.features[5:], whole.token_ids[5:], whole.teacher[5:], whole.loss_mask[5:], [4])
    cuts = ((head, [4, 5]), (tail, [6]))
    parts = [with_noise(part, 0.5, 2, seed=1, step=7, places=places) for part, places in cuts]
    assert torch.equal(torch.cat([part.features for part in parts]), noisy)
    for other in ({"seed": 2}, {"step": 8}, {"places": [5, 6, 7]}):
        again = with_noise(whole, 0.5, 2, **{"seed": 1, "step": 7, "places": [4, 5, 6], **other})
        assert not torch.equal(again.features, noisy), other
