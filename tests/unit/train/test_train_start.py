"""Which rows a start is fitted to: the run's own conversations, in their order, up to the limit."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from train import start
from train.batches import StepPlan
from train.config import TrainConfig


@dataclass
class Sample:
    features: torch.Tensor
    token_ids: torch.Tensor
    teacher: torch.Tensor
    loss_mask: torch.Tensor


class Numbered:
    """Conversation i has 6 rows that hold i and their place; rows 2, 3 and 5 are to be learnt."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def get(self, index: int) -> Sample:
        self.read.append(index)
        place = torch.arange(6)
        mask = torch.tensor([False, False, True, True, False, True])
        whole = torch.stack((torch.full((6,), float(index)), place.float()), 1)
        return Sample(whole, 10 * index + place, whole + 0.5, mask)


@pytest.mark.parametrize("block", [1, 4, 1000])
@pytest.mark.parametrize(("steps", "rows", "conversations"), [(3, 10**6, 6), (3, 7, 3), (40, 10**6, 12)])
def test_rows_of_the_runs_own_conversations(
    monkeypatch: pytest.MonkeyPatch, block: int, steps: int, rows: int, conversations: int
) -> None:
    monkeypatch.setattr(start, "BLOCK", block)
    plan = StepPlan(12, TrainConfig(global_batch_size=2, micro_batch_size=2, max_steps=steps, seed=5), 1, 0)
    source = Numbered()
    blocks = list(start._blocks(source, plan, rows))  # type: ignore[arg-type]
    order = list(dict.fromkeys(i for step in range(steps) for i in plan.global_batch(step)))[:conversations]
    assert source.read == order
    wanted = [10 * index + place for index in order for place in (2, 3, 5)][:rows]
    assert torch.cat([tokens for _, tokens, _ in blocks]).tolist() == wanted
    features = torch.cat([x for x, _, _ in blocks])
    assert features[:, 0].tolist() == [float(token // 10) for token in wanted]
    assert torch.equal(torch.cat([y for _, _, y in blocks]), features + 0.5)
    assert all(len(tokens) >= block for _, tokens, _ in blocks[:-1])
