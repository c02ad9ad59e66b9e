"""Each stand-in kernel against a plain reference written another way."""

from __future__ import annotations

import itertools
import random
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

SLOTS, POSITIONS = 64, 24


def paged(lengths: list[int], seed: int) -> tuple[Tensor, Tensor]:
    """`(req_to_token [R, P], request rows)`: every text's positions lie on scattered slots, rows in another order."""
    order = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(seed))
    table = torch.zeros(len(lengths) + 2, POSITIONS, dtype=torch.int32)
    rows = torch.tensor([len(lengths) + 1 - i for i in range(len(lengths))])
    at = 0
    for row, length in zip(rows.tolist(), lengths, strict=True):
        table[row, :length] = order[at : at + length].int()
        at += length
    return table, rows


def dense(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    """`[T, heads, dim]` attention by torch itself."""
    q, k, v = (t.double().transpose(0, 1)[None] for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)[0].transpose(0, 1)


@pytest.mark.parametrize("heads, kv_heads, dim, value_dim", [(4, 4, 8, 8), (6, 2, 8, 8), (4, 1, 12, 8)])
def test_extend_attends_to_the_cached_prefix_and_causally_to_the_new(
    sgl_kernel: ModuleType, heads: int, kv_heads: int, dim: int, value_dim: int
) -> None:
    torch.manual_seed(0)
    lengths, new = [9, 5, 12], [4, 5, 1]
    table, rows = paged(lengths, seed=1)
    keys, values = torch.randn(SLOTS, kv_heads, dim), torch.randn(SLOTS, kv_heads, value_dim)
    q = torch.randn(sum(new), heads, dim)
    starts = [0, 4, 9]
    own = [table[row, n - e : n].long() for row, n, e in zip(rows.tolist(), lengths, new, strict=True)]
    k, v = torch.cat([keys[s] for s in own]), torch.cat([values[s] for s in own])
    out = torch.empty(sum(new), heads, value_dim)
    tensors = [torch.tensor(x) for x in (lengths, new, starts)]
    sgl_kernel.extend_attention_cpu(
        q, k, v, out, keys, values, 1.0, 1.0, table, rows, *tensors, max(new), 0.3, 0.0, False, 0, None, None, None
    )
    for row, length, count, start in zip(rows.tolist(), lengths, new, starts, strict=True):
        slots = table[row, :length].long()
        see = torch.arange(length)[None] <= torch.arange(length - count, length)[:, None]
        expected = dense(q[start : start + count], keys[slots], values[slots], 0.3, see)
        torch.testing.assert_close(out[start : start + count].double(), expected, atol=1e-5, rtol=1e-5)


def test_extend_under_a_tree_mask_sees_the_whole_prefix_and_only_the_branch(sgl_kernel: ModuleType) -> None:
    torch.manual_seed(0)
    lengths, count = [10, 7], 4
    table, rows = paged(lengths, seed=2)
    keys, values, q = torch.randn(SLOTS, 2, 8), torch.randn(SLOTS, 2, 8), torch.randn(2 * count, 4, 8)
    branch = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]).bool()
    mask = torch.stack([branch, torch.eye(count).bool()])
    out = torch.empty(2 * count, 4, 8)
    tensors = [torch.tensor(x) for x in (lengths, [count, count], [0, count])]
    sgl_kernel.extend_attention_cpu(
        q, None, None, out, keys, values, 1.0, 1.0, table, rows, *tensors, count, 0.5, 0.0, False, 0, None, None,
        mask.flatten(),
    )  # fmt: skip
    for i, (row, length) in enumerate(zip(rows.tolist(), lengths, strict=True)):
        slots, here = table[row, :length].long(), slice(i * count, (i + 1) * count)
        see = torch.cat([torch.ones(count, length - count).bool(), mask[i]], dim=1)
        torch.testing.assert_close(
            out[here].double(), dense(q[here], keys[slots], values[slots], 0.5, see), atol=1e-5, rtol=1e-5
        )


def test_extend_with_a_soft_cap(sgl_kernel: ModuleType) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, 1, 4) for _ in range(3))
    got = sgl_kernel.attention.attend(q, k, v, 2.0, 1.5, None)
    scores = 1.5 * torch.tanh(2.0 * q[:, 0] @ k[:, 0].T / 1.5)
    torch.testing.assert_close(got[:, 0], scores.softmax(-1) @ v[:, 0])


@pytest.mark.parametrize("kv_heads, dim, value_dim", [(2, 8, 8), (1, 12, 8)])
def test_decode_writes_its_row_then_attends_to_all(
    sgl_kernel: ModuleType, kv_heads: int, dim: int, value_dim: int
) -> None:
    """Two texts; with one latent head the values are the first part of the keys, as MLA caches them."""
    torch.manual_seed(0)
    lengths = [6, 9]
    table, rows = paged(lengths, seed=3)
    keys = torch.randn(SLOTS, kv_heads, dim)
    values = keys[..., :value_dim] if kv_heads == 1 else torch.randn(SLOTS, kv_heads, value_dim)
    q, k, v = torch.randn(2, 4, dim), torch.randn(2, kv_heads, dim), torch.randn(2, kv_heads, value_dim)
    if kv_heads == 1:
        v = k[..., :value_dim]
    loc = torch.stack([table[row, n - 1] for row, n in zip(rows.tolist(), lengths, strict=True)])
    out = torch.empty(2, 4, value_dim)
    sgl_kernel.decode_attention_cpu(
        q, keys, values, 1.0, 1.0, out, k, v, loc, torch.empty(0), table, rows, torch.tensor(lengths), 0.3, 0.0,
        False, 0, None, None,
    )  # fmt: skip
    for i, (row, length) in enumerate(zip(rows.tolist(), lengths, strict=True)):
        slots = table[row, :length].long()
        assert torch.equal(keys[slots[-1]], k[i]) and torch.equal(values[slots[-1]], v[i])
        expected = dense(q[i : i + 1], keys[slots], values[slots], 0.3, None)
        torch.testing.assert_close(out[i : i + 1].double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("bad", [{"is_cross": True}, {"window": 4}, {"sinks": torch.ones(1)}])
def test_what_attention_does_not_offer_is_refused(sgl_kernel: ModuleType, bad: dict) -> None:
    options = {"is_cross": False, "window": 0, "sinks": None} | bad
    with pytest.raises(NotImplementedError, match="cross attention, sliding window or sinks"):
        sgl_kernel.attention._refuse_unsupported(**options)


def random_tree(topk: int, steps: int, nodes: int, seed: int) -> tuple[list[int], list[int]]:
    """`(parents of branches, selected candidates)` as EAGLE's draft gives them: the best `nodes - 1` candidates.

    Step 0 offers candidates 0..topk-1 under the root; step s > 0 offers topk under each of the topk branches kept
    from step s - 1. A selected candidate's ancestors are selected too.
    """
    dice = random.Random(seed)
    parents, score = [-1], {c: dice.random() for c in range(topk)}
    last = list(range(topk))
    for step in range(1, steps):
        kept = sorted(last, key=lambda c: -score[c])[:topk]
        first = topk + (step - 1) * topk * topk
        last = []
        for place, parent in enumerate(kept):
            parents.append(parent)
            for child in range(topk):
                candidate = first + place * topk + child
                score[candidate] = score[parent] * dice.random()
                last.append(candidate)
    return parents, sorted(sorted(score, key=lambda c: -score[c])[: nodes - 1])


def paths(topk: int, parents: list[int], selected: list[int]) -> list[list[int]]:
    """For every node the chain of nodes from the root to it, following candidates upwards."""
    out = [[0]]
    for candidate in selected:
        chain = [candidate]
        while chain[0] >= topk:
            chain.insert(0, parents[chain[0] // topk])
        out.append([0] + [selected.index(c) + 1 for c in chain])
    return out


@pytest.mark.parametrize("topk, steps, nodes", [(1, 3, 4), (2, 3, 6), (4, 3, 8), (3, 4, 12)])
def test_the_tree_and_its_greedy_walk(sgl_kernel: ModuleType, topk: int, steps: int, nodes: int) -> None:
    """Mask, positions and links from the branches' paths; the walk keeps the longest path that the target wrote."""
    trees = [random_tree(topk, steps, nodes, seed) for seed in range(6)]
    batch, seq_lens = len(trees), torch.arange(5, 11)
    mask = torch.ones(batch * nodes * nodes, dtype=torch.bool)
    positions = torch.zeros(batch * nodes, dtype=torch.int64)
    index, child, sibling = (torch.full((batch, nodes), -1) for _ in range(3))
    sgl_kernel.build_tree_kernel_efficient_cpu(
        torch.tensor([parents for parents, _ in trees]), torch.tensor([picked for _, picked in trees]), seq_lens, mask,
        positions, index, child, sibling, topk, steps, nodes, 1,
    )  # fmt: skip
    for row, (parents, selected) in enumerate(trees):
        chains = paths(topk, parents, selected)
        for node, chain in enumerate(chains):
            assert mask.view(batch, nodes, nodes)[row, node].nonzero().flatten().tolist() == sorted(chain)
            assert positions.view(batch, nodes)[row, node] == seq_lens[row] + len(chain) - 1
            kids = [n for n, other in enumerate(chains) if other[:-1] == chain]
            linked, at = [], int(child[row, node])
            while at != -1:
                linked.append(at)
                at = int(sibling[row, at])
            assert linked == kids
    assert torch.equal(index.flatten(), torch.arange(batch * nodes))
    _check_walk(sgl_kernel, trees, topk, steps, nodes, index, child, sibling)


def _check_walk(
    sgl_kernel: ModuleType,
    trees: list,
    topk: int,
    steps: int,
    nodes: int,
    index: Tensor,
    child: Tensor,
    sibling: Tensor,
) -> None:
    dice = torch.Generator().manual_seed(7)
    batch = len(trees)
    tokens = torch.randint(0, 3, (batch, nodes), generator=dice)
    wanted = torch.randint(0, 3, (batch * nodes,), generator=dice)
    _distinct_siblings(tokens, trees, topk)
    predicts = torch.full((batch * nodes,), -7)
    accepted, kept = torch.full((batch, steps + 1), -1), torch.zeros(batch, dtype=torch.int64)
    sgl_kernel.verify_tree_greedy_cpu(predicts, accepted, kept, tokens, index, child, sibling, wanted)
    for row, (parents, selected) in enumerate(trees):
        want = wanted.view(batch, nodes)[row]
        right = [
            chain
            for chain in paths(topk, parents, selected)
            if all(tokens[row, b] == want[a] for a, b in itertools.pairwise(chain))
        ]
        best = max(right, key=len)
        assert kept[row] == len(best) - 1
        assert accepted[row][: len(best)].tolist() == [row * nodes + node for node in best]
        assert (accepted[row][len(best) :] == -1).all()
        for node in best:
            assert predicts[row * nodes + node] == want[node]


def _distinct_siblings(tokens: Tensor, trees: list, topk: int) -> None:
    """A draft never proposes one token twice under one node: give siblings tokens of their own."""
    for row, (parents, selected) in enumerate(trees):
        families: dict[tuple[int, ...], int] = {}
        for node, chain in enumerate(paths(topk, parents, selected)[1:], start=1):
            family = tuple(chain[:-1])
            tokens[row, node] = families.get(family, int(tokens[row, node]) % 2)
            families[family] = int(tokens[row, node]) + 1


def test_a_mask_over_the_whole_text_is_refused(sgl_kernel: ModuleType) -> None:
    empty = torch.empty(0)
    with pytest.raises(NotImplementedError, match="mode 0"):
        sgl_kernel.build_tree_kernel_efficient_cpu(*[empty] * 8, 1, 1, 2, 0)


def test_slots_are_written_and_read_by_position(sgl_kernel: ModuleType) -> None:
    table = torch.zeros(3, 10, dtype=torch.int32)
    rows, start, end = torch.tensor([2, 0]), torch.tensor([1, 4]), torch.tensor([3, 7])
    slots = torch.tensor([11, 12, 21, 22, 23])
    sgl_kernel.assign_req_to_token_pool_cpu(rows, table, start, end, slots, 10)
    assert table.tolist() == [[0, 0, 0, 0, 21, 22, 23, 0, 0, 0], [0] * 10, [0, 11, 12, 0, 0, 0, 0, 0, 0, 0]]
    back = torch.zeros(5, dtype=torch.int64)
    sgl_kernel.assign_extend_cache_locs_cpu(rows, table, start, end, back, 10)
    assert torch.equal(back, slots)


def test_each_branch_of_a_draft_has_its_own_slots_after_the_text(sgl_kernel: ModuleType) -> None:
    table = torch.arange(100, 120, dtype=torch.int32).view(1, 20)
    rows, lengths = torch.tensor([0]), torch.tensor([5])
    out = torch.zeros(6, dtype=torch.int64)
    sgl_kernel.assign_draft_cache_locs_contiguous_cpu(rows, table, lengths, out, 20, 2, 3)
    assert out.tolist() == [105, 106, 107, 108, 109, 110]
    branches = sgl_kernel.build_draft_decode_metadata_cpu(table, rows, lengths, 2, 3, 20)
    assert branches[:, :8].tolist() == [
        [100, 101, 102, 103, 104, 105, 106, 107],
        [100, 101, 102, 103, 104, 108, 109, 110],
    ]


def test_accepted_tokens_and_their_slots(sgl_kernel: ModuleType) -> None:
    bonus = torch.zeros(2, dtype=torch.int64)
    sgl_kernel.fill_bonus_tokens_cpu(torch.tensor([[5, 6, 0], [7, 0, 0]]), torch.tensor([2, 1]), bonus, 3)
    assert bonus.tolist() == [6, 7]
    out = torch.zeros(6, dtype=torch.int64)
    sgl_kernel.fill_accept_out_cache_loc_cpu(
        torch.tensor([[0, 2, -1], [3, -1, -1]]), torch.tensor([40, 41, 42, 43, 44, 45]), out
    )
    assert out[:3].tolist() == [40, 42, 43]


def test_cache_rows_move_in_every_layer_even_where_they_overlap(sgl_kernel: ModuleType) -> None:
    layers = [torch.randn(8, 2, 3), torch.randn(8, 5)]
    before = [layer.clone() for layer in layers]
    target, source = torch.tensor([1, 2, 3]), torch.tensor([2, 3, 7])
    pointers = torch.tensor([layer.data_ptr() for layer in layers])
    strides = torch.tensor([layer[0].numel() * 4 for layer in layers])
    sgl_kernel.copy_all_layer_kv_cache_cpu(pointers, strides, target, source)
    for layer, old in zip(layers, before, strict=True):
        expected = old.clone()
        expected[target] = old[source]
        assert torch.equal(layer, expected)


def test_a_kernel_that_is_not_provided_says_its_name(sgl_kernel: ModuleType) -> None:
    with pytest.raises(NotImplementedError, match="has no fused_experts_cpu"):
        sgl_kernel.fused_experts_cpu(1, 2)


def marlin_order(values: Tensor) -> Tensor:
    """`[E, N, K]` int4 values as SGLang loads a `pack-quantized` checkpoint for Marlin: int32 `[E, K / 8, N]`."""
    experts, outputs, inputs = values.shape
    packed = torch.empty(experts, inputs // 8, outputs, dtype=torch.int32)
    for e, n, word in itertools.product(range(experts), range(outputs), range(inputs // 8)):
        nibbles = [int(v) + 8 for v in values[e, n, 8 * word : 8 * word + 8]]
        number = int("".join(f"{nibble:x}" for nibble in reversed(nibbles)), 16)
        packed[e, word, n] = number - 2**32 if number >= 2**31 else number
    return packed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_experts_become_value_times_scale(sgl_kernel: ModuleType, dtype: torch.dtype) -> None:
    from sgl_kernel.packed import dequantize_packed_experts

    gen = torch.Generator().manual_seed(0)
    values = torch.randint(-8, 8, (2, 6, 64), generator=gen)
    scale = torch.rand(2, 6, 2, generator=gen).bfloat16()
    found = dequantize_packed_experts(marlin_order(values), scale.transpose(1, 2).contiguous(), dtype)
    groups = zip(values.double().split(32, dim=2), scale.double().split(1, dim=2), strict=True)
    expected = torch.cat([part * factor for part, factor in groups], dim=2)
    assert found.dtype == dtype and found.is_contiguous()
    assert torch.equal(found, expected.to(dtype))


def test_every_value_of_four_bits_is_told_from_every_other(sgl_kernel: ModuleType) -> None:
    from sgl_kernel.packed import dequantize_packed_experts

    values = torch.arange(-8, 8).view(1, 1, 16)
    assert torch.equal(
        dequantize_packed_experts(marlin_order(values), torch.ones(1, 1, 1), torch.float32), values.float()
    )
