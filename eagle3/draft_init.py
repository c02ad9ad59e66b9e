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
    layer: dict[str, Tensor] | None = None,
) -> Eagle3Draft:
    """A float32 draft before its first step; the same seed gives the same weights.

    Args:
        shape: sizes.
        vocab: draft vocabulary of `shape.draft_vocab_size` out of `shape.vocab_size`.
        config: `init_lm_head` "target" copies the target's head rows and its final norm times `init_norm_scale`;
            `init_fc` "last" starts `fc` as a copy of the last aux slot and the layer's two outputs at zero, so that
            the first hidden state is that slot's own (normed, where the draft norms it before `fc`); `init_layer`
            copies the target's last layer, wholly or its MLP, whose outputs are then not zeroed.
        embedding: `[V, H]` the target's, copied and frozen.
        head: `[V, H]` the target's output matrix.
        final_norm: `[H]` the target's final norm.
        seed: of the random matrices.
        layer: `TargetWeights.last_layer()`, needed where `init_layer` is not "random".

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
        if config.init_layer != "random":
            _copy_layer(draft, layer or {}, whole=config.init_layer == "target")
    return draft


_MLP = ("post_attention_layernorm.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight")
_INPUTS = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")


def _copy_layer(draft: Eagle3Draft, layer: dict[str, Tensor], whole: bool) -> None:
    """Copy the target's layer: the MLP with its norm, and if `whole` the attention, blind to the embedding at first.

    The draft's attention reads `[embedding, hidden]`, each normed by itself: the target's projections act on the hidden
    half, whose norm is the target's own before attention, and those on the embedding half start at zero.
    """
    parameters = dict(draft.midlayer.named_parameters())
    for name in _MLP:
        _fits(f"target's last layer, {name}", tuple(_taken(layer, name).shape), tuple(parameters[name].shape))
        parameters[name].copy_(layer[name])
    if not whole:
        return
    width = draft.shape.hidden_size
    for name in _INPUTS:
        own = parameters[name]
        _fits(f"target's last layer, {name}", tuple(_taken(layer, name).shape), (own.shape[0], width))
        own.zero_()
        own[:, width:] = layer[name]
    for name, source in (
        ("hidden_norm.weight", "input_layernorm.weight"),
        ("self_attn.o_proj.weight", "self_attn.o_proj.weight"),
    ):
        _fits(f"target's last layer, {source}", tuple(_taken(layer, source).shape), tuple(parameters[name].shape))
        parameters[name].copy_(layer[source])


def _taken(layer: dict[str, Tensor], name: str) -> Tensor:
    if name not in layer:
        why = f"it has no {name}: not a plain Llama layer"
        mend = "set draft.init_layer=random for this target"
        raise ConfigError("the target's last layer cannot be copied", where="draft.init_layer", why=why, mend=mend)
    return layer[name]


def _fits(what: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected:
        why = f"found {found}, the draft's shape needs {expected}"
        mend = "use the target the draft is for, and for draft.init_layer sizes that are the target's"
        raise ConfigError(f"{what} of another size", where="draft", why=why, mend=mend)
