"""What pass one keeps of each conversation: about 110 bytes of columns, and 16 of each distinct text; no text."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_prep.select.candidate import Candidate
from data_prep.select.config import SelectConfig
from data_prep.select.near import Signatures
from data_prep.select.prints import draw, shingles, text_key
from data_prep.select.quotas import Quota
from data_prep.select.sources import Raw

SHA_BYTES = 32


class Names:
    """Numbers for a few names (files, domains, languages), in the order of their coming."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._numbers: dict[str, int] = {}

    def number(self, name: str) -> int:
        """The name's number, from 0."""
        found = self._numbers.get(name)
        if found is None:
            found = self._numbers[name] = len(self.names)
            self.names.append(name)
        return found


@dataclass(frozen=True)
class Rows:
    """N conversations that may be chosen, as columns [N]; `texts` is of the T distinct texts.

    Args:
        source, file: numbers of source and file.
        record: number in the file.
        domain, language, length: index of the quota that it falls under.
        tokens: its length; -1 where none was measured.
        rank: 64-bit place in the seeded shuffle.
        text: index of its text.
        sha: [N, 32] bytes, SHA-256 of the source record.
        texts: [T, 16] bytes, key of each distinct text.
    """

    source: np.ndarray
    file: np.ndarray
    record: np.ndarray
    domain: np.ndarray
    language: np.ndarray
    length: np.ndarray
    tokens: np.ndarray
    rank: np.ndarray
    text: np.ndarray
    sha: np.ndarray
    texts: np.ndarray

    def __len__(self) -> int:
        return len(self.source)


class Features:
    """Collects the columns, and the signatures of new texts.

    Args:
        cfg: the selection's settings.
        quotas: domain, language, length.
        signatures: file that the signature of each distinct text is appended to; None when near-duplicates stay.
    """

    def __init__(self, cfg: SelectConfig, quotas: tuple[Quota, Quota, Quota], signatures: Path | None) -> None:
        self.cfg, self.quotas = cfg, quotas
        self.files = Names()
        self.signatures = Signatures(signatures, cfg.permutations) if signatures else None
        self.labels: Counter[tuple[str, str]] = Counter()
        self._columns = {name: array(kind) for name, kind in _KINDS.items()}
        self._sha = bytearray()
        self._texts: dict[bytes, int] = {}

    def add(self, source: int, raw: Raw, one: Candidate, tokens: int) -> None:
        """Keep the features of one candidate; `tokens` is -1 where none were measured."""
        domain, language, length = self.quotas
        under = (domain.place(one.domain), language.place(one.language))
        assert under[0] is not None and under[1] is not None, "the reader leaves out what is not asked for"
        values = {
            "source": source,
            "file": self.files.number(raw.file),
            "record": raw.number,
            "domain": under[0],
            "language": under[1],
            "length": length.bucket(tokens),
            "tokens": tokens,
            "rank": draw(self.cfg.seed, self.cfg.sources[source].name, one.sha256),
            "text": self._text(one),
        }
        for name, value in values.items():
            self._columns[name].append(value)
        self._sha += bytes.fromhex(one.sha256)
        self.labels[(one.domain, one.language)] += 1

    def _text(self, one: Candidate) -> int:
        key = text_key(one.text)
        found = self._texts.get(key)
        if found is None:
            found = self._texts[key] = len(self._texts)
            if self.signatures is not None:
                self.signatures.append(shingles(one.text, self.cfg.shingle))
        return found

    def rows(self) -> Rows:
        """All columns as arrays."""
        columns = {name: np.array(column, dtype=_DTYPES[column.typecode]) for name, column in self._columns.items()}
        sha = np.frombuffer(bytes(self._sha), dtype=np.uint8).reshape(-1, SHA_BYTES)
        texts = np.frombuffer(b"".join(self._texts), dtype=np.uint8).reshape(-1, 16)
        return Rows(**columns, sha=sha, texts=texts)

    def close(self) -> None:
        """Close the signature file."""
        if self.signatures is not None:
            self.signatures.close()


_KINDS = {
    "source": "H",
    "file": "I",
    "record": "I",
    "domain": "H",
    "language": "H",
    "length": "H",
    "tokens": "i",
    "rank": "Q",
    "text": "I",
}
_DTYPES = {"H": np.uint16, "I": np.uint32, "i": np.int32, "Q": np.uint64}
