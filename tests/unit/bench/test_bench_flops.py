"""The formula for needed operations, against torch's own count of the plain step and against counts by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.flops import Work, needed_work, step_flops
from benchmarks.gpu.synthetic import KIMI, SMALL, random_batch, random_parts
from benchmarks.plain_step import plain_loss
from benchmarks.scaling import whole_work
from eagle3.draft_layer import JointLinear
from train.front.estimate import flops_per_token
from train.losses import step_weights, supervised_counts
from train.memory import WORD_READERS

TINY = replace(SMALL, hidden=32, vocab=60, draft_vocabs=(20, 60), heads=2, head_dim=8)
CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", ["llama", "mla"])
@pytest.mark.parametrize("draft_vocab", TINY.draft_vocabs)
def test_the_plain_step_does_what_the_formula_says_of_its_rows(kind: str, draft_vocab: int) -> None:
    steps, documents, length = 3, 2, 10
    shape = TINY.shape(kind, draft_vocab=draft_vocab)
    parts = random_parts(shape, CPU, torch.float32)
    batch = random_batch(shape, [length] * documents, CPU, torch.float32)
    weights = step_weights(supervised_counts(batch, steps), 0.8)
    with FlopCounterMode(display=False) as counter:
        plain_loss(parts.draft, batch, parts.teacher, weights)[0].backward()
    rows = documents * length
    # Every row at every step, every row with every other; its own keys of later steps are no matrix product there.
    work = Work(rows, (rows,) * steps, (rows * length,) * steps, (rows,) * steps, rows, steps * rows, steps * rows)
    assert counter.get_total_flops() == step_flops(shape, work)["total"]


def test_work_is_what_the_losses_depend_on() -> None:
    shape = TINY.shape()
    batch = random_batch(shape, [4, 3, 2], CPU, torch.float32)
    batch.loss_mask = torch.tensor([0, 0, 1, 0, 1, 1, 0, 0, 0], dtype=torch.bool)
    work = needed_work(batch, 3)
    # Supervised (row, step): (2,0) (1,1) (0,2) of the first document; (4,0) (5,0) (4,1) of the second; the third: none.
    assert work.read == (3, 2, 1)
    assert work.asked == (5, 3, 1)
    assert work.keyed == 3 + 2
    assert work.pairs == (1 + 2 + 3 + 1 + 2, (1 + 1) + (2 + 1) + (1 + 1), 1 + 2)
    assert work.taught == 3
    # Rows 0, 1 ask in step 1 and row 0 in step 2; row 3 in step 1: they read words of rows 1 to 4.
    assert (work.key_words, work.query_words) == (5, 5)


@pytest.mark.parametrize("kind", ["llama", "mla"])
def test_the_projections_that_read_words_are_named_rightly(kind: str) -> None:
    modules = random_parts(TINY.shape(kind), CPU, torch.float32).draft.named_modules()
    joint = {name.split(".")[-1] for name, module in modules if isinstance(module, JointLinear)}
    assert joint == {name for name in WORD_READERS if (name in ("q_proj", "k_proj", "v_proj")) == (kind == "llama")}


def test_prompt_rows_cost_keys_and_nothing_else() -> None:
    shape = KIMI.shape()
    whole, half = (needed_work(random_batch(TINY.shape(), [64], CPU, torch.float32, share), 4) for share in (1.0, 0.5))
    assert half.keyed == whole.keyed and sum(half.asked) < 0.6 * sum(whole.asked)
    parts = [step_flops(shape, work) for work in (whole, half)]
    assert parts[0]["fc"] == parts[1]["fc"] and parts[1]["head"] < 0.52 * parts[0]["head"]


@pytest.mark.parametrize(("kind", "words"), [("llama", 32_000), ("mla", 163_840)])
def test_the_plans_rule_of_thumb_is_near_at_kimis_sizes(kind: str, words: int) -> None:
    shape, rows, steps = KIMI.shape(kind, draft_vocab=words), 4096, 4
    exact = step_flops(shape, whole_work(rows, steps))["total"]
    assert flops_per_token(shape, steps)[0] * rows == pytest.approx(exact, rel=0.12)
