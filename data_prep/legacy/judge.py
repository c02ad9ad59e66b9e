"""Which site of the target is a slot? Two judges: one that runs the target, one that has its tables alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from data_prep.legacy.formats import LegacyRecord, Slot
from eagle3.errors import DataError, IntegrityError
from eagle3.hf_states import all_site_states
from eagle3.site_match import match_slots
from eagle3.target_weights import TargetWeights

MAX_ROWS = 512  # tokens of a sample that are compared: a causal model's first rows do not depend on the rest


@dataclass(frozen=True)
class SlotFinding:
    """What a judge says of one slot of one sample.

    Args:
        label, role: the slot's.
        site: `embedding`, `layer_<k>`, `final` or `final_normed`; None when not known.
        nearest: the best guess where `site` is None; empty when there is none.
        evidence: the figures, as a clause.
    """

    label: str
    role: str
    site: str | None
    nearest: str
    evidence: str


class Judge(Protocol):
    """Names the slots of a sample."""

    runs_target: bool

    def judge(self, record: LegacyRecord) -> list[SlotFinding]:
        """One finding a slot, in slot order."""
        ...


class TargetJudge:
    """Compares every slot with every site of the target, computed by running it on the sample's tokens.

    Args:
        model: the target, from `eagle3.hf_model.load_target`.
    """

    runs_target = True

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.hidden_size = int(model.get_input_embeddings().weight.shape[1])  # type: ignore[operator]

    def judge(self, record: LegacyRecord) -> list[SlotFinding]:
        """See `Judge`.

        Raises:
            DataError: a token that the target does not know.
        """
        ids = record.input_ids[:MAX_ROWS]
        try:
            reference = all_site_states(self.model, ids)
        except DataError as err:
            raise DataError(err.what, where=str(record.path), why=err.why, mend=err.mend) from None
        return [self._name(slot, reference) for slot in record.slots]

    def _name(self, slot: Slot, reference: Mapping[str, Tensor]) -> SlotFinding:
        (match,) = match_slots(slot.state[:MAX_ROWS], reference, self.hidden_size)
        evidence = (
            f"cosine {match.cosine:.5f}, error {match.error:.4f}; "
            f"next best {match.runner_up} with cosine {match.runner_up_cosine:.5f}, error {match.runner_up_error:.4f}"
        )
        if match.note:
            evidence += f"; it {match.note}" if match.note.startswith(("is ", "points ")) else f"; {match.note}"
        return SlotFinding(slot.label, slot.role, match.site if match.sure else None, match.site, evidence)


class TableJudge:
    """Compares with what the target's tables alone can tell: embedding rows, and the length that its norm gives.

    A state after the final norm, divided by the norm's weight, has a root mean square of 1 in every row, and no other
    site has. Which layer an un-normed state is from cannot be told this way.

    Args:
        embedding: [V, H].
        norm: the final norm's weight [H], or None.
        head: the language-model head [V, H], or None.
    """

    runs_target = False

    def __init__(self, embedding: Tensor, norm: Tensor | None = None, head: Tensor | None = None) -> None:
        self.embedding, self.norm, self.head = embedding, norm, head

    @classmethod
    def from_weights(cls, weights: TargetWeights) -> TableJudge:
        """Read the three tables from a target's folder."""
        return cls(weights.embedding(), weights.final_norm(), weights.head())

    @classmethod
    def from_file(cls, path: Path) -> TableJudge:
        """Read an embedding matrix alone: a safetensors file that holds one, by its name or as its only matrix.

        Raises:
            IntegrityError: not such a file.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, "pt") as handle:
                names = list(handle.keys())
                named = [name for name in names if name.endswith("embed_tokens.weight")] or names
                table = handle.get_tensor(named[0]) if len(named) == 1 else None
        except (SafetensorError, OSError) as err:
            mend = "give --embedding a safetensors file"
            raise IntegrityError("embedding not readable", where=str(path), why=str(err), mend=mend) from None
        if table is None or table.ndim != 2 or not table.is_floating_point():
            why = f"it holds {', '.join(names[:5])}"
            mend = "give a file with one tensor [V, H], or one named ...embed_tokens.weight"
            raise IntegrityError("no embedding matrix in the file", where=str(path), why=why, mend=mend)
        return cls(table)

    def judge(self, record: LegacyRecord) -> list[SlotFinding]:
        """See `Judge`.

        Raises:
            DataError: a token that is not in the table.
        """
        ids = record.input_ids[:MAX_ROWS]
        if int(ids.min()) < 0 or int(ids.max()) >= self.embedding.shape[0]:
            why = f"ids {int(ids.min())} to {int(ids.max())}; the embedding has {self.embedding.shape[0]} rows"
            mend = "give the target that made these samples"
            raise DataError("tokens outside the target's vocabulary", where=str(record.path), why=why, mend=mend)
        return [self._name(slot, ids) for slot in record.slots]

    def _name(self, slot: Slot, ids: Tensor) -> SlotFinding:
        state = slot.state[:MAX_ROWS]
        rows = self.embedding[ids].to(state.dtype)  # [T, H]
        same = int((rows == state).all(dim=1).sum())
        if same == len(ids):
            return self._found(slot, "embedding", f"all {same} rows are the tokens' own rows of the embedding")
        spread = self._norm_spread(state)
        if spread is not None and spread < 0.02:
            evidence = "every row has the length that the final norm gives" + self._next_token(state, ids)
            return self._found(slot, "final_normed", evidence)
        if same > 1:
            return self._unknown(slot, f"{same} of {len(ids)} rows are rows of the embedding, the others are not")
        (match,) = match_slots(state, {"embedding": rows}, state.shape[1])
        scaled = f"; it {match.note}" if match.note else ""
        return self._unknown(slot, f"not the embedding (cosine {match.cosine:.5f}), and not normed{scaled}")

    def _found(self, slot: Slot, site: str, evidence: str) -> SlotFinding:
        return SlotFinding(slot.label, slot.role, site, site, evidence)

    def _unknown(self, slot: Slot, evidence: str) -> SlotFinding:
        return SlotFinding(slot.label, slot.role, None, "", evidence)

    def _norm_spread(self, state: Tensor) -> float | None:
        """Largest departure from 1 of a row's root mean square, the norm's weight taken out."""
        if self.norm is None:
            return None
        weight = self.norm.float()
        used = weight.abs() > 1e-3  # the weight cannot be taken out where it is nought
        rms = (state.float()[:, used] / weight[used]).square().mean(dim=1).sqrt()  # [T]
        return float((rms - 1).abs().max())

    def _next_token(self, state: Tensor, ids: Tensor) -> str:
        """How often the head, read off this state, chooses the next token: high on text that the target wrote."""
        if self.head is None or len(ids) < 2:
            return ""
        rows = state[:-1].to(self.head.dtype)  # [T-1, H]
        chosen = torch.cat([(part @ self.head.T).argmax(dim=1) for part in rows.split(128)])
        share = (chosen == ids[1:]).float().mean().item()
        return f"; the head reads the next token off it in {share:.0%} of rows"
