"""Each objective's values and closed-form gradients against autograd over the written-out formula, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eagle3.errors import ConfigError
from train.config import OBJECTIVES, ObjectiveConfig, TrainConfig
from train.objective import Objective


def written_out(objective: Objective, logits: Tensor, probs: Tensor) -> Tensor:
    """The loss of each row as the paper has it, differentiable."""
    logs = logits.log_softmax(-1)
    cross = -(probs * logs).sum(-1)
    kept = torch.minimum(probs, logs.exp()).sum(-1)
    share = objective.ce_weight * torch.exp(-objective.ce_fade * kept.detach())
    return {
        "soft_ce": cross,
        "acceptance": 1 - kept,
        "log_acceptance": -kept.log(),
        "mixed": share * cross + (1 - share) * (1 - kept),
    }[objective.kind]


def rows(seed: int = 0, scale: float = 2.0) -> tuple[Tensor, Tensor]:
    """Logits `[5, 2, 33]` and teacher rows `[5, 1, 33]`, float64; the last teacher row is all but certain."""
    random = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(5, 2, 33, generator=random, dtype=torch.float64)
    teacher = scale * torch.randn(5, 1, 33, generator=random, dtype=torch.float64)
    teacher[-1, :, 7] += 40
    return logits - logits.amax(-1, keepdim=True), teacher.softmax(-1)


@pytest.mark.parametrize("fade", [0.0, 3.0])
@pytest.mark.parametrize("kind", OBJECTIVES)
def test_values_and_gradients_are_autograds(kind: str, fade: float) -> None:
    objective = Objective(kind, ce_weight=0.7, ce_fade=fade)
    logits, probs = rows()
    asked = logits.clone().requires_grad_()
    expected = written_out(objective, asked, probs)
    (slope,) = torch.autograd.grad(expected.sum(), asked)
    before = probs.clone()
    loss, grad, scale = objective.rows(logits.clone(), probs)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(scale[..., None] * grad, slope, rtol=1e-10, atol=1e-12)
    assert torch.equal(probs, before)  # other steps read them again


def test_the_teachers_own_logits_leave_nothing_to_learn() -> None:
    _, probs = rows()
    logits = probs.log() - probs.log().amax(-1, keepdim=True)
    for kind in OBJECTIVES:
        loss, grad, _ = Objective(kind, ce_weight=0.0).rows(logits.clone(), probs)
        if kind == "soft_ce":
            assert grad.abs().max() < 1e-12
        else:
            assert loss.abs().max() < 1e-12  # all is kept; rounding decides on which side of the kink the slope is


def test_acceptance_of_a_hopeless_row_stays_finite() -> None:
    logits = torch.tensor([[[0.0, -200.0, -200.0]]])
    probs = torch.tensor([[[0.0, 0.5, 0.5]]])
    loss, grad, scale = Objective("log_acceptance").rows(logits, probs)
    assert torch.isfinite(loss).all() and torch.isfinite(scale[..., None] * grad).all() and loss > 10


def test_a_descent_on_acceptance_raises_the_chance_of_being_kept() -> None:
    logits, probs = rows(seed=1)
    first, grad, _ = Objective("acceptance").rows(logits.clone(), probs)
    then, _, _ = Objective("acceptance").rows(logits - 0.05 * grad, probs)
    assert (then <= first).all() and (then < first).any()


@pytest.mark.parametrize(
    ("field", "value"), [("kind", "cross"), ("ce_weight", 1.5), ("ce_fade", -1.0), ("teacher_temperature", 0.0)]
)
def test_bad_settings_are_named(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"train\.objective\.{field}"):
        TrainConfig(objective=ObjectiveConfig(**{field: value})).validate()


def test_an_unknown_kind_is_refused_by_the_loss_too() -> None:
    with pytest.raises(ValueError, match="no objective"):
        Objective("hinge")
