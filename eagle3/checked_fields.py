"""Whether a dataclass that was filled from JSON holds what its annotations say: dataclasses themselves do not look."""

from __future__ import annotations

import contextlib
import types
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def filled(kind: type[T], data: dict[str, Any], name: str = "") -> T:
    """A dataclass from a JSON object of its fields; nested ones must have been filled before. `name` is for messages.

    Raises:
        TypeError: naming the fields that are missing, or unknown, or the first that holds something else.
    """
    assert is_dataclass(kind)
    lacking = [
        one.name
        for one in fields(kind)
        if one.name not in data and one.default is MISSING and one.default_factory is MISSING
    ]
    unknown = sorted(set(data) - {one.name for one in fields(kind)})
    if lacking or unknown:
        trouble = f"lacks {', '.join(lacking)}" if lacking else f"has unknown {', '.join(unknown)}"
        raise TypeError(f"{name or 'it'} {trouble}")
    value = kind(**data)
    check_fields(value, name)
    return value


def check_fields(value: Any, name: str = "") -> None:
    """Look at every field, in nested dataclasses, lists, tuples and mappings too; a whole number does for a float.

    Raises:
        TypeError: naming the first field that holds something else, `served[0].overall.tau`.
    """
    for field, kind in _hints(type(value)).items():  # type: ignore[arg-type]  # mypy takes no class for hashable
        _check(getattr(value, field), kind, f"{name}.{field}" if name else field)


def _check(value: Any, kind: Any, name: str) -> None:
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        _check_one_of(value, inner, name)
    elif origin in (list, tuple) and isinstance(value, list | tuple):
        for place, one in enumerate(value):
            _check(one, inner[0], f"{name}[{place}]")
    elif origin is dict and isinstance(value, dict):
        for key, one in value.items():
            _check(one, inner[1], f"{name}[{key!r}]")
    elif is_dataclass(kind) and type(value) is kind:
        check_fields(value, name)
    elif not _plain(value, kind):
        raise TypeError(f"{name} is {value!r:.60}, not {getattr(kind, '__name__', kind)}")


def _check_one_of(value: Any, kinds: tuple[Any, ...], name: str) -> None:
    for kind in kinds[:-1]:
        with contextlib.suppress(TypeError):
            return _check(value, kind, name)
    _check(value, kinds[-1], name)


def _plain(value: Any, kind: Any) -> bool:
    if kind is Any:
        return True
    if kind is float:
        return type(value) in (int, float)
    return type(value) is (type(None) if kind is None else kind)
