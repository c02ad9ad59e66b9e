"""Names that a file gives to other files: they stay in their folder, whoever wrote them."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from eagle3.errors import IntegrityError
from eagle3.place import Place


def is_inside(name: Any) -> bool:
    """Whether `name` is a relative path that stays below the folder it is joined to, as its letters say.

    Links are not followed: a model folder may consist of links to a cache.
    """
    if not isinstance(name, str) or not name or "\0" in name or "\\" in name:
        return False
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and path.parts != ()


def inside(folder: Place, name: Any, where: str, mend: str) -> Place:
    """`folder / name`.

    Raises:
        IntegrityError: the name is none, or leads out of the folder; `where` it was read.
    """
    if not is_inside(name):
        why = f"it names {name!r}"[:200]
        raise IntegrityError("a file name that leads out of its folder", where=where, why=why, mend=mend)
    return folder / name
