"""Reads an SGLang model's states by hooks: what the engine would hand to a draft, the teacher, and every site once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

PROBE_ROWS, PROBE_COLUMNS = 8, 256


class Decoder:
    """The parts of an SGLang model that the hooks stand on.

    Args:
        model: the engine's model object.
        num_layers: decoder layers that the target must have.

    Raises:
        ValueError: no module holds that many decoder layers beside a final norm, or none computes logits.
    """

    def __init__(self, model: nn.Module, num_layers: int) -> None:
        bodies = [m for m in model.modules() if _is_body(m, num_layers)]
        logits = [m for m in model.modules() if type(m).__name__ == "LogitsProcessor"]
        if not bodies or not logits:
            missing = "a logits processor" if bodies else f"{num_layers} decoder layers beside a final norm"
            raise ValueError(f"{type(model).__name__}: found no {missing}")
        self.layers: Any = bodies[0].layers
        self.norm: Any = bodies[0].norm
        self.embedding: Any = getattr(bodies[0], "embed_tokens", None)
        self.logits = logits[-1]  # a wrapper comes before the language model that it holds


def _is_body(module: nn.Module, num_layers: int) -> bool:
    layers = getattr(module, "layers", None)
    return isinstance(layers, nn.ModuleList) and len(layers) == num_layers and hasattr(module, "norm")


class Taps:
    """Hooks for one forward pass; the states are read from the attributes afterwards.

    Args:
        decoder: where to hook.
        teacher: `final` (the residual stream entering the final norm) or `final_normed` (what leaves it).
        measure: also keep the first `measure` rows of what enters every layer; 0 = do not.

    Attributes:
        tokens: [N] int64, the tokens in the order in which the engine ran them.
        aux: [N, k*H], what the engine would feed a draft.
        teacher_state: [N, H].
        sites: site name -> [M, H], M = min(N, measure).
    """

    def __init__(self, decoder: Decoder, teacher: str, measure: int = 0) -> None:
        self.decoder, self.teacher, self.measure = decoder, teacher, measure
        self.tokens: torch.Tensor | None = None
        self.aux: torch.Tensor | None = None
        self.teacher_state: torch.Tensor | None = None
        self.sites: dict[str, torch.Tensor] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> Taps:
        norm, logits = self.decoder.norm, self.decoder.logits
        if self.decoder.embedding is not None:
            self._handles.append(self.decoder.embedding.register_forward_pre_hook(self._at_embedding))
        self._handles += [
            logits.register_forward_hook(self._at_logits, with_kwargs=True),
            norm.register_forward_pre_hook(self._before_norm),
            norm.register_forward_hook(self._after_norm),
        ]
        for k, layer in enumerate(self.decoder.layers if self.measure else ()):
            name = "embedding" if k == 0 else f"layer_{k}"
            layer_norm = getattr(layer, "input_layernorm", None)
            if layer_norm is not None:
                self._handles.append(layer_norm.register_forward_pre_hook(self._entering(name)))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _at_logits(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        # A wrapper such as Kimi-K2.5's embeds the tokens itself and gives the text model none: the embedding saw them.
        tokens = args[0] if args else kwargs.get("input_ids")
        if tokens is not None:
            self.tokens = _copy(tokens)
        self.aux = output.hidden_states

    def _at_embedding(self, _module: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], torch.Tensor):
            self.tokens = _copy(args[0])

    def _before_norm(self, _module: nn.Module, args: tuple[Any, ...]) -> None:
        if self.teacher == "final":
            self.teacher_state = stream(args)  # a new tensor: the norm writes in place
        if self.measure:
            self.sites["final"] = stream(args, self.measure)

    def _after_norm(self, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        normed = output[0] if isinstance(output, tuple) else output
        if self.teacher == "final_normed":
            self.teacher_state = normed.clone()
        if self.measure:
            self.sites["final_normed"] = normed[: self.measure].clone()

    def _entering(self, name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(_module: nn.Module, args: tuple[Any, ...]) -> None:
            self.sites[name] = stream(args, self.measure)

        return hook


def _copy(tokens: torch.Tensor) -> torch.Tensor:
    """Tokens in memory of their own: the engine's is filled anew while these are still on their way to the parent."""
    return tokens.detach().to("cpu", torch.int64, copy=True)


def stream(args: Sequence[Any], rows: int | None = None) -> torch.Tensor:
    """The residual stream entering a norm that is given it whole, or as (layer output, residual): [N, H], a copy.

    SGLang's fused norm adds the two in float32 and keeps the sum in the model's dtype; so does this.
    """
    hidden = args[0][:rows]
    residual = args[1] if len(args) > 1 else None
    if residual is None:
        return hidden.clone()
    return (hidden.float() + residual[:rows].float()).to(hidden.dtype)


def probe(states: dict[str, torch.Tensor]) -> dict[str, list[list[float]]]:
    """A few rows and columns of each state, for other ranks to compare with: name -> [rows][columns]."""
    out = {}
    for name, state in states.items():
        rows = torch.linspace(0, state.shape[0] - 1, min(PROBE_ROWS, state.shape[0])).long()
        columns = torch.linspace(0, state.shape[1] - 1, min(PROBE_COLUMNS, state.shape[1])).long()
        picked = state[rows.to(state.device)][:, columns.to(state.device)]
        out[name] = picked.float().cpu().tolist()
    return out


def disagreement(mine: dict[str, list[list[float]]], other: dict[str, list[list[float]]]) -> dict[str, float]:
    """Largest relative difference of a row between two ranks' probes, by state; infinite when not comparable."""
    out = {}
    for name in sorted({*mine, *other}):
        a, b = torch.tensor(mine.get(name, [])), torch.tensor(other.get(name, []))
        if a.shape != b.shape or a.numel() == 0 or not bool((a.isfinite() & b.isfinite()).all()):
            out[name] = float("inf")
        else:
            out[name] = float(((a - b).norm(dim=1) / b.norm(dim=1).clamp_min(1e-20)).max())
    return out
