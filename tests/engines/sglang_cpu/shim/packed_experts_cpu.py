"""Tests only: run compressed-tensors' int4 experts on a CPU, for which SGLang 0.5.23 has no kernel.

SGLang chooses the scheme, makes the parameters and loads the packed checkpoint into them, as on a GPU. Where it would
next repack them for the Marlin kernel, they are unpacked to plain weights instead, and run as SGLang runs unquantized
experts on a CPU without AMX. Scaling by the router's factor stays where SGLang's model code does it on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch

SCHEME = "sglang.srt.layers.quantization.compressed_tensors.schemes.compressed_tensors_wNa16_moe"
CONFIG = "sglang.srt.layers.quantization.compressed_tensors.compressed_tensors"


def patch_scheme(module: Any) -> None:
    """Give the Marlin scheme's class the CPU's way of finishing a load and of running."""
    from sgl_kernel.packed import dequantize_packed_experts

    def process_weights_after_loading(self: Any, layer: Any) -> None:
        if self.num_bits != 4 or not self.sym or self.actorder is not None:
            raise NotImplementedError("the CPU stand-in unpacks symmetric int4 experts without reordering only")
        for part in ("w13", "w2"):
            scale = getattr(layer, f"{part}_weight_scale")
            weight = dequantize_packed_experts(getattr(layer, f"{part}_weight_packed"), scale, scale.dtype)
            setattr(layer, f"{part}_weight", torch.nn.Parameter(weight, requires_grad=False))

    def create_moe_runner(self: Any, _layer: Any, moe_runner_config: Any) -> None:
        self.moe_runner_config = moe_runner_config
        self.runner = None

    def apply_weights(self: Any, layer: Any, dispatch_output: Any) -> Any:
        from sglang.srt.layers.moe.fused_moe_native import moe_forward_native
        from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

        x, topk = dispatch_output.hidden_states, dispatch_output.topk_output
        return StandardCombineInput(hidden_states=moe_forward_native(layer, x, topk, self.moe_runner_config))

    scheme = module.CompressedTensorsWNA16MoE
    scheme.process_weights_after_loading = process_weights_after_loading
    scheme.create_moe_runner = create_moe_runner
    scheme.apply_weights = apply_weights


def patch_config(module: Any) -> None:
    """Allow float32: the dtypes listed are those of the GPU kernels."""
    config = module.CompressedTensorsConfig
    listed = config.get_supported_act_dtypes
    config.get_supported_act_dtypes = lambda self: [*listed(self), torch.float32]
