"""Activation checkpointing gives the very values and gradients of the plain path, and keeps less."""

from __future__ import annotations

import pytest
import torch

from eagle3.draft_build import build_draft
from eagle3.draft_shape import DraftShape
from eagle3.ttt import unroll
from tests.unit.draft.conftest import SIZES
from train.losses import TeacherHead, step_weights, supervised_counts, ttt_loss

STEPS, LENGTHS = 4, [9, 1, 17, 6]
KINDS = {
    "llama": {},
    "mla": {
        "kind": "mla",
        "num_key_value_heads": 6,
        "head_dim": 12,
        "q_lora_rank": 10,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "norm_output": True,
    },
}


def small_draft(kind: str):
    torch.manual_seed(3)
    draft = build_draft(DraftShape(**{**SIZES, **KINDS[kind]})).double()
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return draft


def gradients(draft, loss):
    draft.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in draft.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("some", [False, True])
def test_outputs_and_gradients_are_equal(make_batch, kind, some):
    draft, batch = small_draft(kind), make_batch(LENGTHS)
    rows = torch.tensor([0, 2, 3, 10, 11, 15, 26, 30]) if some else None
    torch.manual_seed(5)
    asked = len(batch.token_ids) if rows is None else len(rows)
    pull = torch.randn(STEPS, asked, draft.shape.hidden_size, dtype=torch.float64)
    seen = {}
    for recompute in (False, True):
        outputs = torch.stack(unroll(draft, batch, STEPS, rows, recompute=recompute))
        seen[recompute] = (outputs.detach(), gradients(draft, (outputs * pull).sum()))
    torch.testing.assert_close(seen[True][0], seen[False][0], rtol=0, atol=0)
    assert seen[True][1].keys() == seen[False][1].keys() and len(seen[True][1]) > 8
    for name, plain in seen[False][1].items():
        assert plain.abs().max() > 0, name
        torch.testing.assert_close(seen[True][1][name], plain, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_and_its_gradients_are_equal(make_batch, kind):
    draft, batch = small_draft(kind), make_batch(LENGTHS)
    h, v = draft.shape.hidden_size, draft.shape.vocab_size
    teacher = TeacherHead(torch.rand(h, dtype=torch.float64), torch.randn(v, h, dtype=torch.float64), 1e-5)
    weights = step_weights(supervised_counts(batch, STEPS), 0.8)
    seen = {}
    for recompute in (False, True):
        parts = ttt_loss(draft, batch, teacher, weights, 8, recompute=recompute)
        seen[recompute] = (parts, gradients(draft, parts.loss))
    assert torch.equal(seen[True][0].loss, seen[False][0].loss)
    assert torch.equal(seen[True][0].right, seen[False][0].right)
    for name, plain in seen[False][1].items():
        torch.testing.assert_close(seen[True][1][name], plain, rtol=1e-12, atol=1e-14)


def kept_bytes(run) -> int:
    """Bytes of the tensors that autograd holds once `run` has made its graph, each storage once."""
    kept = {}

    def note(tensor):
        kept[tensor.untyped_storage().data_ptr()] = (tensor.untyped_storage().nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        held = run()
    assert held is not None
    return sum(size for size, _ in kept.values())


def test_less_is_kept_for_backward(make_batch):
    draft, batch = small_draft("llama"), make_batch([64])
    weights = sum(p.numel() * p.element_size() for p in draft.parameters())
    plain = kept_bytes(lambda: unroll(draft, batch, 7)) - weights
    few = kept_bytes(lambda: unroll(draft, batch, 7, recompute=True))
    assert few < plain / 3
