"""What the fuzz tests feed to parsers: JSON of any shape, sound JSON and bytes with something changed.

The rule they all hold the product to: a parser takes what it is given or raises a RedraftError, and nothing else.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hypothesis import strategies as st

from eagle3.errors import RedraftError

EXTREME = [0, -1, 1, 2**31, -(2**31), 2**53, 2**63, -(2**63) - 1, 10**30, True, False]
texts = st.text(max_size=12) | st.sampled_from(["", "\0", "../x", "layer_2", "embedding", "NaN", "\ud800", "é\u202e"])
scalars = (
    st.none()
    | st.sampled_from(EXTREME)
    | st.integers(-1000, 1000)
    | st.floats()
    | st.sampled_from([float("nan"), float("inf"), -0.0, 1e300])
    | texts
)


def values(keys: Sequence[str] = ()) -> st.SearchStrategy[Any]:
    """JSON values of any shape; objects have some of `keys`."""
    names = st.sampled_from([*keys, "x"]) | texts
    return st.recursive(
        scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4), max_leaves=8
    )


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) of a JSON value."""
    inside = (
        list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    )
    for key, one in inside:
        yield value, key
        yield from _places(one)


@st.composite
def changed(draw: st.DrawFn, sound: Any) -> Any:
    """Sound JSON with one to three places replaced, emptied, or taken out."""
    whole = copy.deepcopy({"": sound})
    for _ in range(draw(st.integers(1, 3))):
        container, key = draw(st.sampled_from(list(_places(whole))))
        if draw(st.booleans()) and len(container) > 1:
            del container[key]
        else:
            container[key] = draw(values())
    return whole.get("")


@st.composite
def damaged(draw: st.DrawFn, sound: bytes) -> bytes:
    """Sound bytes with a few of them flipped, overwritten, taken out, doubled, or all after some place cut off."""
    raw = bytearray(sound)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(len(raw) - 1, 0)))
        size = draw(st.integers(1, 16))
        kind = draw(st.sampled_from(["flip", "write", "drop", "double", "cut", "zero"]))
        if kind == "flip" and raw:
            raw[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "write":
            raw[at : at + size] = draw(st.binary(min_size=size, max_size=size))
        elif kind == "drop":
            del raw[at : at + size]
        elif kind == "double":
            raw[at:at] = raw[at : at + size]
        elif kind == "zero":
            raw[at : at + size] = bytes(len(raw[at : at + size]))
        else:
            del raw[at:]
    return bytes(raw)


def taken_or_refused(parse: Callable[[], Any], *also: type[Exception]) -> Any:
    """What `parse` gives, or None when it refuses, in one line; `also`: a parser's own kind of refusal."""
    try:
        return parse()
    except RedraftError as err:
        assert "\n" not in str(err)
        assert len(str(err)) < 8000
    except also:
        pass
    return None


def walked(items: Iterator[Any]) -> list[Any]:
    """All that an iterator gives before it refuses."""
    found: list[Any] = []
    with contextlib.suppress(RedraftError):
        found.extend(items)
    return found
