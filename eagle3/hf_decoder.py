"""Find the text decoder inside a Hugging Face model, whatever wraps it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from eagle3.errors import WiringError


class DeepEnough(Exception):
    """Raised by a hook once everything that is wanted was seen: unwinds the forward pass, and goes no further."""


@dataclass(frozen=True)
class Decoder:
    """The inner text model (no language-model head), its decoder layers, and the token embedding.

    Args:
        body: called with `input_ids` and `attention_mask`; its first output is the state after the final norm.
        layers: the decoder layers in order.
        embedding: maps token ids to what should enter layer 0.
    """

    body: nn.Module
    layers: nn.ModuleList
    embedding: nn.Module


def find_decoder(model: nn.Module, num_layers: int) -> Decoder:
    """Find the module that owns both the token embedding and a list of `num_layers` decoder layers.

    Wrappers (`model.`, `language_model.`, `model.language_model.`) need no rule of their own, and a vision
    tower cannot be mistaken for the decoder, for it owns no token embedding.

    Raises:
        WiringError: the model has no such module, that is, another number of layers than the wiring says.
    """
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    seen = []
    for body in model.modules():
        if not any(child is embedding for child in body.children()):
            continue
        for layers in body.children():
            if isinstance(layers, nn.ModuleList):
                seen.append(len(layers))
                if len(layers) == num_layers:
                    return Decoder(body, layers, embedding)
    raise WiringError(
        "the target has another number of decoder layers than the wiring",
        where=type(model).__name__,
        why=f"found {' and '.join(map(str, seen)) or 'no'} layers, expected {num_layers}",
        mend="correct target.num_layers, or point target.path at the model the wiring is for",
    )
