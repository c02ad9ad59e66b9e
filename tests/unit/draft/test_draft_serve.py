"""The unrolled training forward is what a server with a key cache computes."""

from __future__ import annotations

import pytest
import torch

from eagle3.draft import DraftCache
from eagle3.ttt import unroll

STEPS = 4


def test_step_zero_equals_serving_in_pieces(make_draft, make_batch, variant):
    draft, batch = make_draft(**variant), make_batch([13])
    trained = unroll(draft, batch, 1)[0]
    cache, served = DraftCache(), []
    for start, end in ((0, 6), (6, 7), (7, 13)):
        hidden = draft.fuse(batch.features[start:end])
        served.append(draft.serve_step(hidden, batch.token_ids[start:end], torch.arange(start, end), cache))
    assert cache.length == 13
    torch.testing.assert_close(torch.cat(served), trained, rtol=1e-10, atol=1e-10)


def test_each_step_equals_drafting_with_a_cache(make_draft, make_batch, variant):
    """At every row: read the prefix, draft STEPS - 1 tokens, drop them, go on; all g's equal the unrolled ones."""
    draft, batch = make_draft(**variant), make_batch([5, 9], seed=1)
    trained = unroll(draft, batch, STEPS)
    start = 0
    for length in batch.doc_lengths:
        cache = DraftCache()
        for t in range(length):
            row = start + t
            hidden = draft.fuse(batch.features[row : row + 1])
            for k in range(min(STEPS, length - t)):
                token, position = batch.token_ids[row + k : row + k + 1], torch.tensor([t + k])
                hidden = draft.serve_step(hidden, token, position, cache)
                torch.testing.assert_close(hidden[0], trained[k][row], rtol=1e-9, atol=1e-9, msg=f"row {row} step {k}")
            cache.crop(t + 1)
        start += length


def test_unrolling_some_rows_gives_the_same_rows(make_draft, make_batch, variant):
    draft, batch = make_draft(**variant), make_batch([5, 9, 2], seed=2)
    rows = torch.tensor([1, 4, 5, 11, 15])
    every, some = unroll(draft, batch, STEPS), unroll(draft, batch, STEPS, rows)
    for k in range(STEPS):
        torch.testing.assert_close(some[k], every[k][rows], rtol=1e-10, atol=1e-10)


def test_documents_do_not_see_each_other(make_draft, make_batch, variant):
    draft, batch = make_draft(**variant), make_batch([6, 7], seed=3)
    before = unroll(draft, batch, STEPS)
    batch.features[:6] += 1.0
    batch.token_ids[:6] = (batch.token_ids[:6] + 1) % 40
    after = unroll(draft, batch, STEPS)
    for k in range(STEPS):
        assert torch.equal(before[k][6:], after[k][6:])
        assert not torch.allclose(before[k][: 6 - k], after[k][: 6 - k])


def test_a_row_does_not_see_later_states(make_draft, make_batch, variant):
    """Features after row t and tokens after t + k must not reach g_k[t]."""
    draft, batch = make_draft(**variant), make_batch([10], seed=4)
    before = unroll(draft, batch, STEPS)
    batch.features[6:] += 1.0
    batch.token_ids[8:] = (batch.token_ids[8:] + 1) % 40
    after = unroll(draft, batch, STEPS)
    assert torch.equal(before[2][:6], after[2][:6])  # row 5, step 2 reads token 7
    assert not torch.equal(before[3][5], after[3][5])  # row 5, step 3 reads token 8


def test_the_layer_follows_its_formula(make_draft):
    """Order of norms, residual and concatenation, written out once more for a single token."""
    draft = make_draft()
    layer, h, token = draft.midlayer, torch.randn(1, 16, dtype=torch.float64), torch.tensor([7])

    def norm(x, module):
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * module.weight

    a = torch.cat((norm(draft.embed_tokens.weight[token], layer.input_layernorm), norm(h, layer.hidden_norm)), -1)
    attn = layer.self_attn
    value = (a @ attn.v_proj.weight.T).view(2, 1, 8).expand(2, 3, 8).reshape(1, 48)  # one key: its value
    mid = h + value @ attn.o_proj.weight.T
    x = norm(mid, layer.post_attention_layernorm)
    gate = torch.nn.functional.silu(x @ layer.mlp.gate_proj.weight.T) * (x @ layer.mlp.up_proj.weight.T)
    expected = mid + gate @ layer.mlp.down_proj.weight.T
    g = draft.serve_step(h, token, torch.tensor([0]), DraftCache())
    torch.testing.assert_close(g, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(draft.logits(g), norm(expected, draft.norm) @ draft.lm_head.weight.T)


def test_cropping_past_the_end_is_refused():
    with pytest.raises(ValueError, match="cannot crop"):
        DraftCache().crop(1)
