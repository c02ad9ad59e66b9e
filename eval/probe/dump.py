"""Aux states of a server, kept in a file, so that two servers can be compared that never ran at once."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from eagle3.errors import IntegrityError
from eagle3.tensor_file import save_tensors

_FORMAT = "redraft-probe"


@dataclass(frozen=True)
class Dump:
    """What one server returned.

    Args:
        name: its address or file, for messages.
        ranks: its tensor-parallel ranks.
        version: its version.
        hidden_size: width H of a site.
        prompts: token ids of each prompt, [T] int64.
        states: aux states of each prompt, [T, k*H] float32.
    """

    name: str
    ranks: int
    version: str
    hidden_size: int
    prompts: list[Tensor]
    states: list[Tensor]


def save_dump(path: Path, dump: Dump) -> None:
    """Write a dump atomically as safetensors: `ids_<n>` [T] int64 and `states_<n>` [T, k*H] float32."""
    tensors = {f"ids_{n}": ids.contiguous() for n, ids in enumerate(dump.prompts)}
    tensors |= {f"states_{n}": rows.contiguous() for n, rows in enumerate(dump.states)}
    facts = {"ranks": dump.ranks, "version": dump.version, "hidden_size": dump.hidden_size, "from": dump.name}
    save_tensors(Path(path), tensors, {"format": _FORMAT, "facts": json.dumps(facts)})


def load_dump(path: Path) -> Dump:
    """Read a dump.

    Raises:
        IntegrityError: the file is missing, broken, or no dump.
    """
    mend = "write it again: python -m eval.probe live --url ... --target ... --save FILE"
    try:
        with safe_open(path, framework="pt") as handle:
            meta = handle.metadata() or {}
            if meta.get("format") != _FORMAT:
                raise ValueError("it is a safetensors file of another kind")
            facts: dict[str, Any] = json.loads(meta["facts"])
            count = sum(name.startswith("ids_") for name in handle.keys())  # noqa: SIM118
            prompts = [handle.get_tensor(f"ids_{n}") for n in range(count)]
            states = [handle.get_tensor(f"states_{n}") for n in range(count)]
            width = int(facts["hidden_size"])
            return Dump(str(path), int(facts["ranks"]), str(facts["version"]), width, prompts, states)
    except (SafetensorError, OSError, KeyError, ValueError, TypeError) as err:
        raise IntegrityError("not a dump of aux states", where=str(path), why=str(err), mend=mend) from None
