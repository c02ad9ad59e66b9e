"""Fixtures of the eval tests: a tiny random target, a random draft, and drafts that know the text."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from eval_models import ToldDraft, fill, make_shape, make_target, make_wiring
from transformers import LlamaForCausalLM

from eagle3.draft import Eagle3Draft
from eagle3.wiring import Wiring


@pytest.fixture(autouse=True)
def few_threads() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def target() -> LlamaForCausalLM:
    return make_target(7)


@pytest.fixture
def draft(target: LlamaForCausalLM) -> Eagle3Draft:
    return fill(Eagle3Draft(make_shape(7, 4)), target, ids=[1, 2, 4, 6])


@pytest.fixture
def wiring() -> Wiring:
    return make_wiring(0, 4, 2)


@pytest.fixture
def told() -> Callable[..., ToldDraft]:
    def make(target: LlamaForCausalLM, text: list[int], wrong: set[int] | frozenset[int] = frozenset()) -> ToldDraft:
        vocab = target.config.vocab_size
        draft = fill(ToldDraft(make_shape(vocab, vocab)), target)
        draft.text, draft.wrong = text, frozenset(wrong)
        return draft  # type: ignore[return-value]

    return make
