"""How a new draft starts: from the target's own end, or from random weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from eagle3.config import DraftConfig
from eagle3.draft import Eagle3Draft
from eagle3.draft_build import build_draft
from eagle3.draft_shape import DraftShape
from eagle3.errors import ConfigError
from eagle3.vocab import DraftVocab

_STD = 0.02  # of random matrices, as Llama's initializer_range


def fresh_draft(
    shape: DraftShape,
    vocab: DraftVocab,
    config: DraftConfig,
    *,
    embedding: Tensor,
    head: Tensor,
    final_norm: Tensor,
    seed: int,
) -> Eagle3Draft:
    """A float32 draft before its first step; the same seed gives the same weights.

    Args:
        shape: sizes.
        vocab: draft vocabulary of `shape.draft_vocab_size` out of `shape.vocab_size`.
        config: `init_lm_head` "target" copies the target's head rows and its final norm times `init_norm_scale`;
            `init_fc` "last" starts `fc` as a copy of the last aux slot and the layer's two outputs at zero, so that
            the first hidden state is that slot's own (normed, where the draft norms it before `fc`).
        embedding: `[V, H]` the target's, copied and frozen.
        head: `[V, H]` the target's output matrix.
        final_norm: `[H]` the target's final norm.
        seed: of the random matrices.

    Raises:
        ConfigError: a tensor or the vocabulary does not fit the shape.
    """
    wide = (shape.vocab_size, shape.hidden_size)
    _fits("target embedding", tuple(embedding.shape), wide)
    _fits("target head", tuple(head.shape), wide)
    _fits("draft vocabulary", (len(vocab.t2d), vocab.size), (shape.vocab_size, shape.draft_vocab_size))
    draft = build_draft(shape)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in draft.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(0.0, _STD, generator=random)
        draft.embed_tokens.weight.copy_(embedding)
        draft.d2t.copy_(vocab.d2t)
        draft.t2d.copy_(vocab.t2d)
        if config.init_lm_head == "target":
            draft.lm_head.weight.copy_(head[vocab.target_ids])
            draft.norm.weight.copy_(final_norm * config.init_norm_scale)
        if config.init_fc == "last":
            draft.fc.weight.zero_()
            draft.fc.weight[:, -shape.hidden_size :] = torch.eye(shape.hidden_size)
            for output in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
                draft.midlayer.get_parameter(output).zero_()
    return draft


def _fits(what: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected:
        why = f"found {found}, the draft's shape needs {expected}"
        raise ConfigError(f"{what} of another size", where="draft", why=why, mend="use the target the draft is for")
