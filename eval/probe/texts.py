"""Held-out text for the draft probe: a store's records, or prompts that the target continues greedily itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eagle3.hf_states import all_site_states
from eval.engines.target import TargetSession, end_tokens
from eval.probe.prompts import TEXTS, load_tokenizer
from eval.probe.scoring import Text
from eval.probe.stored import StoreReader
from eval.prompts import Prompt, encode_prompt, read_prompt_set

FINAL = "final"


def run_store(
    reader: StoreReader, model: nn.Module, sites: Sequence[str], count: int, max_tokens: int, min_tokens: int
) -> Iterator[Text]:
    """A store's tokens and masks, with the states of `sites` computed anew, one record at a time."""
    for record in reader.spread(count, max_tokens, min_tokens):
        states = all_site_states(model, record.input_ids, only=[*sites, FINAL])
        yield Text(record.input_ids, record.loss_mask, states)


def read_store(reader: StoreReader, embedding: Tensor, count: int, max_tokens: int, min_tokens: int) -> Iterator[Text]:
    """A store's records with their own states; the embedding is looked up in the target's table `[V, H]`."""
    for record in reader.spread(count, max_tokens, min_tokens):
        looked_up = embedding[record.input_ids].float()
        states = {name: state.float() for name, state in record.states.items()}
        yield Text(record.input_ids, record.loss_mask, {**states, "embedding": looked_up})


def run_prompts(
    target: Path,
    model: nn.Module,
    sites: Sequence[str],
    file: Path | None,
    count: int,
    max_tokens: int,
    trust_remote_code: bool = False,
) -> Iterator[Text]:
    """Prompts (of `file`, else built-in ones) and the target's own greedy answers; only the answers are judged.

    Raises:
        DataError: the prompts or the tokenizer cannot be read.
    """
    tokenizer = load_tokenizer(target, trust_remote_code)
    for ids in _prompt_ids(tokenizer, file, count):
        answer = continue_greedily(model, ids, max_tokens)
        whole = torch.tensor(ids + answer)
        mask = torch.arange(len(whole)) >= len(ids)
        yield Text(whole, mask, all_site_states(model, whole, only=[*sites, FINAL]))


@torch.inference_mode()
def continue_greedily(model: nn.Module, ids: list[int], max_new_tokens: int) -> list[int]:
    """The target's greedy answer, its end token included."""
    ends = end_tokens(model)
    with TargetSession(model, None) as session:
        answer = [int(session.forward(ids, keep=1)[0][-1].argmax())]
        while len(answer) < max_new_tokens and answer[-1] not in ends:
            answer.append(int(session.forward(answer[-1:])[0][-1].argmax()))
    return answer


def _prompt_ids(tokenizer: Any, file: Path | None, count: int) -> Iterator[list[int]]:
    if file is not None:
        for prompt in read_prompt_set(file, count).prompts:
            yield encode_prompt(tokenizer, prompt)
        return
    for place, text in enumerate(TEXTS[:count]):
        if getattr(tokenizer, "chat_template", None):
            yield encode_prompt(tokenizer, Prompt(str(place), [{"role": "user", "content": text}]))
        else:
            yield list(tokenizer(text)["input_ids"])
