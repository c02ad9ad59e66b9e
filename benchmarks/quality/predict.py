"""Predicted tau of trained weights on the held-out split, at a fixed number of proposals for every variant."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from eagle3.draft import Eagle3Draft
from train.batches import pack
from train.figures import figures
from train.job import SampleSource
from train.losses import TeacherHead, ttt_loss


def held_out_figures(
    draft: Eagle3Draft, teacher: TeacherHead, source: SampleSource, proposals: int, group: int = 4
) -> dict[str, Any]:
    """`train.figures.figures` over all of `source`, float32 on the CPU.

    A variant may train fewer or more steps than are served, or on another loss, so its own validation does not compare.

    Args:
        draft: trained weights.
        teacher: the target's end.
        source: the held-out split.
        proposals: draft tokens a verify step; unrolled steps here.
        group: conversations a forward pass.
    """
    draft = draft.float().eval()
    teacher = replace(teacher, norm_weight=teacher.norm_weight.float(), head=teacher.head.float()).arranged(draft)
    ones = torch.ones(proposals, dtype=torch.float64)
    total = torch.zeros(4, proposals, dtype=torch.float64)
    with torch.no_grad():
        for start in range(0, len(source), group):
            samples = [source.get(i) for i in range(start, min(start + group, len(source)))]
            batch = pack(samples).to(torch.device("cpu"), torch.float32)
            parts = ttt_loss(draft, batch, teacher, ones)
            total += torch.stack([x.double() for x in (parts.sums, parts.counts, parts.right, parts.tried)])
    return figures(total, [1.0] * proposals)
