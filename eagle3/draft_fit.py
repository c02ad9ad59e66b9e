"""Start a draft from the best linear guess: least squares from what it reads to what the target says next.

Before its first step a draft is asked for the target's last state `y` one token on, and is fed the fused states `x` and
the embedding `e` of that token. The linear map that does this best on the training rows,

    y ~ F x + M e        (ridge regression; y at unit size, and each input too)

fits into the draft's own weights: `F` is `fc`. `M` goes through attention, the only way from the embedding into the
residual stream: its values read the embedding and its output writes, at the rank that the key-value heads have (the
best M of that rank: reduced-rank regression, Izenman 1975), and queries and keys are one random projection of the
embedding, so that each token looks at itself: its product with itself, at distance 0, is larger than with any other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3.draft import Eagle3Draft
from eagle3.errors import DataError

SELF_SCORE = 16.0  # attention score of a token with itself, before the softmax


class Moments:
    """Second moments of inputs and targets, summed over blocks of rows in float64.

    Args:
        draft: whose `fc` is to be fitted; its norms before `fc` are applied to the features.
    """

    def __init__(self, draft: Eagle3Draft) -> None:
        shape = draft.shape
        wide = (shape.num_aux + 1) * shape.hidden_size
        self.draft, self.rows = draft, 0
        self.inputs = torch.zeros(wide, wide, dtype=torch.float64)  # sum of [x e]^T [x e]
        self.cross = torch.zeros(wide, shape.hidden_size, dtype=torch.float64)  # sum of [x e]^T y
        self.embeds = torch.zeros(shape.hidden_size, dtype=torch.float64)  # sum of e

    def add(self, features: Tensor, token_ids: Tensor, teacher: Tensor) -> None:
        """Add rows: `features [r, A*H]`, `token_ids [r]`, `teacher [r, H]` (the state that teaches them)."""
        if not len(features):
            return
        shape, eps = self.draft.shape, self.draft.shape.rms_norm_eps
        x = _normed(self.draft, features.float())
        e = F.rms_norm(self.draft.embed_tokens.weight[token_ids].float(), (shape.hidden_size,), eps=eps)
        y = F.rms_norm(teacher.float(), (shape.hidden_size,), eps=eps)
        joined = torch.cat((x, e), dim=-1)
        self.inputs += joined.T @ joined
        self.cross += joined.T @ y
        self.embeds += e.sum(0)
        self.rows += len(features)


@dataclass(frozen=True)
class LinearStart:
    """The linear guess: `fc x + output values e`.

    Args:
        fc: `[H, A*H]`.
        values, output: `[r, H]` and `[H, r]`, the embedding's map at rank r.
        mean_embed: `[H]` mean of the normed embeddings.
        size: root mean square of the last aux site's states.
    """

    fc: Tensor
    values: Tensor
    output: Tensor
    mean_embed: Tensor
    size: float


def fit_linear(moments: Moments, ridge: float) -> LinearStart:
    """Solve the regression.

    Args:
        moments: of at least one row.
        ridge: penalty, as a share of each input's mean square.

    Raises:
        DataError: a state is not finite, or all are zero.
    """
    if not (bool(moments.inputs.isfinite().all()) and bool(moments.cross.isfinite().all()) and moments.inputs.any()):
        why = "a hidden state among the rows is not a finite number, or all are 0"
        mend = "check the store with `python -m eval.probe store`, or set draft.init_fc=last"
        raise DataError("the start cannot be fitted", where="draft.init_fc=fitted", why=why, mend=mend)
    shape = moments.draft.shape
    split = shape.num_aux * shape.hidden_size
    size = (moments.inputs.diagonal() / moments.rows).clamp(min=1e-12)
    blocks = size.view(shape.num_aux + 1, -1).mean(1).repeat_interleave(shape.hidden_size)  # a site's mean square
    gram = moments.inputs.clone()
    gram.diagonal().add_(ridge * moments.rows * blocks)
    whole = torch.linalg.solve(gram, moments.cross)  # [(A + 1) H, H]
    by_embed = whole[split:]  # [H, H]
    # What the embedding adds that the features do not hold: its Gram matrix given them.
    mixed = gram[:split, split:]
    left = gram[split:, split:] - mixed.T @ torch.linalg.solve(gram[:split, :split], mixed)
    root = torch.linalg.cholesky(0.5 * (left + left.T), upper=True)
    rank = min(shape.num_key_value_heads * shape.head_dim, shape.hidden_size)
    *_, directions = torch.linalg.svd(root @ by_embed, full_matrices=False)
    kept = directions[:rank].T  # [H, r]
    # With the embedding's part at lower rank, the features' part is fitted again.
    cut = by_embed @ kept @ kept.T
    by_features = torch.linalg.solve(gram[:split, :split], moments.cross[:split] - mixed @ cut)
    mean = moments.embeds / moments.rows
    last = float(blocks[split - 1]) ** 0.5
    return LinearStart(by_features.T.float(), (by_embed @ kept).T.float(), kept.float(), mean.float(), last)


def put_linear(draft: Eagle3Draft, start: LinearStart, seed: int) -> None:
    """Put the linear guess into a fresh draft's weights, at the size of the last site; the MLP's output becomes zero.

    Args:
        draft: kind "llama", float32.
        start: of this draft's shape.
        seed: of the projection that queries and keys share.
    """
    shape, width = draft.shape, draft.shape.hidden_size
    d, kv = shape.head_dim, shape.num_key_value_heads
    group, rank = shape.num_attention_heads // kv, len(start.values)
    q, k, v, o = (draft.midlayer.self_attn.get_parameter(f"{name}_proj.weight") for name in "qkvo")
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        draft.fc.weight.copy_(start.size * start.fc)
        looks = torch.stack([_look(d, start.mean_embed, random) for _ in range(kv)])  # [kv, d, H]
        for projection, value in (
            (q, looks.repeat_interleave(group, 0).flatten(0, 1)),
            (k, looks.flatten(0, 1)),
            (v, F.pad(start.size * start.values, (0, 0, 0, kv * d - rank))),
        ):
            projection.zero_()
            projection[:, :width] = value  # the half that reads the embedding
        output = F.pad(start.output, (0, kv * d - rank)).view(width, kv, 1, d)
        o.copy_((output.expand(-1, -1, group, -1) / group).flatten(1))  # each query head of a group has its part
        draft.midlayer.mlp.down_proj.weight.zero_()


def _look(d: int, mean: Tensor, random: torch.Generator) -> Tensor:
    """`[d, H]` orthogonal rows, orthogonal to `mean [H]` too: else all tokens look alike.

    A row's product with an input of unit mean square has mean square 1 before scaling, so a token's score with itself
    is `sqrt(d)`, brought to SELF_SCORE.
    """
    rows = torch.randn(len(mean), d + 1, generator=random)
    rows[:, 0] = mean
    return torch.linalg.qr(rows).Q[:, 1:].T * (SELF_SCORE / d**0.5) ** 0.5


def _normed(draft: Eagle3Draft, features: Tensor) -> Tensor:
    """Features as `fc` reads them in a fresh draft."""
    shape = draft.shape
    if shape.norm_before_fc:
        return F.rms_norm(features, (features.shape[-1],), eps=shape.rms_norm_eps)
    if shape.fc_norm:
        states = features.unflatten(-1, (shape.num_aux, -1))
        return F.rms_norm(states, (shape.hidden_size,), eps=shape.rms_norm_eps).flatten(-2)
    return features
