"""Finished answers on disk while the rest is being written: one JSON line each, behind a line of settings.

Every line ends with its own checksum. One that is damaged is passed over, and its record is asked for again.

Every line is handed to the operating system at once, so that a killed process loses nothing it had finished; it is
forced to the disk after `SYNC_RECORDS` lines or `SYNC_S` seconds, so that a power cut loses no more than these.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from eagle3.atomic import sync
from eagle3.checked_json import LINE_CHECKSUM, with_checksum, without_checksum
from eagle3.errors import ConfigError, IntegrityError

SYNC_RECORDS = 32
SYNC_S = 5.0
FORMAT = "redraft answers 1"


class PartFile:
    """Opens the file of an earlier run, or starts one.

    A torn end is cut off. A line in the middle that is no whole record any more stays and counts for nothing.

    Args:
        path: of the file.
        settings: all that bears on the answers, JSON-able; kept in the first line.

    Raises:
        ConfigError: the file was begun with other settings.
        IntegrityError: its first line cannot be read.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path = path
        self._places: dict[str, tuple[int, int]] = {}  # id -> (offset, length)
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        self._file = os.fdopen(fd, "r+b")
        try:
            end = self._index(settings)
        except BaseException:
            self._file.close()
            raise
        self._file.truncate(end)
        self._file.seek(end)
        self._end, self._unsynced, self._synced = end, 0, time.monotonic()
        if not end:
            self._write(record_line({"format": FORMAT, "settings": settings}))
            self.sync()
            sync(path.parent)

    def __contains__(self, record_id: str) -> bool:
        return record_id in self._places

    def __len__(self) -> int:
        return len(self._places)

    def _index(self, settings: dict[str, Any]) -> int:
        """Find the whole records; returns where they end."""
        head = self._file.readline()
        if not head.endswith(b"\n"):
            return 0  # killed while it was being begun
        check_settings(_settings(head, self.path), settings, self.path)
        end = len(head)
        for line in self._file:
            if not line.endswith(b"\n"):
                break
            record = whole_record(line)
            if record is not None:
                self._places.setdefault(record["id"], (end, len(line)))
            end += len(line)
        return end

    def append(self, record: dict[str, Any]) -> None:
        """Keep one finished record; it must have an `id` that is not there yet."""
        line = record_line(record)
        assert record["id"] not in self._places
        self._places[record["id"]] = (self._end, len(line))
        self._write(line)
        self._unsynced += 1
        if self._unsynced >= SYNC_RECORDS or time.monotonic() - self._synced >= SYNC_S:
            self.sync()

    def _write(self, line: bytes) -> None:
        self._file.write(line)
        self._file.flush()
        self._end += len(line)

    def sync(self) -> None:
        """Force everything to the disk."""
        os.fsync(self._file.fileno())
        self._unsynced, self._synced = 0, time.monotonic()

    def line(self, record_id: str) -> bytes:
        """The line of a finished record."""
        offset, length = self._places[record_id]
        return os.pread(self._file.fileno(), length, offset)

    def close(self) -> None:
        """Force everything to the disk and let go of the file; more than once does no harm."""
        if not self._file.closed:
            self.sync()
            self._file.close()


def check_settings(found: Any, wanted: dict[str, Any], where: Path) -> None:
    """Refuse answers that were made otherwise.

    Raises:
        ConfigError: naming what differs.
    """
    found = found if isinstance(found, dict) else {}
    differing = [k for k in sorted({*found, *wanted}) if found.get(k) != wanted.get(k)]
    if differing:
        shown = "; ".join(f"{k} was {found.get(k)!r}, now {wanted.get(k)!r}" for k in differing[:4])
        raise ConfigError(
            "answers made with other settings are here",
            where=str(where),
            why=shown,
            mend="set these back to go on with them, delete that folder to begin anew, or choose another one",
            page="samples",
        )


def json_line(record: dict[str, Any]) -> bytes:
    """One line of UTF-8 JSON; half of a surrogate pair, which no UTF-8 can hold, becomes U+FFFD."""
    text = json.dumps(record, ensure_ascii=False) + "\n"
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace").encode("utf-8")


def record_line(record: dict[str, Any]) -> bytes:
    """`json_line` with the record's checksum."""
    plain = json.loads(json_line(record))  # as it will be read
    return json_line(with_checksum(plain, LINE_CHECKSUM))


def whole_record(line: bytes) -> dict[str, Any] | None:
    """The record of a line that `record_line` wrote, or an older version; None for a torn, damaged or foreign one."""
    try:
        record = json.loads(line)
        record = without_checksum(record, LINE_CHECKSUM) if isinstance(record, dict) else {}
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record.get("id"), str) else None


def whole_lines(answers: Path) -> dict[str, dict[str, Any]]:
    """The records of an answers file that are as they were written, by id."""
    with open(answers, "rb") as handle:
        records = [whole_record(line) for line in handle if line.endswith(b"\n")]
    return {record["id"]: record for record in records if record is not None}


def _settings(head: bytes, path: Path) -> Any:
    try:
        first = without_checksum(json.loads(head), LINE_CHECKSUM)
        if first["format"] == FORMAT:
            return first["settings"]
        why = f"its format is {first['format']!r}"
    except (ValueError, KeyError, TypeError, RecursionError) as err:
        why = f"its first line cannot be read ({type(err).__name__}: {err})"
    raise IntegrityError("not a file of unfinished answers", where=str(path), why=why, mend="move or delete it")
