"""Load one sample file as plain tensors, without running code from it and without filling the memory."""

from __future__ import annotations

import gzip
import io
import re
import zipfile
import zlib
from pathlib import Path
from typing import Any

import torch

from eagle3.errors import IntegrityError

MAX_BYTES = 16 * 2**30  # of one file's content; a Kimi-K2.5 sample of 32k tokens with 4 tensors is 1.9 GB
BLOCK = 2**20
MEND = "write the file again with the tool that made it, or leave it out with --skip-bad"


def load_tensors(path: Path, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """Read a `.safetensors`, `.pt`, `.ckpt` or gzipped torch file.

    Torch files are opened with `weights_only=True` alone, and mapped instead of read where their layout allows it.

    Returns:
        The file's dict; values are tensors, lists of them, or plain values.

    Raises:
        IntegrityError: absent, truncated, larger than `max_bytes` once decompressed, or a file that would need Python
            objects to be built from it, which can run code.
    """
    path = Path(path)
    if not path.is_file():
        raise IntegrityError("sample file not found", where=str(path), mend="check the folder")
    if path.name.endswith(".safetensors"):
        return _load_safetensors(path, max_bytes)
    if path.name.endswith(".gz"):
        source: Any = io.BytesIO(_decompress(path, max_bytes))
        options = {}
    else:
        _check_size(path, max_bytes)
        source, options = str(path), {"mmap": zipfile.is_zipfile(path)}
    try:
        data = torch.load(source, map_location="cpu", weights_only=True, **options)
    except Exception as err:  # torch raises half a dozen kinds on a damaged file, pickle's own among them
        raise _unreadable(path, err) from None
    if not isinstance(data, dict):
        raise IntegrityError("not a sample file", where=str(path), why=f"it holds a {type(data).__name__}", mend=MEND)
    return data


def _load_safetensors(path: Path, max_bytes: int) -> dict[str, Any]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    _refuse_size(path, path.stat().st_size, max_bytes)
    try:
        return dict(load_file(path))
    except (SafetensorError, OSError, ValueError) as err:
        raise IntegrityError("sample file truncated or corrupt", where=str(path), why=str(err), mend=MEND) from None


def _check_size(path: Path, max_bytes: int) -> None:
    """A zip may name sizes far above its own; torch would believe them."""
    size = path.stat().st_size
    if zipfile.is_zipfile(path):
        try:
            with zipfile.ZipFile(path) as archive:
                size = max(size, sum(info.file_size for info in archive.infolist()))
        except (zipfile.BadZipFile, OSError, ValueError) as err:
            raise IntegrityError("sample file corrupt", where=str(path), why=str(err), mend=MEND) from None
    _refuse_size(path, size, max_bytes)


def _refuse_size(path: Path, size: int, max_bytes: int) -> None:
    if size > max_bytes:
        raise IntegrityError(
            "sample file too large",
            where=str(path),
            why=f"{size:,} bytes or more of content, at most {max_bytes:,} are read",
            mend="raise --max-file-gib if the file is what it should be",
        )


def _decompress(path: Path, max_bytes: int) -> bytes:
    out = bytearray()
    try:
        with gzip.open(path, "rb") as handle:
            while block := handle.read(BLOCK):
                out += block
                _refuse_size(path, len(out), max_bytes)
    except (OSError, EOFError, zlib.error) as err:
        raise IntegrityError("gzip file truncated or corrupt", where=str(path), why=str(err), mend=MEND) from None
    return bytes(out)


def _unreadable(path: Path, err: Exception) -> IntegrityError:
    text = str(err)
    match = re.search(r"(?:GLOBAL|class) ([A-Za-z_][\w.]*\.[A-Za-z_]\w*)", text)
    if match and "nsupported" in text:
        return IntegrityError(
            "sample file holds more than tensors",
            where=str(path),
            why=f"building {match[1]} from it could run code, so it is not loaded",
            mend="write the file again with tensors and lists only",
        )
    why = " ".join(text.split())[:160]
    return IntegrityError("sample file truncated or corrupt", where=str(path), why=why, mend=MEND)
