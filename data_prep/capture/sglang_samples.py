"""From an engine's answer to samples, refusing whatever is not exactly what was asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from data_prep.capture.finite import all_finite
from data_prep.capture.sample import CapturedSample
from eagle3.errors import DataError, RedraftError
from eagle3.wiring import Wiring

RESTART = "run the stage again; if it comes back, report the engine's version and flags"


@dataclass(frozen=True)
class Asked:
    """A record as it is sent to an engine."""

    record_id: str
    input_ids: torch.Tensor  # [T] int64
    loss_mask: torch.Tensor  # [T] bool

    @classmethod
    def check(cls, record: tuple[str, Any, Any], vocab_size: int) -> Asked:
        """Read a (record_id, input_ids, loss_mask) triple.

        Raises:
            DataError: an empty record, lengths that differ, or a token outside the vocabulary.
        """
        record_id, input_ids, loss_mask = record
        ids = torch.as_tensor(input_ids, dtype=torch.int64)
        problem = ""
        if ids.ndim != 1 or ids.numel() == 0:
            problem = "it has no tokens"
        elif len(loss_mask) != ids.numel():
            problem = f"{ids.numel()} tokens but {len(loss_mask)} mask entries"
        elif int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
            problem = f"token ids {int(ids.min())} to {int(ids.max())}; the target has {vocab_size}"
        if problem:
            raise DataError(
                "a record cannot be captured",
                where=f"record {record_id}",
                why=problem,
                mend="prepare the data again with this target's tokenizer",
            )
        return cls(record_id, ids, torch.as_tensor(loss_mask).bool())

    @property
    def tokens(self) -> int:
        """Number of tokens T."""
        return self.input_ids.numel()


def spans(asked: Sequence[Asked], answered: Sequence[dict[str, Any]]) -> dict[str, slice]:
    """Where each record's rows lie in the engine's flat answer, by record id and not by the order of asking.

    Args:
        asked: the records sent.
        answered: the engine's requests in the order of its rows: `key` (the record id) and `rows`.

    Raises:
        RedraftError: a record is missing, foreign or double, or has another number of rows than tokens.
    """
    tokens = {one.record_id: one.tokens for one in asked}
    out: dict[str, slice] = {}
    start = 0
    for answer in answered:
        key, rows = str(answer["key"]), int(answer["rows"])
        if key not in tokens or key in out:
            why = "it was not asked for" if key not in tokens else "it came twice"
            raise RedraftError("the engine answered another request", where=f"record {key}", why=why, mend=RESTART)
        if rows != tokens[key]:
            raise RedraftError(
                "the engine returned another number of states than tokens",
                where=f"record {key}",
                why=f"{rows} rows for {tokens[key]} tokens, as a prefix cache or chunked prefill gives",
                mend="capture with --disable-radix-cache and --chunked-prefill-size -1",
            )
        out[key] = slice(start, start + rows)
        start += rows
    missing = [key for key in tokens if key not in out]
    if missing:
        raise RedraftError(
            "the engine left a request out", where=f"record {missing[0]}", why=f"{len(missing)} in all", mend=RESTART
        )
    return out


def check_tokens(asked: Sequence[Asked], where: dict[str, slice], tokens: torch.Tensor) -> None:
    """Refuse rows whose tokens are not the record's own.

    Args:
        tokens: [N] int64, the tokens as the engine ran them, in the order of its rows.

    Raises:
        RedraftError: naming the record.
    """
    for one in asked:
        ran = tokens[where[one.record_id]]
        if not torch.equal(ran, one.input_ids):
            at = "" if ran.shape != one.input_ids.shape else f", first at {int((ran != one.input_ids).nonzero()[0])}"
            raise RedraftError(
                "the engine ran other tokens than it was given",
                where=f"record {one.record_id}",
                why=f"{ran.numel()} rows for {one.tokens} tokens{at}",
                mend=RESTART,
            )


def sample(
    one: Asked, aux: torch.Tensor, teacher: torch.Tensor, wiring: Wiring, out_dtype: torch.dtype, computed: str
) -> CapturedSample:
    """Name the joined states of one record.

    Args:
        aux: [T, k*H], slot 0 first.
        teacher: [T, H].
        computed: the dtype they were computed in, for the error.

    Raises:
        RedraftError: a shape that does not fit, or states that are not finite.
    """
    size = wiring.hidden_size
    want = ((one.tokens, wiring.feature_width), (one.tokens, size))
    if (tuple(aux.shape), tuple(teacher.shape)) != want:
        raise RedraftError(
            "the engine's states have another shape than the wiring's",
            where=f"record {one.record_id}",
            why=f"aux {tuple(aux.shape)} and teacher {tuple(teacher.shape)}; expected {want[0]} and {want[1]}",
            mend="check that the engine captures the layers that the wiring names",
        )
    stored = {site.name for site in wiring.stored_sites}
    parts = zip(wiring.names, aux.split(size, dim=1), strict=True)
    # Copies, for the parts are views of a whole batch.
    sites = {name: part.to(out_dtype, copy=True).contiguous() for name, part in parts if name in stored}
    final = teacher.to(out_dtype, copy=True).contiguous()
    if not all(map(all_finite, (*sites.values(), final))):
        raise RedraftError(
            "the target gave states that are not finite",
            where=f"record {one.record_id}",
            why=f"computed in {computed}, kept in {out_dtype}",
            mend="set capture.compute_dtype=bfloat16, and check the target's weights",
        )
    return CapturedSample(one.record_id, one.input_ids, one.loss_mask, sites, final, wiring.teacher)
