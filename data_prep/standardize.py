"""Named tensors -> what the draft trains on: sites beside one another, rows shifted.

`standardize` is the plain way. Training's reader (`train.front.source.StoreSource.fill`) writes the same rows in place,
by this module's shift, and is held to it bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from data_prep.capture.sample import CapturedSample
from eagle3.errors import DataError, WiringError
from eagle3.wiring import EMBEDDING, Site, Wiring

FIRST_TAUGHT = 1  # the first position whose teacher state a row reads; features begin at 0


@dataclass(frozen=True)
class TrainingSample:
    """N = T - 1 rows of a conversation x[0..T-1]. Row t reads x[0..t] and x[t+1], and predicts x[t+2].

    Args:
        record_id: the conversation.
        features: [N, A*H], states of the wiring's A sites after x[0..t], slot 0 first.
        token_ids: [N] int64, x[t+1].
        teacher: [N, H], the teacher's state after x[0..t+1]: its distribution is over x[t+2].
        loss_mask: [N] bool, whether x[t+2] is to be learnt; false on the last row, which has no x[t+2].
    """

    record_id: str
    features: torch.Tensor
    token_ids: torch.Tensor
    teacher: torch.Tensor
    loss_mask: torch.Tensor


def standardize(sample: CapturedSample, wiring: Wiring, embedding: torch.Tensor | None = None) -> TrainingSample:
    """Build the rows of `TrainingSample`, taking each site by its name.

    The shift is EAGLE's (Li et al. 2024): the feature at t goes with the token at t + 1.

    Args:
        sample: T >= 2 tokens, states of any float dtype, which the result keeps.
        wiring: says which sites, in which order.
        embedding: the target's table [V, H]; needed when the wiring names the embedding.

    Raises:
        WiringError: the sample lacks a site, has another teacher or width, or the table is needed and not given.
        DataError: fewer than two tokens.
    """
    if sample.teacher != wiring.teacher:
        raise WiringError(
            "another teacher",
            where=f"record {sample.record_id}",
            why=f"the sample holds {sample.teacher}; the wiring teaches with {wiring.teacher}",
            mend="extract again with this wiring",
        )
    check_length(sample.record_id, sample.tokens)
    states = [_state(sample, site, embedding) for site in wiring.aux]  # A x [T, H]
    for site, state in zip(wiring.aux, states, strict=True):
        if state.shape != (sample.tokens, wiring.hidden_size):
            raise WiringError(
                "a site has another shape than the wiring says",
                where=f"record {sample.record_id}, {site.name}",
                why=f"{tuple(state.shape)}, expected {(sample.tokens, wiring.hidden_size)}",
                mend="extract again with this wiring and target",
            )
    token_ids, loss_mask = shifted(sample.input_ids, sample.loss_mask)
    return TrainingSample(
        record_id=sample.record_id,
        features=torch.cat([state[:-1] for state in states], dim=-1),  # [N, A*H]
        token_ids=token_ids,
        teacher=sample.final[FIRST_TAUGHT:],  # [N, H]
        loss_mask=loss_mask,
    )


def check_length(record_id: str, tokens: int) -> None:
    """Refuse a record that has no row.

    Raises:
        DataError: fewer than two tokens.
    """
    if tokens < 2:
        raise DataError(
            "a record is too short to train on",
            where=f"record {record_id}",
            why=f"{tokens} token",
            mend="leave out conversations of fewer than two tokens",
        )


def shifted(input_ids: torch.Tensor, loss_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`token_ids` [N] int64 and `loss_mask` [N] bool of the rows, from those [T] of the record."""
    learnt = torch.zeros(len(input_ids) - 1, dtype=torch.bool)
    learnt[:-1] = loss_mask[2:]
    return input_ids[1:].long(), learnt


def _state(sample: CapturedSample, site: Site, embedding: torch.Tensor | None) -> torch.Tensor:
    """The state [T, H] of one site, in the dtype of the captured ones."""
    if site == EMBEDDING:
        if embedding is None:
            raise WiringError(
                "the wiring feeds the embedding, and no embedding table was given",
                where=f"record {sample.record_id}",
                mend="pass the target's embedding table to standardize",
            )
        return embedded(sample.record_id, sample.input_ids, embedding).to(sample.final.dtype)
    if site.name not in sample.sites:
        raise WiringError(
            "a sample lacks a site that the wiring needs",
            where=f"record {sample.record_id}",
            why=f"no {site.name}; it holds {', '.join(sample.sites) or 'no site'}",
            mend="extract again with this wiring",
        )
    return sample.sites[site.name]


def embedded(record_id: str, input_ids: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
    """Rows [T, H] of the target's table [V, H].

    Raises:
        WiringError: a token lies outside it.
    """
    if int(input_ids.max()) >= embedding.shape[0]:
        raise WiringError(
            "a token lies outside the embedding table",
            where=f"record {record_id}",
            why=f"token {int(input_ids.max())}, the table has {embedding.shape[0]} rows",
            mend="give the table of the target that the store was made with",
        )
    return embedding[input_ids]
