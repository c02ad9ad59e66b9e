"""Training samples that are made up where they are asked for: a source with no files, for benchmarks and tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from train.decoders import Decoders
from train.job import RowShape, SourceFiles


@dataclass
class Sample:
    """A `train.job.TrainSample`."""

    record_id: str
    features: Tensor
    token_ids: Tensor
    teacher: Tensor
    loss_mask: Tensor


class InMemorySource:
    """A `train.job.SampleSource` whose every reading comes down to `get`.

    Args:
        lengths: rows of each sample.
        aux: aux sites A.
        hidden: width H.
    """

    def __init__(self, lengths: list[int], aux: int, hidden: int) -> None:
        self.lengths = lengths
        self.row, self.files = RowShape(aux * hidden, hidden, torch.float32), SourceFiles()

    def __len__(self) -> int:
        return len(self.lengths)

    def get(self, index: int) -> Sample:
        """Sample `index`, always the same."""
        raise NotImplementedError

    def tokens(self, index: int) -> tuple[Tensor, Tensor]:
        """Tokens and mask of sample `index`."""
        sample = self.get(index)
        return sample.token_ids, sample.loss_mask

    def fill(self, index: int, features: Tensor, teacher: Tensor, decoders: Decoders) -> None:
        """States of sample `index`."""
        sample = self.get(index)
        features.copy_(sample.features)
        teacher.copy_(sample.teacher)

    def advise(self, index: int) -> None:
        """There is no disk."""

    def close(self) -> None:
        """Nothing is open."""
