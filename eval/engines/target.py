"""The target in this process: a cached forward pass that can be rolled back, with the wiring's sites read out."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from eagle3.errors import WiringError
from eagle3.wiring import Site, Wiring


def end_tokens(model: nn.Module) -> frozenset[int]:
    """Ids that end a text, by the generation config and the text config together."""
    ids: set[int] = set()
    generation = getattr(model, "generation_config", None)
    for config in (generation, model.config.get_text_config()):  # type: ignore[operator, union-attr]
        value = getattr(config, "eos_token_id", None)
        ids.update([value] if isinstance(value, int) else value or [])
    return frozenset(ids)


class TargetSession:
    """One text being decoded: the target's key-value cache, and the sites captured by the last pass.

    Sites are read by a hook in front of decoder layer k, so `embedding` is simply the input of layer 0. A session
    without sites installs no hook. Use it as a context manager: leaving it removes the hooks.

    Args:
        model: a causal LM on its device.
        layers: its decoder layers (`decoder_layers`), needed only for the hooks.
        sites: ordered sites to capture.
    """

    def __init__(self, model: nn.Module, layers: nn.ModuleList | None, sites: tuple[Site, ...] = ()) -> None:
        self._model = model
        self._sites = sites
        self._layers = layers
        self._cache = DynamicCache()
        self._captured: dict[int, Tensor] = {}
        self._handles: list[Any] = []
        self._device = next(model.parameters()).device
        parameters = inspect.signature(model.forward).parameters
        name = "cache" if "cache" in parameters else "past_key_values"
        self._options = {name: self._cache, "use_cache": True}
        self._can_slice = "logits_to_keep" in parameters
        self.length = 0  # tokens in the cache

    def __enter__(self) -> TargetSession:
        for site in self._sites:
            assert self._layers is not None
            hook = self._make_hook(site.layer)
            self._handles.append(self._layers[site.layer].register_forward_pre_hook(hook, with_kwargs=True))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _make_hook(self, layer: int) -> Any:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._captured[layer] = args[0] if args else kwargs["hidden_states"]

        return hook

    def forward(self, ids: list[int], keep: int = 0) -> tuple[Tensor, Tensor | None]:
        """Read `ids` (n tokens) after those in the cache.

        Returns:
            logits `[keep or n, V]` in the model's dtype (the last `keep` rows; 0 = all), and the captured sites
            concatenated in slot order `[n, A * H]`, or None without sites.
        """
        tokens = torch.tensor([ids], device=self._device)  # [1, n]
        sliced = {"logits_to_keep": keep} if keep and self._can_slice else {}
        logits = self._model(input_ids=tokens, **self._options, **sliced).logits[0]  # [n or keep, V]
        self.length += len(ids)
        if not self._sites:
            return logits[-keep:], None
        states = [self._captured[site.layer][0] for site in self._sites]  # A of [n, H]
        return logits[-keep:], torch.cat([state.to(self._device) for state in states], dim=-1)

    def crop(self, length: int) -> None:
        """Forget every token past the first `length`."""
        if length < self.length:
            self._cache.crop(length - self.length)  # a negative count removes that many from the end
            self.length = length


def check_served(wiring: Wiring, width: int) -> None:
    """Refuse to serve a wiring whose features do not fit the draft's `fc` input of `width`.

    Raises:
        WiringError: naming both widths.
    """
    if wiring.feature_width != width:
        raise WiringError(
            "the served wiring does not fit the draft",
            why=f"{len(wiring.aux)} sites of width {wiring.hidden_size} make {wiring.feature_width}; fc takes {width}",
            mend="serve as many sites as the draft was trained on",
        )
