"""Records of the sources one by one, each with its place; a bad record is handed over as one, not raised."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_prep.conversations import FILE_SUFFIXES, MEND, decoded_line, line_mend, named_dataset, saved_dataset
from data_prep.select.config import SourceConfig
from eagle3.errors import DataError


@dataclass(frozen=True)
class Raw:
    """A record as it stands in a source.

    Args:
        file: file that holds it, or the name of the HF dataset.
        number: its number in that file, from 1; blank lines do not count.
        record: the decoded record; None when it is bad.
        error: what is wrong with a bad one.
    """

    file: str
    number: int
    record: dict | None = field(repr=False)
    error: DataError | None = None

    @property
    def where(self) -> str:
        """File and record number, for error lines."""
        return f"{self.file}, record {self.number}"


class Source:
    """The records of one configured source; it may be read any number of times and holds none of them.

    JSON files that are one list are loaded whole; JSON lines and HF datasets are streamed.

    Raises:
        DataError: the source is missing or of an unknown kind.
    """

    def __init__(self, cfg: SourceConfig) -> None:
        self.cfg = cfg
        self.path = Path(cfg.path).expanduser()
        self._files = self._list_files()

    def _list_files(self) -> list[Path] | None:
        """The files in name order, or None for an HF dataset."""
        if self.path.is_file():
            if self.path.suffix not in FILE_SUFFIXES:
                raise DataError("unknown kind of file", where=str(self.path), mend="give .jsonl or .json")
            return [self.path]
        if self.path.is_dir() and not any((self.path / n).exists() for n in ("state.json", "dataset_dict.json")):
            files = sorted(path for path in self.path.iterdir() if path.suffix in FILE_SUFFIXES)
            if not files:
                raise DataError(
                    "no conversations in this folder", where=str(self.path),
                    why="neither a saved dataset nor .jsonl files", mend=f"mend source {self.cfg.name!r}",
                )  # fmt: skip
            return files
        looks_like_path = self.cfg.path.startswith((".", "/", "~")) or self.path.suffix in (*FILE_SUFFIXES, ".gz")
        if not self.path.is_dir() and looks_like_path:
            mend = f"check the path of source {self.cfg.name!r} in select.sources"
            raise DataError("source file not found", where=self.cfg.path, mend=mend)
        return None

    def read(self) -> Iterator[Raw]:
        """All records in the order of files and lines, bad ones with their error."""
        if self._files is None:
            rows = self._dataset()
            for number, row in enumerate(rows, start=1):
                yield _judged(self.cfg.path, number, row)
            return
        for path in self._files:
            for number, found in _file_rows(path, None):
                yield _judged(str(path), number, found)

    def fetch(self, wanted: Mapping[str, Collection[int]]) -> Iterator[Raw]:
        """The records of these files and numbers alone, in the order of `read`; others are not decoded."""
        if self._files is None:
            rows = self._dataset()
            for number in sorted(wanted.get(self.cfg.path, ())):
                yield _judged(self.cfg.path, number, rows[number - 1])
            return
        for path in self._files:
            numbers = wanted.get(str(path))
            if numbers:
                for number, found in _file_rows(path, numbers):
                    yield _judged(str(path), number, found)

    def _dataset(self) -> Any:
        if self.path.is_dir():
            return saved_dataset(self.path, self.cfg.split)
        return named_dataset(self.cfg.path, self.cfg.split)


def _judged(file: str, number: int, found: Any) -> Raw:
    if isinstance(found, DataError):
        return Raw(file, number, None, found)
    if not isinstance(found, dict):
        where = f"{file}, record {number}"
        error = DataError("record is not an object", where=where, why=type(found).__name__, mend=MEND)
        return Raw(file, number, None, error)
    return Raw(file, number, found)


def _file_rows(path: Path, wanted: Collection[int] | None) -> Iterator[tuple[int, Any]]:
    """(number, record or DataError) of the wanted records of a file; None = all."""
    if path.suffix == ".json":
        for number, record in enumerate(_whole_list(path), start=1):
            if wanted is None or number in wanted:
                yield number, record
        return
    number = 0
    with open(path, "rb") as handle:
        for line_number, line in enumerate(handle, start=1):
            if not line.strip():
                continue
            number += 1
            if wanted is not None and number not in wanted:
                continue
            try:
                yield number, decoded_line(line)
            except (ValueError, RecursionError) as err:
                where = f"{path}, record {number}, line {line_number}"
                yield number, DataError("not a JSON line", where=where, why=str(err), mend=line_mend(err))


def _whole_list(path: Path) -> list:
    try:
        data = decoded_line(path.read_bytes())
    except (ValueError, RecursionError) as err:
        mend = "give a list of records, or JSON lines as .jsonl"
        raise DataError("not a JSON file", where=str(path), why=str(err), mend=mend) from None
    if not isinstance(data, list):
        mend = "give a list of records, or JSON lines as .jsonl"
        raise DataError("not a list of records", where=str(path), why=f"found {type(data).__name__}", mend=mend)
    return data
