"""Tests only: plain torch in place of SGLang's compiled CPU kernels, for machines without AVX-512 or AMX.

Every function keeps the arguments and the in-place results that SGLang 0.5.23 expects of the kernel of that name
(sgl-kernel/csrc/cpu). What is not provided raises by name when called, so that nothing runs on a silent stub.
"""

from __future__ import annotations

from typing import Any

import torch

from sgl_kernel.attention import decode_attention_cpu, extend_attention_cpu
from sgl_kernel.bookkeeping import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_draft_decode_metadata_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
)
from sgl_kernel.tree import build_tree_kernel_efficient_cpu, verify_tree_greedy_cpu

__version__ = "99.0.0"  # SGLang asks for a minimum
__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "decode_attention_cpu",
    "extend_attention_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "init_cpu_threads_env",
    "verify_tree_greedy_cpu",
]


def init_cpu_threads_env(_cores: str) -> str:
    """The kernel pins OpenMP threads to cores; here OMP_NUM_THREADS decides."""
    return ""


for _kernel in (extend_attention_cpu, decode_attention_cpu, init_cpu_threads_env):
    setattr(torch.ops.sgl_kernel, _kernel.__name__, _kernel)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_args: Any, **_kwargs: Any) -> Any:
        raise NotImplementedError(f"the CPU stand-in for SGLang's kernels has no {name}")

    missing.__name__ = name
    return missing
