"""Training-time test: the draft unrolled on its own outputs over packed documents.

Row `t` of a document, step `k` (0-based) is the draft that has read the target's states up to `t` and has since
proposed `k` tokens, all of them right: it takes its own output of step `k - 1` at row `t` (step 0: the fused
states) and token `token_ids[t + k]`, stands at position `t + k`, and sees the step-0 keys of rows `0..t` of its
document plus its own keys of steps `1..k`, as in a server's cache. It is taught by teacher row `t + k`.
(Li et al. 2025; EAGLE's and SpecForge's training code have the same keys and positions.)
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from eagle3.draft import Eagle3Draft
from eagle3.errors import DataError
from eagle3.summed import summed_weights
from eagle3.ttt_attention import ttt_attention


@dataclass
class PackedBatch:
    """Documents laid end to end, `N` rows in all; row meanings as in `data_prep.standardize`.

    Args:
        features: `[N, A*H]` aux states in the wiring's order.
        token_ids: `[N]` int64; row `t` holds the token after the one whose states are in `features[t]`.
        teacher: `[N, H]` the target's final state after reading `token_ids[t]`.
        loss_mask: `[N]` bool; whether what `teacher[t]` predicts is to be learnt.
        doc_lengths: rows of each document; their sum is `N`.

    Raises:
        DataError: lengths disagree.
    """

    features: Tensor
    token_ids: Tensor
    teacher: Tensor
    loss_mask: Tensor
    doc_lengths: list[int]

    def __post_init__(self) -> None:
        rows = {name: getattr(self, name).shape[0] for name in ("features", "token_ids", "teacher", "loss_mask")}
        if set(rows.values()) != {sum(self.doc_lengths)} or min(self.doc_lengths, default=0) < 1:
            raise DataError(
                "a packed batch whose parts disagree",
                why=f"rows {rows}, documents of {self.doc_lengths} rows",
                mend="pack whole, non-empty documents",
            )

    @property
    def rows(self) -> int:
        """Rows in all, N."""
        return int(self.token_ids.shape[0])

    def positions(self) -> Tensor:
        """Position of each row in its document, `[N]` int64."""
        return torch.cat([torch.arange(n, device=self.token_ids.device) for n in self.doc_lengths])

    def rows_left(self) -> Tensor:
        """Rows from each row to the end of its document, itself included, `[N]` int64."""
        return torch.cat([torch.arange(n, 0, -1, device=self.token_ids.device) for n in self.doc_lengths])

    def supervised(self, steps: int) -> Tensor:
        """`[N, K]` bool: step `k` at row `t` is taught, i.e. row `t + k` is in the same document and in its mask."""
        left, columns = self.rows_left(), []
        for k in range(steps):
            ahead = torch.zeros_like(self.loss_mask)
            ahead[: self.rows - k] = self.loss_mask[k:]
            columns.append(ahead & (left > k))
        return torch.stack(columns, dim=1)

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> PackedBatch:
        """The same batch elsewhere; `dtype` casts `features` and `teacher`."""
        return PackedBatch(
            self.features.to(device, dtype or self.features.dtype),
            self.token_ids.to(device),
            self.teacher.to(device, dtype or self.teacher.dtype),
            self.loss_mask.to(device),
            self.doc_lengths,
        )


def unroll(
    draft: Eagle3Draft, batch: PackedBatch, steps: int, rows: Tensor | None = None, recompute: bool = False
) -> list[Tensor]:
    """Run the draft `steps` times on its own outputs.

    Args:
        draft: the model.
        batch: packed documents.
        steps: K >= 1.
        rows: `[R]` int64 ascending row numbers to unroll (all when None). Rows outside serve as step-0 keys only,
            which spares them the queries, the MLP and every later step: no loss ever reads those.
        recompute: keep of each step only its output and its keys and values, and compute the rest again in backward
            (activation checkpointing): about one forward pass more, and one step's activations instead of K.

    Returns:
        K tensors `g_k [N, H]` (`[R, H]` with `rows`), the outputs of `draft.step`. At rows whose step runs past
        the document's end the values mean nothing; `PackedBatch.supervised` is False there.
    """
    # What is recomputed in backward runs its products again there, when their sums have been closed.
    with nullcontext() if recompute else summed_weights(draft):
        return _unrolled(draft, batch, steps, rows, recompute)


def _unrolled(draft: Eagle3Draft, batch: PackedBatch, steps: int, rows: Tensor | None, recompute: bool) -> list[Tensor]:
    positions, last = batch.positions(), batch.rows - 1
    here = torch.arange(batch.rows, device=positions.device) if rows is None else rows  # [R]
    hidden, outputs = draft.fuse(batch.features), []
    words = draft.words(batch.token_ids, hidden.dtype)  # [N, W]
    keys: tuple[Tensor, ...] = ()
    for k in range(steps):
        read = (here + k).clamp(max=last) if k else None  # [R]; step 0 reads all N
        places = positions[here] + k if k else positions
        fixed = (draft, batch.doc_lengths, rows)
        if recompute:
            tensors = (hidden, words, read, places, *keys)
            hidden, *own = checkpoint(_one_step, *fixed, *tensors, use_reentrant=False, preserve_rng_state=False)
        else:
            hidden, *own = _one_step(*fixed, hidden, words, read, places, *keys)
        keys = (*keys, *own)
        outputs.append(hidden)
    return outputs


def _one_step(
    draft: Eagle3Draft,
    doc_lengths: list[int],
    rows: Tensor | None,
    hidden: Tensor,
    words: Tensor,
    read: Tensor | None,
    positions: Tensor,
    *keys: Tensor,
) -> tuple[Tensor, ...]:
    """One step, a function of its arguments alone: `keys` are those of the steps before, `k_0, v_0, k_1, v_1, ...`.

    Returns:
        its output `g [R, H]`, and its own keys and values (of all N rows at step 0, of the R asking ones later).
    """
    own: list[Tensor] = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        own.extend((k, v))
        k0, v0, *diagonals = (*keys, k, v)
        return ttt_attention(q, k0, v0, doc_lengths, diagonals, rows, draft.score_scale)

    words = words if read is None else words.index_select(0, read)
    return draft.advance(hidden, words, positions, attend, None if keys else rows), *own
