"""Tests only: what has to be in place before SGLang is imported on a CPU.

The torchvision wheel of PyPI (built for CUDA) registers a fake kernel for `torchvision::nms` when imported, which needs
the operator's schema to exist beside the CPU build of torch. Packed experts have no kernel on a CPU
(`packed_experts_cpu.py`). And SGLang's latent-attention draft waits for CUDA after it takes the target's embedding
(kimi_k25_eagle3.py, `set_embed`): on a CPU there is nothing to wait for.
"""

import os

if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    import torch

    _schemas = torch.library.Library("torchvision", "DEF")  # kept: the schemas live as long as it does
    _schemas.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _schemas.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

    if not torch.backends.cuda.is_built():
        torch.cuda.synchronize = lambda device=None: None

    import packed_experts_cpu
    from after_import import patch_after_import

    patch_after_import(
        {
            packed_experts_cpu.SCHEME: packed_experts_cpu.patch_scheme,
            packed_experts_cpu.CONFIG: packed_experts_cpu.patch_config,
        }
    )
