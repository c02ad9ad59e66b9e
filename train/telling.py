"""How a worker process tells its parent of an expected failure: a file in a folder that the parent made for it.

That folder lies among the system's temporary files: the disk that the work is done on may be the one that is full.
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
    fields = {name: getattr(err, name) for name in FIELDS}
    write_json(Path(folder) / f"{number}.json", {"kind": type(err).__name__, **fields})


def told(folder: str, number: int) -> RedraftError | None:
    """What worker `number` told, if it did."""
    path = Path(folder) / f"{number}.json"
    if not path.exists():
        return None
    found = read_json(path)
    kind: type[RedraftError] = getattr(errors, found["kind"], RedraftError)
    return kind(found["what"], **{name: found[name] for name in FIELDS[1:]})
