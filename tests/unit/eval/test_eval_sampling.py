"""Speculative sampling: the text must be distributed as plain sampling, whatever the draft believes."""

from __future__ import annotations

import itertools

import torch
from eval_models import fill, make_shape, make_target, make_wiring

from eagle3.draft import Eagle3Draft
from eval.engines.chain import Sampled
from eval.engines.local import LocalEngine


def chi_square_limit(freedom: int) -> float:
    """99.9% quantile of chi square (Wilson and Hilferty 1931)."""
    term = 2 / (9 * freedom)
    return freedom * (1 - term + 3.09 * term**0.5) ** 3


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    scale = expected * counts.sum()
    assert scale.min() > 2
    return float(((counts - scale) ** 2 / scale).sum())


def test_one_verdict_follows_the_target() -> None:
    """Two proposals over a draft vocabulary of 3 in a vocabulary of 5; both places must follow p."""
    ids = torch.tensor([0, 2, 3])
    draft_logits = torch.tensor([[2.0, 0.0, -1.0]])
    target_logits = torch.tensor([[0.0, 1.0, 0.5, -0.5, 0.2], [1.0, 0.0, -0.3, 0.4, 0.3], [0.1, 0.6, 0.0, 0.5, -0.2]])
    p = torch.softmax(target_logits / 0.8, dim=-1)
    judge = Sampled(0.8, seed=3, draft_ids=ids)
    places = [torch.zeros(5), torch.zeros(5), torch.zeros(5)]
    proposed = torch.zeros(5)
    for _ in range(2500):
        proposals = [int(ids[judge.propose(draft_logits)]) for _ in range(2)]
        proposed[proposals[0]] += 1
        kept, bonus = judge.judge(target_logits, proposals)
        for place, token in enumerate([*proposals[:kept], bonus]):
            places[place][token] += 1
    for place in range(3):
        assert chi_square(places[place], p[place]) < chi_square_limit(4)
    assert chi_square(proposed, p[0]) > 10 * chi_square_limit(4)  # the draft alone is far off, so the test can fail


def test_text_is_distributed_as_plain_sampling() -> None:
    """Tokens 2 and 3 of many short texts against the exact probabilities, for the drafted and the plain engine."""
    vocab, prompt, temperature, draws = 4, [1, 3], 2.5, 300
    target = make_target(vocab, layers=3)
    draft = fill(Eagle3Draft(make_shape(vocab, 3)), target, ids=[0, 1, 3])
    engine = LocalEngine(target, draft, make_wiring(0, 2, 1, layers=3))
    exact = torch.zeros(vocab, vocab, dtype=torch.float64)
    for first, second in itertools.product(range(vocab), repeat=2):
        logits = target(torch.tensor([[*prompt, first, second]])).logits[0].detach() / temperature
        p = torch.softmax(logits, dim=-1)
        exact[second] += p[1, first] * p[2, second] * p[3]
    kept = 0
    for drafted in (True, False):
        counts = torch.zeros(vocab, vocab)
        for seed in range(draws):
            if drafted:
                made = engine.generate(prompt, 3, 2, temperature, seed)
                kept += made.correct
            else:
                made = engine.baseline(prompt, 3, temperature, seed)
            counts[made.tokens[1], made.tokens[2]] += 1
        assert chi_square(counts.flatten(), exact.flatten()) < chi_square_limit(vocab * vocab - 1)
    assert draws / 4 < kept < draws * 2


def test_a_seed_repeats_its_text(target, draft, wiring) -> None:
    engine = LocalEngine(target, draft, wiring)
    texts = [engine.generate([1, 2, 3], 30, 3, 1.0, seed).tokens for seed in (5, 5, 6)]
    assert texts[0] == texts[1] != texts[2]
