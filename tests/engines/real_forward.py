"""Run the capture code of a real SGLang model file with everything around it replaced by small stand-ins.

The setter and the forward are compiled from the file's own syntax tree. Layers are stand-ins that treat the residual
stream as SGLang's do: the first one takes the embedding's storage for the residual, later ones add into it in place.
What enters layer k for the input x is then 2^k (x + 1) - 1.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import contextlib
import functools
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor

FLAG = "capture_embedding_for_eagle3"


def captured(root: Path, ids: list[int] | None, x: Tensor, num_layers: int) -> list[Tensor]:
    """States that the tree's DeepSeek model collects for `ids`, in order; `x` [tokens, width] is the embedding."""
    module = _parsed((root / "srt/models/deepseek_v2.py").read_bytes())
    stream: dict[str, Any] = {"residual": None}
    inner = _inner(_function(module, "DeepseekV2Model", "__init__"), x, num_layers, stream)
    group = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    outer = SimpleNamespace(
        pp_group=group,
        model=inner,
        config=SimpleNamespace(num_hidden_layers=num_layers),
        capture_aux_hidden_states=False,
    )
    setter = _compiled(_function(module, "DeepseekV2ForCausalLM", "set_eagle3_layers_to_capture"), {})
    setter(outer, ids)
    assert outer.capture_aux_hidden_states
    forward = _compiled(_function(module, "DeepseekV2Model", "forward"), _stand_ins(root, stream))
    batch = MagicMock()
    batch.can_run_tbo = False
    batch.forward_mode.is_idle.return_value = False
    answer = forward(inner, torch.arange(len(x)), torch.arange(len(x)), batch)
    hidden, aux = answer
    assert torch.equal(hidden, entering(x, num_layers))  # capturing changed nothing
    return list(aux.split(x.shape[-1], dim=-1)) if isinstance(aux, Tensor) else list(aux)


_parsed = functools.cache(ast.parse)


def entering(x: Tensor, layer: int) -> Tensor:
    """What enters a layer for the embedding `x`."""
    return 2.0**layer * (x + 1) - 1


class _Layer:
    """A stand-in for a decoder layer of any of the releases, told apart by how it is called."""

    def __init__(self, stream: dict[str, Any]) -> None:
        self.stream = stream

    def __call__(self, positions: Tensor, hidden: Tensor, batch: Any, *rest: Any, **named: Any) -> tuple[Any, ...]:
        explicit = len(rest) == 4  # residual, two allocators, scaling; newer forwards keep the residual aside
        residual = rest[0] if explicit else self.stream["residual"]
        residual = hidden if residual is None else residual.add_(hidden)
        if named.get("captured_last_layer_outputs") is not None:
            named["captured_last_layer_outputs"].append(residual.clone())
        out: tuple[Any, ...] = (residual + 1, residual) if explicit else (residual + 1,)
        self.stream["residual"] = residual
        return (*out, None) if "prev_topk_indices" in named else out


def _inner(init: ast.FunctionDef, x: Tensor, num_layers: int, stream: dict[str, Any]) -> SimpleNamespace:
    inner = SimpleNamespace(
        pp_group=SimpleNamespace(is_first_rank=True, is_last_rank=True),
        start_layer=0,
        end_layer=num_layers,
        first_k_dense_replace=1,
        layers=[_Layer(stream) for _ in range(num_layers)],
        layers_to_capture=[],
        embed_tokens=lambda ids: x.clone(),
        norm=lambda hidden, residual=None: (hidden + residual, residual),
        enable_a2a_moe=False,
        llama_4_scaling_config=None,
        gemm_output_zero_allocator_size=0,
        nsa_enable_prefill_cp=False,
        dsa_enable_prefill_cp=False,
        mla_enable_prefill_cp=False,
        use_dsa=False,
        config=SimpleNamespace(num_hidden_layers=num_layers),
        next_full_attention_layer_id={},
        _dsa_forward_uses_topk=lambda: False,
    )
    for node in ast.walk(init):  # the flag's default, when the file's __init__ gives one
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == f"self.{FLAG}":
            setattr(inner, FLAG, ast.literal_eval(node.value))
    return inner


def _stand_ins(root: Path, stream: dict[str, Any]) -> dict[str, Any]:
    def finish(hidden: Tensor, *_: Any) -> Tensor:
        return hidden + stream["residual"]

    stands: dict[str, Any] = {
        "torch": torch,
        "nullcontext": contextlib.nullcontext,
        "residual_batch": SimpleNamespace(
            start=lambda batch: stream.update(residual=None),
            complete_output=finish,
            final_norm=lambda hidden, *_: hidden,
        ),
    }
    collectors = root / "srt/layers/aux_hidden_states.py"
    if collectors.exists():
        spec = importlib.util.spec_from_file_location("aux_hidden_states_of_tree", collectors)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        stands["AuxHiddenStatePacker"] = module.AuxHiddenStatePacker
    return stands


def _function(module: ast.Module, owner: str, name: str) -> ast.FunctionDef:
    (found,) = [
        function
        for node in module.body
        if isinstance(node, ast.ClassDef) and node.name == owner
        for function in node.body
        if isinstance(function, ast.FunctionDef) and function.name == name
    ]
    return found


def _compiled(function: ast.FunctionDef, stands: dict[str, Any]) -> Any:
    """The function with `stands` for its globals; every other global is a mock, or says no to context parallelism."""
    place: dict[str, Any] = dict(stands)
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and node.id not in place and not hasattr(builtins, node.id):
            place[node.id] = (lambda *_: False) if "prefill_cp" in node.id else MagicMock()
    whole = ast.Module(body=[function], type_ignores=[])
    code = compile(whole, "<tree>", "exec", flags=__future__.annotations.compiler_flag)
    exec(code, place)
    return place[function.name]
