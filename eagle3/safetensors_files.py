"""A folder's safetensors, read by tensor name: headers checked against file sizes, tensors read one at a time.

Format: 8 bytes little-endian length of the header, a JSON header (name -> dtype, shape, data_offsets), then the data.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import struct
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from eagle3.atomic import read_json
from eagle3.errors import IntegrityError
from eagle3.inside import inside

MEND = "download or copy the target again and compare the file's size with its source"
SAMPLES, SAMPLE_BYTES = 16, 4096
MAX_HEADER = 100_000_000  # bytes, the format's own limit


def read_header(path: Path, mend: str = MEND) -> tuple[dict[str, Any], int]:
    """Read one file's header and check that the file is as long as the header says.

    Returns:
        `(header without __metadata__, offset of the data in bytes)`.

    Raises:
        IntegrityError: absent, a version-control pointer, not safetensors, or truncated; names the first tensor that
            is not whole.
    """
    try:
        size = path.stat().st_size
        with open(path, "rb") as handle:
            start = handle.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            raw = handle.read(length) if 0 < length <= MAX_HEADER else b""
    except OSError as err:
        raise IntegrityError("weights file not readable", where=str(path), why=str(err.strerror), mend=mend) from None
    if start == b"version ":
        why = "it is a Git LFS pointer, not the weights"
        raise IntegrityError(
            "weights file not readable", where=str(path), why=why, mend="run git lfs pull in the folder"
        )
    try:
        header = json.loads(raw)
        spans = {name: _span(entry) for name, entry in header.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        why = f"{size} bytes, no whole safetensors header"
        raise IntegrityError("weights file truncated or corrupt", where=str(path), why=why, mend=mend) from None
    header.pop("__metadata__", None)
    need = 8 + length + max((end for _, end in spans.values()), default=0)
    if size < need:
        lost = sorted((end, name) for name, (_, end) in spans.items() if 8 + length + end > size)
        why = (
            f"{size} bytes where its header needs {need}; {len(lost)} tensors are not whole, the first is {lost[0][1]}"
        )
        raise IntegrityError("weights file truncated", where=str(path), why=why, mend=mend)
    return header, 8 + length


def _span(entry: dict[str, Any]) -> tuple[int, int]:
    """First byte and end of a tensor, from the start of the data on. Raises ValueError or TypeError."""
    begin, end = entry["data_offsets"]
    if type(begin) is not int or type(end) is not int or not 0 <= begin <= end:
        raise ValueError("a tensor that begins or ends nowhere")
    return begin, end


def read_all(path: Path, mend: str = MEND) -> dict[str, Tensor]:
    """Every tensor of one file.

    Raises:
        IntegrityError: the file is absent, truncated, or no safetensors.
    """
    from safetensors import SafetensorError, safe_open

    read_header(path, mend)
    try:
        with safe_open(path, framework="pt") as handle:
            return {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, KeyError) as err:
        raise IntegrityError("unreadable weights", where=str(path), why=str(err), mend=mend) from None


class SafetensorsTensors:
    """All safetensors of a folder: through `*.safetensors.index.json` where there is one, else by their headers.

    Raises:
        IntegrityError: the index names a file that is absent, or two files hold one tensor.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._map = self._from_index() or self._from_headers()
        self.names = frozenset(self._map)

    def _from_index(self) -> dict[str, str]:
        index = self.folder / "model.safetensors.index.json"
        if not index.exists():
            found = sorted(self.folder.glob("*.safetensors.index.json"))
            if not found:
                return {}
            index = found[0]
        weight_map = read_json(index, mend=MEND).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise IntegrityError("the index has no weight_map", where=str(index), mend=MEND)
        absent: dict[str, str] = {}
        for name, file in weight_map.items():
            inside(self.folder, file, f"{index}: {name}", MEND)
            if file not in absent and not (self.folder / file).exists():
                absent[file] = name
        if absent:
            file, name = sorted(absent.items())[0]
            why = (
                f"{index.name} places {name} in it ({len(absent)} of {len(set(weight_map.values()))} files are absent)"
            )
            raise IntegrityError("weights file not found", where=str(self.folder / file), why=why, mend=MEND)
        return dict(weight_map)

    def _from_headers(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for path in sorted(self.folder.glob("*.safetensors")):
            for name in read_header(path)[0]:
                if name in found:
                    why = f"{name} is also in {found[name]}, and there is no index to choose"
                    raise IntegrityError("two files hold one tensor", where=str(path), why=why, mend="keep one copy")
                found[name] = path.name
        return found

    def where(self, name: str) -> str:
        """Path of the file that holds `name`."""
        return str(self.folder / self._map[name])

    def read(self, name: str) -> Tensor:
        """Read one tensor, dtype as stored.

        Raises:
            IntegrityError: the file is truncated, or does not hold the tensor that the index places in it.
        """
        with self.opened() as read:
            return read(name)

    @contextlib.contextmanager
    def opened(self) -> Iterator[Callable[[str], Tensor]]:
        """Yield a `read` for many tensors: each file is checked and opened once.

        Raises:
            IntegrityError: as `read`.
        """
        from safetensors import SafetensorError, safe_open

        handles: dict[Path, tuple[dict[str, Any], Any]] = {}
        with contextlib.ExitStack() as stack:

            def read(name: str) -> Tensor:
                path = self.folder / self._map[name]
                try:
                    if path not in handles:
                        header, _ = read_header(path)
                        handles[path] = header, stack.enter_context(safe_open(path, framework="pt"))
                    header, handle = handles[path]
                    if name in header:
                        return handle.get_tensor(name)
                except (SafetensorError, ValueError) as err:
                    where = f"{path}: {name}"
                    raise IntegrityError("tensor not readable", where=where, why=str(err), mend=MEND) from None
                why = "the index places it there, the file's header does not list it"
                raise IntegrityError(f"missing tensor {name}", where=str(path), why=why, mend=MEND)

            yield read

    @cached_property
    def _fingerprint(self) -> str:
        total = hashlib.sha256()
        for file in sorted(set(self._map.values())):
            path = self.folder / file
            _, data_start = read_header(path)
            total.update(f"{file}\0{path.stat().st_size}\0".encode())
            total.update(sampled_bytes(path, data_start))
        return total.hexdigest()

    def fingerprint(self) -> str:
        """SHA-256 over each file's name, size, header and 16 evenly spaced blocks of its data.

        Raises:
            IntegrityError: a file is truncated.
        """
        return self._fingerprint


def sampled_bytes(path: Path, data_start: int) -> bytes:
    """The file's head up to `data_start` and 16 blocks of 4 KiB spread evenly over the rest, the last one included."""
    size = path.stat().st_size
    span = max(size - data_start - SAMPLE_BYTES, 0)
    with open(path, "rb") as handle:
        parts = [handle.read(data_start)]
        for k in range(SAMPLES):
            handle.seek(data_start + span * k // (SAMPLES - 1))
            parts.append(handle.read(SAMPLE_BYTES))
    return b"".join(parts)
