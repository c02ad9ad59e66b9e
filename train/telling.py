"""How a worker process tells its parent of an expected failure: in its parts, over a pipe or in a file.

The parent makes the folder of such files among the system's temporary ones: the disk that the work is done on may be
the one that is full.
"""

from __future__ import annotations

import sys
from pathlib import Path

from eagle3 import errors
from eagle3.atomic import read_json, write_json
from eagle3.errors import RedraftError

GONE = "another training process is gone"  # what those say that were waiting for it
FIELDS = ("what", "where", "why", "mend", "page")


def refusal(err: RedraftError | OSError, who: str, where: str = "") -> RedraftError:
    """The error itself, or one line for a full disk or a folder that cannot be read or written.

    Args:
        err: what was raised.
        who: worked there.
        where: that was, if the system does not say.
    """
    if isinstance(err, RedraftError):
        return err
    return RedraftError(
        f"{who} could not read or write a file",
        where=str(err.filename or where),
        why=err.strerror or str(err),
        mend="free space or fix the permissions, then run the same command again: finished work is kept",
    )


def tell(err: RedraftError, folder: str, number: int) -> None:
    """Leave the error of worker `number` for the parent; without a folder there is none, and it is printed here."""
    if not folder:
        print(f"error: {err}", file=sys.stderr)
        return
    write_json(Path(folder) / f"{number}.json", parts_of(err))


def told(folder: str, number: int) -> RedraftError | None:
    """What worker `number` told, if it did."""
    path = Path(folder) / f"{number}.json"
    if not path.exists():
        return None
    return error_of(read_json(path))


def parts_of(err: RedraftError) -> dict[str, str]:
    """An error as plain text values; `error_of` makes it again."""
    return {"kind": type(err).__name__, **{name: getattr(err, name) for name in FIELDS}}


def error_of(parts: dict[str, str]) -> RedraftError:
    """The error that `parts_of` took apart."""
    kind: type[RedraftError] = getattr(errors, parts["kind"], RedraftError)
    return kind(parts["what"], **{name: parts[name] for name in FIELDS[1:]})
