"""The tree of proposals: building it from what the draft picked, and judging it greedily.

The tree has `n` nodes a request, node 0 being the last token of the text. `selected` names the other `n - 1` by their
index among all candidates, in order; candidate `c` was proposed under the branch `c // topk`, and branch `b > 0`
continues candidate `parents[b]` (branch 0 continues node 0).
"""

from __future__ import annotations

from torch import Tensor

QLEN_ONLY = 1  # the mask covers the new tokens alone: [B, n, n]


def _parent(node: int, selected: list[int], parents: list[int], topk: int) -> int:
    """The node that `node` (>= 1) continues."""
    branch = selected[node - 1] // topk
    return selected.index(parents[branch]) + 1 if branch > 0 else 0


def build_tree_kernel_efficient_cpu(
    parent_list: Tensor,
    selected_index: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    topk: int,
    _depth: int,
    n: int,
    mode: int,
) -> None:
    """Fill the mask (each node sees itself and its ancestors), the positions, and first-child / next-sibling links."""
    if int(mode) != QLEN_ONLY:
        raise NotImplementedError(f"the CPU stand-in builds only masks over the new tokens, not mode {mode}")
    masks, places = tree_mask.view(-1, n, n), positions.view(-1, n)
    for row in range(seq_lens.numel()):
        selected = selected_index[row].reshape(-1).tolist()
        parents = parent_list.reshape(seq_lens.numel(), -1)[row].tolist()
        up = [-1] + [_parent(node, selected, parents, topk) for node in range(1, n)]
        masks[row] = False
        for node in range(n):
            at, depth = node, 0
            while at != -1:
                masks[row, node, at] = True
                at, depth = up[at], depth + 1
            places[row, node] = int(seq_lens[row]) + depth - 1
            retrive_index[row, node] = row * n + node
        for node in range(n - 1, 0, -1):  # backwards, so that the first child ends up first
            retrive_next_sibling[row, node] = retrive_next_token[row, up[node]]
            retrive_next_token[row, up[node]] = node


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Walk down from node 0 along children that are the target's own argmax; the last prediction is the bonus token."""
    wanted = target_predict.reshape(-1).tolist()
    tokens, index, child, sibling = (
        t.tolist() for t in (candidates, retrive_index, retrive_next_token, retrive_next_sibling)
    )
    for row in range(candidates.shape[0]):
        node, kept = 0, 0
        accept_index[row, 0] = index[row][0]
        while kept + 1 < accept_index.shape[1]:
            at = index[row][node]
            next_node = child[row][node]
            while next_node != -1 and tokens[row][next_node] != wanted[at]:
                next_node = sibling[row][next_node]
            if next_node == -1:
                break
            predicts[at] = wanted[at]
            node, kept = next_node, kept + 1
            accept_index[row, kept] = index[row][node]
        last = index[row][node]
        predicts[last] = wanted[last]
        accept_token_num[row] = kept
