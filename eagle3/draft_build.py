"""The one place that chooses a draft's class for its shape."""

from __future__ import annotations

from eagle3.draft import Eagle3Draft
from eagle3.draft_shape import DraftShape
from eagle3.mla_draft import Eagle3MlaDraft


def build_draft(shape: DraftShape) -> Eagle3Draft:
    """A draft of that shape, PyTorch's own random weights in it.

    Under `torch.device("meta")` nothing is allocated: then its parameters can be counted for any shape.
    """
    return Eagle3MlaDraft(shape) if shape.kind == "mla" else Eagle3Draft(shape)
