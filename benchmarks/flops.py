"""Floating-point operations that a training step cannot do without: what a share of the matrix rate is measured by.

Matrix products alone are counted, two operations a multiply-add; forward once, backward once for each operand that has
a gradient:

    fc         2 x n0 x A H H       x 2   (its input has no gradient; x 3 behind a norm of its own)
    layer      2 x (n0 x keys + r0 x asking + sum over k >= 1 of r_k x (keys + asking))   x 3
    words      2 x (n0' x keys' + r0' x asking')   x 3
    attention  2 x pairs x heads x (D + Dv)   x 3
    head       2 x (rows read, over all steps) x Vd H   x 3
    teacher    2 x (teacher rows) x V H   x 1

`n0`: rows up to the last asking one of each document; `r_k`: rows on which some loss of step k or later depends;
`keys`: elements of the matrices that make keys and values, `asking` those of the queries, the output and the MLP; of
those that read a word beside a state, the words' half stands in the line below, for it is the same in whichever step
reads the word: `n0'`, `r0'` are the rows whose word some step reads for a key, for a query. `pairs`: a query with a key
it sees. Whatever an implementation computes beyond that (prompt rows, recomputed
activations, a flash kernel's second pass over the scores) counts for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from eagle3.draft_shape import DraftShape
from eagle3.ttt import PackedBatch
from train.memory import WORD_READERS, trained_parameters

KEY_MATRICES = ("k_proj", "v_proj", "kv_a_proj_with_mqa", "kv_b_proj")


@dataclass(frozen=True)
class Work:
    """How many rows each part of a step has to see.

    Args:
        keyed: rows that are fused and become keys of step 0.
        asked: rows that ask in each step, `[K]`.
        pairs: queries with a key they see, of each step, `[K]`.
        read: rows whose logits each step needs, `[K]`.
        taught: teacher rows whose distribution is needed.
        key_words, query_words: rows whose word is read for a key, for a query, by whichever step.
    """

    keyed: int
    asked: tuple[int, ...]
    pairs: tuple[int, ...]
    read: tuple[int, ...]
    taught: int
    key_words: int
    query_words: int


def needed_work(batch: PackedBatch, steps: int) -> Work:
    """The least that the losses of a packed batch depend on."""
    supervised = batch.supervised(steps)  # [N, K]
    places = batch.positions()  # [N]
    asking = [supervised[:, k:].any(1) for k in range(steps)]  # K x [N]
    keys = torch.zeros_like(batch.loss_mask)  # [N] rows before a document's last asking one, itself included
    for whole, ask in zip(keys.split(batch.doc_lengths), asking[0].split(batch.doc_lengths), strict=True):
        whole[: int(ask.nonzero()[-1]) + 1 if bool(ask.any()) else 0] = True
    later, taught = torch.zeros_like(keys), torch.zeros_like(keys)  # [N] words that later steps read; teacher rows
    for k in range(steps):
        later[k:] |= asking[k][: batch.rows - k] if k else False
        taught[k:] |= supervised[: batch.rows - k, k]
    return Work(
        keyed=int(keys.sum()),
        asked=tuple(int(one.sum()) for one in asking),
        pairs=tuple(int((places[one] + 1 + k).sum()) for k, one in enumerate(asking)),
        read=tuple(supervised.sum(0).tolist()),
        taught=int(taught.sum()),
        key_words=int((keys | later).sum()),
        query_words=int((asking[0] | later).sum()),
    )


def step_flops(shape: DraftShape, work: Work) -> dict[str, float]:
    """Operations of one forward and backward, by part (formulas: the module's docstring); their sum is `total`."""
    sizes = {name: size for name, size in trained_parameters(shape).items() if "norm" not in name}
    fc, head = sizes.pop("fc.weight"), sizes.pop("lm_head.weight")
    keys = sum(size for name, size in sizes.items() if _last(name) in KEY_MATRICES)
    key_words = sum(sizes[name] // 2 for name in sizes if _last(name) in KEY_MATRICES and _last(name) in WORD_READERS)
    words = sum(sizes[name] // 2 for name in sizes if _last(name) in WORD_READERS)
    keys, asking = keys - key_words, sum(sizes.values()) - keys - (words - key_words)
    layer = work.keyed * keys + work.asked[0] * asking + sum(work.asked[1:]) * (keys + asking)
    normed_input = shape.fc_norm or shape.norm_before_fc
    parts = {
        "fc": 2.0 * work.keyed * fc * (3 if normed_input else 2),
        "layer": 6.0 * layer,
        "words": 6.0 * (work.key_words * key_words + work.query_words * (words - key_words)),
        "attention": 6.0 * sum(work.pairs) * shape.num_attention_heads * (shape.head_dim + shape.value_dim),
        "head": 6.0 * sum(work.read) * head,
        "teacher": 2.0 * work.taught * shape.vocab_size * shape.hidden_size,
    }
    return {**parts, "total": sum(parts.values())}


def _last(name: str) -> str:
    """`midlayer.self_attn.q_proj.weight` -> `q_proj`."""
    return name.split(".")[-2]
