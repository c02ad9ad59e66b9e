"""Cache bookkeeping of speculative decoding: which slots a draft writes, what a verify keeps."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor


def assign_req_to_token_pool_cpu(
    requests: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, slots: Tensor, _pool_len: int
) -> None:
    """Write `slots` (all requests' one after another) to positions `start..end` of each request's row."""
    at = 0
    for row in range(requests.numel()):
        first, last = int(start[row]), int(end[row])
        req_to_token[int(requests[row]), first:last] = slots[at : at + last - first].to(req_to_token.dtype)
        at += last - first


def assign_extend_cache_locs_cpu(
    requests: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, out: Tensor, _pool_len: int
) -> None:
    """Read the slots at positions `start..end` of each request into `out`, one after another."""
    at = 0
    for row in range(requests.numel()):
        first, last = int(start[row]), int(end[row])
        out[at : at + last - first] = req_to_token[int(requests[row]), first:last].to(out.dtype)
        at += last - first


def assign_draft_cache_locs_contiguous_cpu(
    requests: Tensor, req_to_token: Tensor, seq_lens: Tensor, out: Tensor, _pool_len: int, topk: int, steps: int
) -> None:
    """The slots that a draft of `topk` branches and `steps` steps writes: `topk * steps` after each text's end."""
    count = topk * steps
    for row in range(requests.numel()):
        end = int(seq_lens[row])
        out[row * count : (row + 1) * count] = req_to_token[int(requests[row]), end : end + count].to(out.dtype)


def build_draft_decode_metadata_cpu(
    req_to_token: Tensor, requests: Tensor, seq_lens: Tensor, topk: int, steps: int, pool_len: int
) -> Tensor:
    """A row of slots per branch `[B * topk, pool_len]`: the shared text, then the branch's own `steps` slots."""
    rows = torch.zeros(requests.numel() * topk, pool_len, dtype=req_to_token.dtype)
    for row in range(requests.numel()):
        end, text = int(seq_lens[row]), req_to_token[int(requests[row])]
        for branch in range(topk):
            own = text[end + branch * steps : end + (branch + 1) * steps]
            rows[row * topk + branch, :end] = text[:end]
            rows[row * topk + branch, end : end + steps] = own
    return rows


def fill_bonus_tokens_cpu(accepted: Tensor, lengths: Tensor, bonus: Tensor, stride: int) -> None:
    """The last accepted token of each request; `accepted` is flat `[B * stride]`."""
    flat = accepted.reshape(-1)
    for row in range(lengths.numel()):
        bonus[row] = flat[row * stride + int(lengths[row]) - 1]


def fill_accept_out_cache_loc_cpu(accept_index: Tensor, slots: Tensor, out: Tensor) -> None:
    """The slots of the accepted tokens (`accept_index` holds -1 where nothing was accepted), packed to the front."""
    kept = accept_index.reshape(-1)
    kept = kept[kept > -1].long()
    out.reshape(-1)[: kept.numel()] = slots[kept]


def copy_all_layer_kv_cache_cpu(pointers: Tensor, strides: Tensor, target: Tensor, source: Tensor) -> None:
    """Move cache slots `source -> target` in every layer's buffer, given by address and bytes a slot."""
    for address, stride in zip(pointers.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(address + slot * stride, stride) for slot in source.tolist()]  # read all, then write
        for slot, row in zip(target.tolist(), rows, strict=True):
            ctypes.memmove(address + slot * stride, row, stride)
