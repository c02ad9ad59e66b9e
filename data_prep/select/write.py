"""Pass two: the chosen conversations are read again from their sources and written in the order of the shuffle."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.select.candidate import Candidate, Reader
from data_prep.select.config import SelectConfig
from data_prep.select.features import Rows
from data_prep.select.pick import Clusters, Picked
from data_prep.select.sources import Raw, Source
from eagle3.atomic import replacing
from eagle3.errors import DataError

NAMED_MEMBERS = 20  # duplicates that a record's provenance names; all are counted


@dataclass(frozen=True)
class Selection:
    """Everything the second pass needs.

    Args:
        rows: features of all conversations that may be chosen.
        files: names of the files by number.
        clusters: duplicates among them.
        picked: what was chosen.
    """

    rows: Rows
    files: list[str]
    clusters: Clusters
    picked: Picked

    def place(self, row: int) -> tuple[int, str, int]:
        """(source number, file, record number) of a row."""
        return int(self.rows.source[row]), self.files[self.rows.file[row]], int(self.rows.record[row])


def write_selected(
    cfg: SelectConfig, sources: list[Source], found: Selection, out: Path, work: Path, advance: Callable[[int], None]
) -> None:
    """Write `out`, whole or not at all.

    Each line goes to a work file as its source yields it, then the lines are copied in the order of the shuffle; one
    record's text is in memory at a time.

    Raises:
        DataError: a source is not what it was in the first pass.
    """
    spans = np.zeros((len(found.picked.rows), 2), dtype=np.int64)  # [M, (start, length)] in the work file
    writer = _Lines(cfg, found)
    taken: set[str] = set()
    unordered = work / "unordered.jsonl"
    with open(unordered, "wb") as handle:
        for place, record in _chosen(cfg, sources, found, writer):
            line = _line(record)
            spans[place] = handle.tell(), len(line)
            handle.write(line)
            advance(1)
    with replacing(out) as tmp, open(unordered, "rb") as handle, open(tmp, "wb") as ordered:
        for start, length in spans.tolist():
            handle.seek(start)
            ordered.write(_with_own_id(handle.read(length), taken) + b"\n")


def _with_own_id(line: bytes, taken: set[str]) -> bytes:
    """The line, its id made different from all before it where a source gave one id twice."""
    record = json.loads(line)
    own = record["provenance"]
    choices = (record["id"], f"{record['id']}-{own['sha256'][:8]}", f"{record['id']}-{own['file']}-{own['record']}")
    name = next(choice for choice in choices if choice not in taken)
    taken.add(name)
    if name == record["id"]:
        return line
    return _line(record | {"id": name})


def _line(record: dict[str, Any]) -> bytes:
    """One line of JSON in UTF-8; escaped where a tool's schema or arguments hold half a surrogate pair."""
    try:
        return json.dumps(record, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return json.dumps(record).encode("ascii")


def _chosen(
    cfg: SelectConfig, sources: list[Source], found: Selection, writer: _Lines
) -> Iterator[tuple[int, dict[str, Any]]]:
    """(place in the output, record) of all chosen conversations, source by source."""
    by_source: list[dict[tuple[str, int], int]] = [{} for _ in sources]
    for place, row in enumerate(found.picked.rows.tolist()):
        number, file, record = found.place(row)
        by_source[number][(file, record)] = place
    for source, places in zip(sources, by_source, strict=True):
        wanted: dict[str, set[int]] = defaultdict(set)
        for file, record in places:
            wanted[file].add(record)
        reader = Reader(cfg, source.cfg)
        seen = 0
        for raw in source.fetch(wanted):
            seen += 1
            place = places[(raw.file, raw.number)]
            yield place, writer.record(int(found.picked.rows[place]), raw, _again(reader, raw))
        if seen != len(places):
            raise _changed(source.cfg.path, f"{len(places) - seen} chosen records are gone")


def _again(reader: Reader, raw: Raw) -> Candidate:
    try:
        return reader.read(raw)
    except DataError as err:
        raise _changed(raw.where, err.what) from None


def _changed(where: str, why: str) -> DataError:
    return DataError("a source changed while it was read", where=where, why=why, mend="run the select stage again")


class _Lines:
    """Makes output records."""

    def __init__(self, cfg: SelectConfig, found: Selection) -> None:
        self.cfg, self.found = cfg, found
        leader = found.clusters.leader
        dropped = np.flatnonzero(leader != np.arange(len(leader)))
        self._dropped = dropped[np.argsort(leader[dropped], kind="stable")]
        self._leaders = leader[self._dropped]

    def record(self, row: int, raw: Raw, one: Candidate) -> dict[str, Any]:
        """The record of one chosen row. Raises DataError when it is not the record of the first pass."""
        rows = self.found.rows
        if bytes.fromhex(one.sha256) != rows.sha[row].tobytes():
            raise _changed(raw.where, "the record differs")
        source = self.cfg.sources[int(rows.source[row])]
        provenance: dict[str, Any] = {"source": source.name, "file": raw.file, "record": raw.number}
        provenance |= {"sha256": one.sha256, "license": one.license, "language_found": one.language_found}
        if one.given_id:
            provenance["id"] = one.given_id
        if rows.tokens[row] >= 0:
            provenance["prompt_tokens" if self.cfg.answers == "strip" else "tokens"] = int(rows.tokens[row])
        provenance["cluster"] = rows.texts[rows.text[row]].tobytes().hex()
        provenance["stands_for"] = self._members(row)
        record: dict[str, Any] = {"id": f"{source.name}/{one.given_id or one.sha256[:16]}", "messages": one.messages}
        if one.tools:
            record["tools"] = one.tools
        return record | {"domain": one.domain, "language": one.language, "provenance": provenance}

    def _members(self, row: int) -> dict[str, Any]:
        """How many duplicates a row stands for, and the first of them by place."""
        start, stop = np.searchsorted(self._leaders, [row, row + 1])
        members = self._dropped[start:stop]
        near = int(self.found.clusters.near[members].sum())
        named = sorted((self.cfg.sources[s].name, file, record) for s, file, record in map(self.found.place, members))
        return {"exact": len(members) - near, "near": near, "members": [list(one) for one in named[:NAMED_MEMBERS]]}
