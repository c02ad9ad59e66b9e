"""The draft's vocabulary: the target tokens it can propose, chosen by how often they are to be learnt.

Stored as other tools store it: `d2t[i]` is an *offset* (target id = i + d2t[i]) and `t2d` a mask over target ids.
A stored vocabulary carries the key of the counts and sizes it came from, so that a stale one is refused.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eagle3.errors import ConfigError, IntegrityError
from eagle3.tensor_file import save_tensors


@dataclass(frozen=True)
class DraftVocab:
    """A draft vocabulary.

    Args:
        d2t: `[Vd]` int64 offsets; draft ids ascend with target ids.
        t2d: `[V]` bool; True for the Vd target ids that the draft knows.
        key: hex SHA-256 over the counts and both sizes it was built from.
        filled: draft ids given to tokens that were never counted.
        coverage: share of the counted tokens that the draft can propose, 0 to 1 (1 when nothing was counted).
    """

    d2t: Tensor
    t2d: Tensor
    key: str
    filled: int
    coverage: float

    @property
    def size(self) -> int:
        """Draft vocabulary size Vd."""
        return len(self.d2t)

    @property
    def target_ids(self) -> Tensor:
        """Target id of each draft id, `[Vd]` int64, ascending."""
        return torch.arange(self.size) + self.d2t


def vocab_key(counts: Tensor, size: int) -> str:
    """Hex SHA-256 over `counts [V]` and both sizes."""
    digest = hashlib.sha256(f"draft-vocab:{len(counts)}:{size}:".encode())
    digest.update(counts.to(torch.int64).contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()


def maps_key(d2t: Tensor) -> str:
    """Hex SHA-256 over the target ids that `d2t [Vd]` names, in draft order."""
    chosen = d2t.cpu().to(torch.int64) + torch.arange(len(d2t))
    return hashlib.sha256(chosen.contiguous().numpy().tobytes()).hexdigest()


def build_draft_vocab(counts: Tensor, size: int) -> DraftVocab:
    """Choose the `size` most counted target tokens.

    Args:
        counts: `[V]` int64, how often each target token is supervised in the training set.
        size: Vd; `V` gives the identity. Ties go to the smaller id; when fewer than `size` tokens were counted, the
            smallest uncounted ids fill up (`filled` says how many).

    Raises:
        ConfigError: `size` is not within 1..V.
    """
    total = len(counts)
    if not 0 < size <= total:
        raise ConfigError(
            "impossible draft vocabulary", where="draft.vocab_size", why=f"found {size}", mend=f"choose 1 to {total}"
        )
    order = torch.sort(counts, descending=True, stable=True).indices  # ties keep ascending ids
    chosen = order[:size].sort().values  # [Vd]
    t2d = torch.zeros(total, dtype=torch.bool)
    t2d[chosen] = True
    counted = int(counts.sum())
    return DraftVocab(
        d2t=chosen - torch.arange(size),
        t2d=t2d,
        key=vocab_key(counts, size),
        filled=int((counts[chosen] == 0).sum()),
        coverage=int(counts[chosen].sum()) / counted if counted else 1.0,
    )


def vocab_from_maps(d2t: Tensor, t2d: Tensor, where: str) -> DraftVocab:
    """The vocabulary that a served folder holds; its key is that of the maps themselves.

    Raises:
        IntegrityError: the two maps disagree, or `d2t` is no strictly ascending choice of target ids.
    """
    chosen = d2t.to(torch.int64) + torch.arange(len(d2t))  # [Vd]
    inside = len(chosen) > 0 and int(chosen.min()) >= 0 and int(chosen.max()) < len(t2d)
    distinct = inside and len(chosen.unique()) == len(chosen)
    if not distinct or int(t2d.sum()) != len(chosen) or not bool(t2d[chosen].all()):
        raise IntegrityError(
            "d2t and t2d do not describe one vocabulary",
            where=where,
            why=f"d2t names {len(chosen)} ids, t2d marks {int(t2d.sum())} of {len(t2d)}",
            mend="take both from the same draft",
        )
    return DraftVocab(d2t.to(torch.int64), t2d.bool(), vocab_key(t2d.long(), len(d2t)), filled=0, coverage=1.0)


def save_vocab(path: Path, vocab: DraftVocab) -> None:
    """Write a vocabulary atomically, as safetensors with its key and a checksum in the header."""
    meta = {"key": vocab.key, "filled": str(vocab.filled), "coverage": repr(vocab.coverage)}
    meta["checksum"] = _checksum(vocab)
    save_tensors(Path(path), {"d2t": vocab.d2t.contiguous(), "t2d": vocab.t2d.contiguous()}, meta)


def _checksum(vocab: DraftVocab) -> str:
    """Hex SHA-256 over everything that is kept of a vocabulary."""
    digest = hashlib.sha256(f"{vocab.key}:{vocab.filled}:{vocab.coverage!r}:".encode())
    for tensor in (vocab.d2t, vocab.t2d.view(torch.uint8)):
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def load_vocab(path: Path, *, key: str | None = None, size: int | None = None) -> DraftVocab:
    """Read a stored vocabulary.

    Args:
        path: file that `save_vocab` wrote.
        key: refuse a vocabulary of other counts or sizes (`vocab_key(counts, size)`).
        size: refuse another Vd.

    Raises:
        IntegrityError: the file is missing, broken, or is another vocabulary than asked for.
    """
    mend = f"delete {path}; the same command builds it again from the prepared set"
    try:
        with safe_open(path, framework="pt") as handle:
            meta = handle.metadata() or {}
            d2t, t2d = handle.get_tensor("d2t"), handle.get_tensor("t2d")
        vocab = DraftVocab(d2t, t2d, meta["key"], int(meta["filled"]), float(meta["coverage"]))
        told = meta.get("checksum", _checksum(vocab) if len(meta) == 3 else "")  # older files have none
        spelt = (meta["filled"], meta["coverage"]) == (str(vocab.filled), repr(vocab.coverage))
        if (d2t.dtype, t2d.dtype) != (torch.int64, torch.bool) or told != _checksum(vocab) or not spelt:
            raise ValueError("it is not what was written: its checksum differs")
    except (SafetensorError, OSError, KeyError, ValueError) as err:
        raise IntegrityError("unreadable draft vocabulary", where=str(path), why=str(err), mend=mend) from None
    vocab_from_maps(d2t, t2d, str(path))
    if size is not None and vocab.size != size:
        why = f"{vocab.size} tokens; expected {size}"
        raise IntegrityError("a draft vocabulary of another size", where=str(path), why=why, mend=mend)
    if key is not None and vocab.key != key:
        why = "it was built from other token counts or sizes"
        raise IntegrityError("a stale draft vocabulary", where=str(path), why=why, mend=mend)
    return vocab
