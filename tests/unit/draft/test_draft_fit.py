"""The fitted start: the regression against plain least squares, and a draft that says what the regression says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3.config import DraftConfig
from eagle3.draft import DraftCache, Eagle3Draft
from eagle3.draft_fit import LinearStart, Moments, fit_linear, put_linear
from eagle3.draft_shape import DraftShape
from eagle3.errors import ConfigError, DataError

H, A, V = 48, 3, 60


def fresh(**changes: Any) -> Eagle3Draft:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": H,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "vocab_size": V,
        "draft_vocab_size": V,
        "num_aux": A,
        "rms_norm_eps": 1e-6,
        "rope": {"rope_theta": 10000.0},
        "max_position_embeddings": 64,
    }
    return Eagle3Draft(DraftShape(**{**sizes, **changes}))


def rows(draft: Eagle3Draft, count: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Features, tokens, and teacher states that are a linear map of both, of that rank in the embedding."""
    random = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    features, tokens = 5 * draw(count, A * H), torch.randint(0, V, (count,), generator=random)
    embeds = F.rms_norm(draft.embed_tokens.weight.detach()[tokens], (H,))
    state = features @ draw(A * H, H) / (5 * (A * H) ** 0.5) + embeds @ draw(H, rank) @ draw(rank, H) / rank
    return features, tokens, state


def normed(state: Tensor) -> Tensor:
    return F.rms_norm(state, (H,), eps=1e-6)


def guess(draft: Eagle3Draft, start: LinearStart, features: Tensor, tokens: Tensor) -> Tensor:
    embeds = F.rms_norm(draft.embed_tokens.weight.detach()[tokens], (H,), eps=1e-6)
    return features @ start.fc.T + embeds @ start.values.T @ start.output.T


def test_at_full_rank_it_is_ridge_regression_whatever_the_blocks() -> None:
    draft = fresh()  # 2 heads of 24 = H: the embedding's map is whole
    features, tokens, state = rows(draft, 900, 8)
    moments = Moments(draft)
    for part in range(0, 900, 137):
        moments.add(*(x[part : part + 137] for x in (features, tokens, state)))
    moments.add(features[:0], tokens[:0], state[:0])
    start = fit_linear(moments, 1e-3)
    embeds = F.rms_norm(draft.embed_tokens.weight.detach()[tokens], (H,), eps=1e-6)
    inputs = torch.cat((features, embeds), 1).double()
    size = torch.cat((inputs[:, : A * H].square().mean(0), inputs[:, A * H :].square().mean(0))).view(A + 1, H).mean(1)
    # Ridge regression is least squares with one further row an input that pulls its weight to zero.
    pull = torch.diag((1e-3 * 900 * size).sqrt().repeat_interleave(H))
    goal = torch.cat((normed(state).double(), torch.zeros((A + 1) * H, H, dtype=torch.float64)))
    plain = torch.linalg.lstsq(torch.cat((inputs, pull)), goal).solution
    torch.testing.assert_close(start.fc.double(), plain[: A * H].T, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close((start.output @ start.values).double(), plain[A * H :].T, rtol=1e-4, atol=1e-4)
    assert start.size == pytest.approx(float(features[:, -H:].square().mean().sqrt()), rel=1e-5)


def test_at_lower_rank_no_other_map_of_that_rank_fits_better() -> None:
    draft = fresh(num_key_value_heads=1, head_dim=12)
    features, tokens, state = rows(draft, 900, 30)
    moments = Moments(draft)
    moments.add(features, tokens, state)
    start = fit_linear(moments, 1e-6)
    assert start.values.shape == (12, H)

    def error(candidate: LinearStart) -> float:
        return float((guess(draft, candidate, features, tokens) - normed(state)).square().sum())

    best = error(start)
    twin = fresh()
    twin.embed_tokens.weight.data.copy_(draft.embed_tokens.weight)
    whole = Moments(twin)
    whole.add(features, tokens, state)
    full = fit_linear(whole, 1e-6)
    left, size, right = torch.linalg.svd(full.output @ full.values)
    cut = LinearStart(full.fc, size[:12, None] * right[:12], left[:, :12], full.mean_embed, full.size)
    assert error(full) < best < error(cut)  # the best at full rank; the plain cut of it is worse
    for turn in range(5):
        torch.manual_seed(turn)
        moved = LinearStart(
            start.fc,
            start.values + 0.01 * torch.randn_like(start.values),
            start.output + 0.01 * torch.randn_like(start.output),
            start.mean_embed,
            start.size,
        )
        assert error(moved) > best


@pytest.mark.parametrize("changes", [{}, {"num_key_value_heads": 1}, {"fc_norm": True}, {"norm_before_fc": True}])
def test_the_draft_says_what_the_regression_says(changes: dict[str, Any]) -> None:
    draft = fresh(**changes, head_dim=24)
    features, tokens, state = rows(draft, 900, 4)
    moments = Moments(draft)
    moments.add(features, tokens, state)
    start = fit_linear(moments, 1e-4)
    put_linear(draft, start, seed=3)
    with torch.no_grad():
        fused = draft.fuse(features[:20])
        found = draft.serve_step(fused, tokens[:20], torch.arange(20), DraftCache())
        embeds = F.rms_norm(draft.embed_tokens.weight[tokens[:20]], (H,), eps=1e-6)
        wanted = fused + start.size * embeds @ start.values.T @ start.output.T
    off = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert off.median() < 0.1, off  # attention looks nearly at itself alone
    assert F.cosine_similarity(found, state[:20]).mean() > 0.9


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), None])
def test_states_that_cannot_be_fitted_are_told(bad: float | None) -> None:
    draft = fresh()
    features, tokens, state = rows(draft, 50, 4)
    moments = Moments(draft)
    if bad is not None:
        features[3, 5] = bad
        moments.add(features, tokens, state)
    with pytest.raises(DataError, match="cannot be fitted"):
        fit_linear(moments, 1e-2)


def test_latent_attention_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"draft\.init_fc"):
        DraftConfig(kind="mla", init_fc="fitted").validate()
    with pytest.raises(ConfigError, match=r"draft\.init_layer"):
        DraftConfig(init_fc="fitted", init_layer="target").validate()
    with pytest.raises(ConfigError, match=r"draft\.fit_rows"):
        DraftConfig(fit_rows=0).validate()
