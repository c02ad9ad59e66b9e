"""Tests only: let the torchvision wheel of PyPI (built for CUDA) be imported beside the CPU build of torch.

It registers a fake kernel for `torchvision::nms` when imported, which needs the operator's schema to exist.
"""

import os

if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    import torch

    _schemas = torch.library.Library("torchvision", "DEF")  # kept: the schemas live as long as it does
    _schemas.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _schemas.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
