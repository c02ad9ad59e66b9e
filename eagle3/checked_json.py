"""JSON that proves itself whole: the last key of an object is a checksum over all the others.

Our files end with `checksum`, our lines of JSON lines with `redraft_sha256`: these are read beside other tools' lines.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from upath import UPath

from eagle3.atomic import read_json, sha256_json, write_json
from eagle3.errors import IntegrityError

CHECKSUM = "checksum"
LINE_CHECKSUM = "redraft_sha256"
DIGITS = 64  # of a SHA-256


def with_checksum(value: dict[str, Any], name: str = CHECKSUM) -> dict[str, Any]:
    """`value` with its checksum as the last key."""
    plain = json.loads(json.dumps(value))  # as it will be read: keys are strings, tuples are lists
    return {**value, name: sha256_json(plain)}


def without_checksum(data: dict[str, Any], name: str = CHECKSUM) -> dict[str, Any]:
    """What `with_checksum` was given. An object without a checksum, as older versions wrote, is taken as it is.

    Raises:
        ValueError: it is not what was written. A checksum under another name is damage, too.
    """
    last = next(reversed(data), "")
    told, rest = data.get(last), {key: value for key, value in data.items() if key != last}
    fits = isinstance(told, str) and len(told) == DIGITS and sha256_json(rest) == told
    if fits != (last == name) or name in rest:
        raise ValueError("its content does not fit its checksum")
    return rest if fits else data


def write_checked(path: Path | UPath, value: dict[str, Any]) -> None:
    """Write `value` with its checksum, atomically."""
    write_json(path, with_checksum(value))


def read_checked(path: Path | UPath, mend: str) -> dict[str, Any]:
    """Read an object and compare it with its checksum, if it has one.

    Raises:
        IntegrityError: the file is missing, no whole JSON object, or not what was written; `mend` ends its line.
    """
    data = read_json(path, mend=mend)
    try:
        return without_checksum(data)
    except ValueError as err:
        raise IntegrityError("a file is not what was written", where=str(path), why=str(err), mend=mend) from None
