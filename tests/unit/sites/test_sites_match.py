from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eagle3.errors import DataError
from eagle3.site_match import match_slots

H = 32


def stream(step: float = 0.05, layers: int = 6, rows: int = 40) -> dict[str, Tensor]:
    """A residual stream whose neighbours are alike, with one outlier row as trained targets have."""
    generator = torch.Generator().manual_seed(0)
    state = torch.randn(rows, H, generator=generator)
    state[0] *= 500
    out = {"embedding": state}
    for layer in range(1, layers):
        state = state + step * torch.randn(rows, H, generator=generator)
        out[f"layer_{layer}"] = state
    return out


def test_slots_in_bf16_are_named_among_neighbours_that_point_the_same_way() -> None:
    sites = stream()
    names = ["layer_4", "embedding", "layer_3"]
    joined = torch.cat([sites[name] for name in names], dim=1).bfloat16()
    matches = match_slots(joined, sites, H)
    assert [m.site for m in matches] == names
    assert [m.slot for m in matches] == [0, 1, 2]
    assert all(m.sure for m in matches)
    assert all(0 < m.error < 0.005 for m in matches)
    assert matches[0].runner_up in ("layer_3", "layer_5")
    assert matches[0].runner_up_cosine > 0.99  # a cosine alone would not have told them apart
    assert matches[0].margin == pytest.approx(matches[0].runner_up_error / matches[0].error)


def test_neighbours_closer_than_rounding_are_not_sure() -> None:
    sites = stream(step=0.001)
    (match,) = match_slots(sites["layer_3"].bfloat16(), sites, H)
    assert match.cosine > 0.999
    assert 1 < match.margin < 1.5
    assert not match.sure


def test_neighbours_that_differ_by_a_little_more_than_rounding_are_told_apart() -> None:
    sites = stream(step=0.004)  # as deep layers of a long target do
    for name in sites:
        (match,) = match_slots(sites[name].bfloat16(), sites, H)
        assert (match.site, match.sure) == (name, True)
        assert match.runner_up_cosine > 0.9999


def test_an_outlier_row_does_not_decide() -> None:
    sites = stream()
    other = sites["layer_2"].clone()
    other[0] = sites["layer_5"][0]
    (match,) = match_slots(other, sites, H)
    assert (match.site, match.sure) == ("layer_2", True)


def test_a_state_from_elsewhere_is_not_sure() -> None:
    (match,) = match_slots(torch.randn(40, H, generator=torch.Generator().manual_seed(9)), stream(), H)
    assert not match.sure
    assert match.note == ""


def test_a_constant_factor_is_noted_and_not_accepted() -> None:
    sites = stream(step=0.5)
    (half,) = match_slots(sites["layer_3"] / 2, sites, H)
    assert not half.sure
    assert "layer_3 times 1/2" in half.note
    (tenth_more,) = match_slots(sites["layer_3"] * 1.1, sites, H)
    assert not tenth_more.sure
    assert "layer_3 times 1.1" in tenth_more.note


def test_a_normed_form_is_noted_and_not_accepted() -> None:
    sites = stream(step=0.5)
    normed = torch.nn.functional.rms_norm(sites["layer_3"], (H,))
    (match,) = match_slots(normed, sites, H)
    assert not match.sure
    assert match.note.startswith("points as layer_3 does")


def test_rows_from_another_site_are_noted() -> None:
    sites = stream(step=0.01)
    mixed = sites["layer_3"].clone()
    mixed[25:] = sites["layer_1"][25:]
    (match,) = match_slots(mixed, sites, H)
    assert match.site == "layer_3"
    assert not match.sure
    assert "15 of 40 rows" in match.note
    assert "layer_1" in match.note


def test_one_reference_alone_can_be_confirmed_or_not() -> None:
    sites = stream(step=0.5)
    only = {"embedding": sites["embedding"]}
    assert match_slots(sites["embedding"].bfloat16(), only, H)[0].sure
    assert not match_slots(sites["layer_5"], only, H)[0].sure


@pytest.mark.parametrize(
    ("unknown", "said"),
    [
        (torch.zeros(40, H + 1), "expected [T, k*32]"),
        (torch.zeros(39, H), "expected [39, 32]"),
        (torch.full((40, H), float("nan")), "NaN"),
    ],
)
def test_what_cannot_be_compared_is_refused(unknown: Tensor, said: str) -> None:
    with pytest.raises(DataError) as err:
        match_slots(unknown, stream(), H)
    assert said in str(err.value)
