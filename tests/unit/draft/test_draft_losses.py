"""The chunked loss against its plain formula, and its counts against a count by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from eagle3.ttt import unroll
from train import losses
from train.config import OBJECTIVES
from train.losses import TeacherHead, block_rows, step_weights, supervised_counts, teacher_probs, ttt_loss
from train.objective import Objective

STEPS, LENGTHS = 4, [5, 11, 1, 8]


def head(normed=False, vocab=40):
    torch.manual_seed(9)
    return TeacherHead(
        torch.rand(16, dtype=torch.float64) + 0.5, torch.randn(vocab, 16, dtype=torch.float64), 1e-6, normed
    )


def plain(draft, batch, teacher, weights):
    """Row by row: loss, sums, and for each row a list of right/wrong per supervised step from step 0 on."""
    outputs, sums, chains, dropped = unroll(draft, batch, len(weights)), [0.0] * len(weights), [], set()
    ids = torch.arange(draft.shape.draft_vocab_size) + draft.d2t
    start = 0
    for length in batch.doc_lengths:
        for t in range(length):
            chain, whole = [], True
            for k in range(len(weights)):
                s = start + t + k
                if t + k >= length or not batch.loss_mask[s]:
                    whole = False
                    continue
                state = batch.teacher[s]
                if not teacher.normed:
                    state = state * (state.pow(2).mean() + teacher.eps).rsqrt() * teacher.norm_weight
                full = teacher.head @ state
                z = draft.logits(outputs[k][start + t])
                best = int(full.argmax())
                if draft.t2d[best]:
                    sums[k] = sums[k] - (full[ids].softmax(-1) * F.log_softmax(z, -1)).sum()
                else:
                    dropped.add(s)
                if whole:
                    chain.append(int(ids[z.argmax()]) == best)
            chains.append(chain)
        start += length
    loss = sum(w * s for w, s in zip(weights, sums, strict=True))
    return loss, sums, chains, len(dropped)


@pytest.mark.parametrize(("draft_vocab", "normed", "chunk"), [(40, False, 5), (17, False, 1), (17, True, 1000)])
def test_values_and_gradients_match_the_plain_formula(make_draft, make_batch, draft_vocab, normed, chunk):
    check_against_the_plain_formula(make_draft(draft_vocab_size=draft_vocab), make_batch(LENGTHS), head(normed), chunk)


def test_every_kind_of_draft_is_taught_by_the_same_formula(make_draft, make_batch, variant):
    check_against_the_plain_formula(make_draft(**variant, draft_vocab_size=17), make_batch(LENGTHS), head(), 7)


def check_against_the_plain_formula(draft, batch, teacher, chunk):
    weights = step_weights(supervised_counts(batch, STEPS), 0.8)
    parts = ttt_loss(draft, batch, teacher, weights, chunk)
    loss, sums, chains, dropped = plain(draft, batch, teacher, weights)
    torch.testing.assert_close(parts.loss, loss, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(parts.sums, torch.stack([s.detach() for s in sums]), rtol=1e-9, atol=1e-9)
    assert int(parts.dropped) == dropped and (dropped > 0) == (draft.shape.draft_vocab_size == 17)
    for k in range(STEPS):
        assert int(parts.tried[k]) == sum(len(c) > k and all(c[:k]) for c in chains)
        assert int(parts.right[k]) == sum(len(c) > k and all(c[: k + 1]) for c in chains)
    leaves = [p for p in draft.parameters() if p.requires_grad]
    got, wanted = torch.autograd.grad(parts.loss, leaves), torch.autograd.grad(loss, leaves)
    for g, w in zip(got, wanted, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-8, atol=1e-10)


def test_a_perfect_draft_is_counted_right_all_along(make_draft, make_batch):
    """Teacher states set so that the target says at row t what the draft says there at step 0."""
    draft, batch = make_draft(), make_batch([12], share=1.1)
    g = unroll(draft, batch, 1)[0]
    batch.teacher = draft.norm(g).detach()
    parts = ttt_loss(
        draft, batch, TeacherHead(draft.norm.weight, draft.lm_head.weight.detach(), 1e-5, True), torch.ones(1)
    )
    assert parts.right.tolist() == parts.tried.tolist() == parts.counts.tolist() == [12]
    probs = draft.logits(g).softmax(-1)
    entropy = -(probs * probs.log()).sum()
    torch.testing.assert_close(parts.loss, entropy)


def test_counts_come_from_masks_and_document_ends_alone(make_batch):
    batch = make_batch([3, 2])
    batch.loss_mask = torch.tensor([True, False, True, True, True])
    assert batch.supervised(3).int().tolist() == [[1, 0, 1], [0, 1, 0], [1, 0, 0], [1, 1, 0], [1, 0, 0]]
    assert supervised_counts(batch, 3).tolist() == [4, 2, 1]


def test_step_weights_are_means_with_decay_and_zero_for_an_empty_step():
    weights = step_weights(torch.tensor([10, 5, 0]), 0.5)
    assert weights.tolist() == pytest.approx([0.1, 0.1, 0.0])


def test_micro_batches_add_up_to_the_whole_batch(make_draft, make_batch):
    """With global counts, two micro-batches' losses and gradients sum to those of one batch."""
    draft, teacher = make_draft(), head()
    whole = make_batch([5, 9])
    parts = [
        type(whole)(*(getattr(whole, f)[s] for f in ("features", "token_ids", "teacher", "loss_mask")), [n])
        for s, n in ((slice(0, 5), 5), (slice(5, 14), 9))
    ]
    weights = step_weights(supervised_counts(whole, STEPS), 0.8)
    together = ttt_loss(draft, whole, teacher, weights).loss
    apart = sum(ttt_loss(draft, part, teacher, weights).loss for part in parts)
    torch.testing.assert_close(together, apart)
    for a, b in zip(
        torch.autograd.grad(together, draft.fc.weight), torch.autograd.grad(apart, draft.fc.weight), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_nothing_supervised_still_gives_a_zero_loss_with_gradients(make_draft, make_batch):
    draft, batch = make_draft(), make_batch([4], share=0.0)
    parts = ttt_loss(draft, batch, head(), torch.ones(3, dtype=torch.float64))
    parts.loss.backward()
    assert parts.loss.item() == 0.0 and parts.counts.tolist() == [0, 0, 0]
    assert all(p.grad is not None and not p.grad.any() for p in draft.parameters() if p.requires_grad)


def test_validation_without_gradients_gives_the_same_numbers(make_draft, make_batch):
    draft, batch, teacher = make_draft(), make_batch(LENGTHS), head()
    weights = torch.ones(STEPS, dtype=torch.float64)
    with torch.no_grad():
        quiet = ttt_loss(draft, batch, teacher, weights)
    loud = ttt_loss(draft, batch, teacher, weights)
    assert not quiet.loss.requires_grad
    assert torch.equal(quiet.sums, loud.sums) and torch.equal(quiet.right, loud.right)


@pytest.mark.parametrize("draft_vocab", [17, 40])
def test_teacher_probs_are_renormalised_and_judged_over_the_full_vocabulary(make_draft, monkeypatch, draft_vocab):
    monkeypatch.setattr(losses, "COLUMNS", 7)  # the rest of the vocabulary goes by in several pieces
    draft, teacher, states = make_draft(draft_vocab_size=draft_vocab), head(), torch.randn(9, 16, dtype=torch.float64)
    ids = torch.arange(draft_vocab) + draft.d2t
    full = teacher.logits(states) / 0.7
    probs, best = teacher_probs(states, teacher.arranged(draft), temperature=0.7)
    torch.testing.assert_close(probs, full.softmax(-1)[:, ids] / full.softmax(-1)[:, ids].sum(-1, keepdim=True))
    known = draft.t2d[full.argmax(-1)]
    assert known.sum() > 0 and bool(known.all()) == (draft_vocab == 40)
    assert torch.equal(best >= 0, known) and torch.equal(ids[best[known]], full.argmax(-1)[known])


@pytest.mark.parametrize("draft_vocab", [17, 40])
def test_a_head_kept_in_16_bits_teaches_the_same(make_draft, make_batch, monkeypatch, draft_vocab):
    monkeypatch.setattr(losses, "WIDENED", 3)  # widened in several pieces, the last one short
    draft, batch, weights = make_draft(draft_vocab_size=draft_vocab), make_batch(LENGTHS), torch.ones(STEPS)
    wide = head()
    wide = replace(wide, head=wide.head.bfloat16().double())
    narrow = wide.arranged(draft).to("cpu", torch.float64)
    assert narrow.head.dtype == torch.bfloat16 and narrow.norm_weight.dtype == torch.float64
    leaves, found = [p for p in draft.parameters() if p.requires_grad], []
    for teacher in (wide, narrow):
        parts = ttt_loss(draft, batch, teacher, weights, 9)
        found.append([parts.loss, parts.sums, parts.right, *torch.autograd.grad(parts.loss, leaves)])
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)
    assert torch.equal(narrow.logits(batch.teacher), wide.arranged(draft).logits(batch.teacher))


def test_blocks_of_a_large_vocabulary_are_smaller_on_a_cpu():
    assert block_rows(0, 32_000, cuda=True) == block_rows(0, 8_192, cuda=False) == 1024
    assert block_rows(0, 32_768, cuda=False) == 512 and block_rows(0, 1 << 30, cuda=False) == 1
    assert block_rows(77, 32_768, cuda=False) == block_rows(77, 8_192, cuda=True) == 77


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_any_objective_is_summed_over_its_rows(make_draft, make_batch, kind):
    draft, batch, objective = make_draft(draft_vocab_size=17), make_batch(LENGTHS), Objective(kind, ce_fade=0.5)
    teacher, weights = head(), step_weights(supervised_counts(batch, STEPS), 0.8)
    parts = ttt_loss(draft, batch, teacher, weights, 9, objective=objective)
    expected = 0.0
    for k, g in enumerate(unroll(draft, batch, STEPS)):
        for t in batch.supervised(STEPS)[:, k].nonzero()[:, 0].tolist():
            probs, best = teacher_probs(batch.teacher[t + k][None], teacher.arranged(draft))
            z = draft.logits(g[t])
            if best >= 0:
                expected = expected + weights[k] * objective.rows((z - z.max())[None, None].detach(), probs[:, None])[0]
    torch.testing.assert_close(parts.loss.detach(), expected.squeeze())


def test_rows_outside_the_vocabulary_may_teach_what_is_left(make_draft, make_batch):
    draft, batch, teacher = make_draft(draft_vocab_size=17), make_batch(LENGTHS), head()
    weights, taught = torch.ones(STEPS, dtype=torch.float64), Objective(outside="teach")
    inside = TeacherHead(teacher.norm_weight, teacher.head.clone(), teacher.eps)
    inside.head[~draft.t2d] = 0.0  # no token outside is ever the best
    draft.zero_grad()
    loud = ttt_loss(draft, batch, teacher, weights, 9, objective=taught)
    loud.loss.backward()
    found = [p.grad.clone() for p in draft.parameters() if p.grad is not None]
    draft.zero_grad()
    expected = ttt_loss(draft, batch, inside, weights, 9)
    expected.loss.backward()
    torch.testing.assert_close(loud.sums, expected.sums)
    torch.testing.assert_close(found, [p.grad for p in draft.parameters() if p.grad is not None])
    with torch.no_grad():  # a measurement: the loss of all rows, accuracy against the best token of all
        quiet, dropping = (ttt_loss(draft, batch, teacher, weights, 9, objective=o) for o in (taught, Objective()))
    torch.testing.assert_close(quiet.sums, loud.sums)
    assert torch.equal(quiet.right, dropping.right) and quiet.dropped == dropping.dropped > 0 == loud.dropped


def test_full_vocabulary_logits_never_exceed_one_block(make_draft, make_batch):
    """With a vocabulary far wider than anything else, the largest tensor is chunk x V."""
    from torch.utils._python_dispatch import TorchDispatchMode

    vocab, chunk, largest = 5000, 4, [0]

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            fresh = func not in (torch.ops.aten.t.default, torch.ops.aten.detach.default)
            for item in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(item, torch.Tensor) and fresh and vocab in item.shape and 16 not in item.shape:
                    largest[0] = max(largest[0], item.numel())
            return out

    draft, batch = make_draft(vocab_size=vocab, draft_vocab_size=vocab), make_batch([40, 30], share=0.9)
    with Watch():
        ttt_loss(draft, batch, head(vocab=vocab), torch.ones(3, dtype=torch.float64), chunk).loss.backward()
    assert largest[0] == 3 * (chunk // 3) * vocab
