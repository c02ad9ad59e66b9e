"""Every site of a target on one sequence: what to compare unnamed hidden states with."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eagle3.errors import DataError
from eagle3.hf_decoder import Decoder, DeepEnough, find_decoder
from eagle3.hf_model import choose_device, choose_dtype, load_target
from eagle3.wiring import Site


def all_site_states(
    model_or_path: nn.Module | Path | str,
    input_ids: Sequence[int] | Tensor,
    *,
    only: Collection[str] | None = None,
    device: str = "auto",
    compute_dtype: str = "auto",
    trust_remote_code: bool = False,
) -> dict[str, Tensor]:
    """Run the target once and keep what enters every decoder layer, what leaves the last, and its normed form.

    Read by hooks: Hugging Face's `output_hidden_states` does not hold `final`, for its last entry is normed.

    Args:
        model_or_path: a model in memory (then `device` and `compute_dtype` are its own), or a target's folder.
        input_ids: [T] token ids of one sequence, no padding.
        only: names of the sites to keep; None = all. Nothing else is copied, and no layer above the deepest is run.
        device: `auto`, `cpu`, `cuda` or `cuda:<n>`.
        compute_dtype: `auto` (float32 on CPU, bfloat16 on GPU), `float32`, `bfloat16` or `float16`.
        trust_remote_code: run Python shipped in the target's folder.

    Returns:
        Site name -> [T, H] float32 on the CPU: `embedding`, `layer_1` ... `layer_<L-1>`, `final`, `final_normed`.
        (L + 2) * T * H * 4 bytes in all.

    Raises:
        RedraftError: the target cannot be loaded whole.
        DataError: no tokens, or a token outside the vocabulary.
    """
    if isinstance(model_or_path, nn.Module):
        model = model_or_path
    else:
        device = choose_device(device)
        model = load_target(Path(model_or_path), device, choose_dtype(compute_dtype, device), trust_remote_code)
    decoder = find_decoder(model, _num_layers(model))
    weight: Tensor = decoder.embedding.weight  # type: ignore[assignment]  # [V, H]
    ids = torch.as_tensor(input_ids, dtype=torch.int64)
    if ids.ndim != 1 or ids.numel() == 0 or int(ids.min()) < 0 or int(ids.max()) >= weight.shape[0]:
        span = f"{int(ids.min())} to {int(ids.max())}" if ids.numel() else "none"
        raise DataError(
            "cannot run the target on these tokens",
            why=f"shape {list(ids.shape)}, ids {span}; the target knows 0 to {weight.shape[0] - 1}",
            mend="give one sequence of this target's own tokens",
        )
    return _run(decoder, ids.to(weight.device), only)


def _num_layers(model: nn.Module) -> int:
    config: Any = model.config
    return int(config.get_text_config().num_hidden_layers)


def _run(decoder: Decoder, ids: Tensor, only: Collection[str] | None) -> dict[str, Tensor]:
    states: dict[str, Tensor] = {}
    sites = [Site(k).name for k in range(len(decoder.layers))]
    wanted = {*sites, "final", "final_normed"} if only is None else set(only)
    to_the_end = not wanted.isdisjoint(("final", "final_normed"))
    deepest = max((k for k, name in enumerate(sites) if name in wanted), default=0)

    def keep(name: str, state: Tensor) -> None:
        if name in wanted:
            states[name] = state[0].detach().to("cpu", torch.float32, copy=True)  # later layers may write in place

    def entering(k: int) -> Any:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            keep(sites[k], args[0] if args else kwargs["hidden_states"])  # [1, T, H]
            if k == deepest and not to_the_end:
                raise DeepEnough

        return hook

    handles = [layer.register_forward_pre_hook(entering(k), with_kwargs=True) for k, layer in enumerate(decoder.layers)]
    last = decoder.layers[-1]
    handles.append(last.register_forward_hook(lambda _m, _a, out: keep("final", _first(out))))
    try:
        with torch.no_grad(), contextlib.suppress(DeepEnough):
            output = decoder.body(input_ids=ids[None], attention_mask=torch.ones_like(ids)[None], use_cache=False)
            keep("final_normed", output[0])
    finally:
        for handle in handles:
            handle.remove()
    return states


def _first(output: Any) -> Tensor:
    """A decoder layer returns its state, or a tuple that starts with it."""
    return output if isinstance(output, Tensor) else output[0]
