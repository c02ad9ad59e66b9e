"""Rows are shifted and concatenated as the project's one convention says."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from data_prep.capture.sample import CapturedSample
from data_prep.standardize import standardize
from eagle3.errors import DataError, WiringError
from eagle3.wiring import Site, Wiring

H = 4


def sample(tokens: int = 6) -> CapturedSample:
    t = torch.arange(tokens).float()[:, None].expand(tokens, H)
    sites = {"layer_3": 300 + t, "layer_1": 100 + t}
    mask = torch.tensor([0, 0, 0, 1, 0, 1, 1, 1][:tokens]).bool()
    return CapturedSample("r", torch.arange(tokens) + 10, mask, sites, 900 + t, "final")


def wiring(*layers: int, teacher: str = "final") -> Wiring:
    return Wiring(tuple(Site(k) for k in layers), teacher, "llama", 6, H)


def test_the_shift() -> None:
    out = standardize(sample(), wiring(3, 1))
    assert out.features[:, 0].tolist() == [300, 301, 302, 303, 304]  # after x[0..t]
    assert out.features[:, H].tolist() == [100, 101, 102, 103, 104]
    assert out.token_ids.tolist() == [11, 12, 13, 14, 15]  # x[t+1]
    assert out.teacher[:, 0].tolist() == [901, 902, 903, 904, 905]  # over x[t+2]
    assert out.loss_mask.tolist() == [False, True, False, True, False]  # x[t+2] is x[3] and x[5]; the last has none
    assert (out.token_ids.dtype, out.loss_mask.dtype) == (torch.int64, torch.bool)


def test_slots_follow_the_wiring_not_the_sample() -> None:
    out = standardize(sample(), wiring(1, 3))
    assert out.features[0, [0, H]].tolist() == [100, 300]


def test_the_embedding_is_looked_up_in_its_slot() -> None:
    table = torch.arange(64).float()[:, None].expand(64, H)
    out = standardize(sample(), wiring(3, 0, 1), table)
    assert out.features[:, H].tolist() == [10, 11, 12, 13, 14]  # of x[t], not x[t+1]
    assert out.features.shape == (5, 3 * H)


def test_looked_up_rows_take_the_store_dtype(make_sample: Callable[..., CapturedSample]) -> None:
    eight = Wiring((Site(3), Site(0)), "final", "llama", 6, 8)
    assert standardize(make_sample("r", 4), eight, torch.randn(64, 8)).features.dtype == torch.bfloat16


@pytest.mark.parametrize("tokens", [2, 3])
def test_shortest_records(tokens: int) -> None:
    out = standardize(sample(tokens), wiring(3))
    assert out.features.shape == (tokens - 1, H) and not out.loss_mask.any()
    with pytest.raises(DataError, match="1 token"):
        standardize(sample(1), wiring(3))


def test_refusals() -> None:
    with pytest.raises(WiringError, match="no layer_2; it holds layer_3, layer_1"):
        standardize(sample(), wiring(3, 2))
    with pytest.raises(WiringError, match="holds final; the wiring teaches with final_normed"):
        standardize(sample(), wiring(3, teacher="final_normed"))
    with pytest.raises(WiringError, match="no embedding table"):
        standardize(sample(), wiring(3, 0))
    with pytest.raises(WiringError, match="token 15, the table has 12 rows"):
        standardize(sample(), wiring(3, 0), torch.zeros(12, H))
    with pytest.raises(WiringError, match=r"embedding.*\(6, 5\), expected \(6, 4\)"):
        standardize(sample(), wiring(3, 0), torch.zeros(64, 5))
