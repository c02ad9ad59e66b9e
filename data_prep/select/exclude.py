"""Keeps evaluation prompts out of the training set: the same, resembling, or contained in a conversation."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.conversations import to_conversation
from data_prep.select.prints import normalize, shingles, text_key
from eagle3.errors import DataError

MAX_LINE = 1 << 26  # bytes of a line, once decompressed
TEXT_KEYS = ("prompt", "question", "problem", "instruction", "text")
CONTAINED_CHARS = 30  # shorter evaluation prompts are no evidence when they stand inside a longer text
SUFFIXES = (".jsonl", ".jsonl.gz")


class Excluded:
    """Evaluation prompts, ready to be compared with the user turns of conversations.

    Args:
        paths: JSON lines files, plain or gzipped, or folders of them. A record holds `messages`, `turns`, or a text
            under prompt, question, problem, instruction or text.
        threshold: Jaccard similarity of shingles from which a turn counts as an evaluation prompt.
        size: characters a shingle.

    Raises:
        DataError: naming file and record that cannot be read.
    """

    def __init__(self, paths: list[str], threshold: float, size: int) -> None:
        self.threshold, self.size = threshold, size
        texts = sorted({text for path in paths for turn in _prompts(path) if (text := normalize(turn))})
        self.texts = texts
        self._keys = {text_key(text) for text in texts}
        prints = [shingles(text, size) for text in texts]
        self._sizes = np.array([len(one) for one in prints], dtype=np.int64)  # [E]
        owners = np.repeat(np.arange(len(texts)), self._sizes)
        values = np.concatenate(prints) if prints else np.zeros(0, dtype=np.uint32)
        order = np.argsort(values, kind="stable")
        self._values, self._owners = values[order], owners[order]  # postings by shingle

    def __len__(self) -> int:
        return len(self.texts)

    def judge(self, turns: list[str]) -> str | None:
        """How the normalized user turns of a conversation meet an evaluation prompt.

        Returns:
            "exact", "contained" (word for word inside a longer turn), "near", or None.
        """
        if not self.texts:
            return None
        if any(text_key(turn) in self._keys for turn in turns):
            return "exact"
        verdicts = [self._resembles(turn) for turn in turns]
        return next((verdict for verdict in ("contained", "near") if verdict in verdicts), None)

    def _resembles(self, turn: str) -> str | None:
        prints = shingles(turn, self.size)
        start, stop = (np.searchsorted(self._values, prints, side=side) for side in ("left", "right"))
        met = np.flatnonzero(stop > start)
        if not len(met):
            return None
        owners = np.concatenate([self._owners[start[i] : stop[i]] for i in met])
        common = np.bincount(owners, minlength=len(self.texts))  # [E]
        whole = np.flatnonzero(common == self._sizes)
        if any(len(self.texts[i]) >= CONTAINED_CHARS and self.texts[i] in turn for i in whole):
            return "contained"
        jaccard = common / (self._sizes + len(prints) - common)
        return "near" if jaccard.max() >= self.threshold else None


def _prompts(place: str) -> Iterator[str]:
    path = Path(place).expanduser()
    files = sorted(f for f in path.iterdir() if f.name.endswith(SUFFIXES)) if path.is_dir() else [path]
    if not path.exists() or not files:
        raise DataError("evaluation prompts not found", where=place, mend="check select.exclude")
    for file in files:
        yield from _file_prompts(file)


def _file_prompts(path: Path) -> Iterator[str]:
    opened = gzip.open if path.suffix == ".gz" else open
    number = 0
    try:
        with opened(path, "rb") as handle:
            while line := handle.readline(MAX_LINE + 1):
                if len(line) > MAX_LINE:
                    raise OSError(f"a line of more than {MAX_LINE >> 20} MiB")
                if not line.strip():
                    continue
                number += 1
                yield from _turns(json.loads(line.decode("utf-8")), f"{path}, record {number}")
    except (ValueError, RecursionError, EOFError, OSError, zlib.error) as err:
        where = f"{path}, record {number}"
        raise DataError(
            "unreadable evaluation prompt", where=where, why=str(err), mend="check select.exclude"
        ) from None


def _turns(record: Any, where: str) -> list[str]:
    if isinstance(record, dict) and any(record.get(key) for key in ("messages", "conversations", "conversation")):
        return [m["content"] for m in to_conversation(record, "", where, where).messages if m["role"] == "user"]
    found = record.get("turns") if isinstance(record, dict) else None
    if isinstance(record, dict) and found is None:
        found = next(([record[key]] for key in TEXT_KEYS if isinstance(record.get(key), str)), None)
    if not isinstance(found, list) or not all(isinstance(turn, str) for turn in found):
        keys = sorted(record) if isinstance(record, dict) else type(record).__name__
        mend = f"give `messages`, `turns`, or a text under {', '.join(TEXT_KEYS)}"
        raise DataError("no evaluation prompt in this record", where=where, why=f"found {keys}", mend=mend)
    return found
