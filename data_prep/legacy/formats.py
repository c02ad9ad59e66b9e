"""The layouts of other tools' sample files, read into one shape: ids, mask, and labelled [T, H] slots.

Read from:

- speculators v0 and v1 `.pt`: train/data.py (`standardize_data_v0`, `standardize_data_v1`, `shift_batch`) and
  scripts/data_generation_offline.py, up to the removal of that generator.
- speculators `hs_<i>.safetensors`: train/data.py (`ArrowDataset`), scripts/data_generation_offline.py of 0.9.
- SpecForge `.ckpt`, `.ckpt.gz`: scripts/prepare_hidden_states.py and `OfflineEagle3Dataset.process_data`.

All of them keep the loss mask on the token itself, as the store does; their readers shift it. SpecForge's reader
zeroes the mask of the last token when it loads a file, which no file shows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from data_prep.legacy.loading import MAX_BYTES, MEND, load_tensors
from eagle3.errors import DataError, IntegrityError

SUFFIXES = (".ckpt.gz", ".ckpt", ".pt.gz", ".pt", ".safetensors")
NOT_SAMPLES = ("token_freq.pt", "d2t.pt", "t2d.pt")  # what the same tools leave beside their samples
INPUT, TEACHER = "input", "teacher"
MAX_TOKENS = 2**24  # of one sample; a damaged shape may claim more


@dataclass(frozen=True)
class LegacyFormat:
    """One tool's layout.

    Args:
        name: short name.
        reading: how that tool's training reads the file, as a clause.
        norms_teacher: whether that training puts the teacher through the target's final norm.
    """

    name: str
    reading: str
    norms_teacher: bool


V0 = LegacyFormat("speculators-v0", "joins `hidden_state` as it is and takes `target` as the final state", True)
V1 = LegacyFormat(
    "speculators-v1", "joins `hidden_states[:-1]` and takes the last tensor, whatever it is, as the final state", True
)
HS = LegacyFormat(
    "speculators-hs",
    "joins `hidden_states[:, :-1]` and takes the last slot, whatever it is, as the final state",
    True,
)
SPECFORGE = LegacyFormat(
    "specforge", "joins `aux_hidden_state` as it is and takes `hidden_state` as the normed final state", False
)


@dataclass(frozen=True)
class Slot:
    """A [T, H] tensor of a sample; `role` is what its tool uses it for: `input` or `teacher`."""

    label: str
    role: str
    state: Tensor


@dataclass(frozen=True)
class LegacyRecord:
    """One sample: `input_ids` [T] int64, `loss_mask` [T] bool or None where the file has none, slots in file order."""

    record_id: str
    path: Path
    format: LegacyFormat
    input_ids: Tensor
    loss_mask: Tensor | None
    slots: tuple[Slot, ...]


@dataclass(frozen=True)
class LegacyFile:
    """A sample file and the id its record gets: its path below the set's folder, without the suffix."""

    path: Path
    record_id: str


class Rows(Protocol):
    """Ids and masks kept apart from the states: row index -> dict with `input_ids` and `loss_mask`."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Any: ...


def find_files(root: Path) -> list[LegacyFile]:
    """The sample files of a folder and those below it (or the one file), in the order of their numbers.

    Raises:
        IntegrityError: nothing there, or two files of one name (a compressed and a plain copy).
    """
    root = Path(root)
    paths = [root] if root.is_file() else [p for p in root.rglob("*") if p.is_file()]
    base = root.parent if root.is_file() else root
    found: dict[str, Path] = {}
    for path in sorted(paths, key=lambda p: _natural(str(p.relative_to(base)))):
        suffix = next((s for s in SUFFIXES if path.name.endswith(s)), None)
        if suffix is None or path.name in NOT_SAMPLES or path.name.startswith("."):
            continue
        record_id = str(path.relative_to(base)).removesuffix(suffix)
        if record_id in found:
            raise IntegrityError(
                "two files of one name", where=str(path), why=f"also {found[record_id].name}", mend="keep one copy"
            )
        found[record_id] = path
    if not found:
        why = f"no file that ends in {', '.join(SUFFIXES)}"
        raise IntegrityError("no sample files", where=str(root), why=why, mend="point at the folder of the samples")
    return [LegacyFile(path, record_id) for record_id, path in found.items()]


def _natural(text: str) -> list[tuple[int, str]]:
    """data_2 before data_10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text) if part]


def find_rows(root: Path, given: Path | None = None) -> Rows | None:
    """Open the Arrow rows that go with `hs_<i>.safetensors`: `given`, or the folder of the set, or the one above.

    Raises:
        IntegrityError: `given` is no dataset.
    """
    from datasets import load_from_disk

    candidates = [given] if given else [root, root.parent]
    for folder in candidates:
        if (Path(folder) / "dataset_info.json").is_file() or given:
            try:
                return load_from_disk(str(folder))
            except Exception as err:  # datasets and arrow raise kinds of their own
                raise IntegrityError(
                    "rows cannot be read", where=str(folder), why=str(err)[:200], mend="give --rows a saved dataset"
                ) from None
    return None


def read_record(
    file: LegacyFile, hidden_size: int, rows: Rows | None = None, max_bytes: int = MAX_BYTES
) -> LegacyRecord:
    """Read and check one sample.

    Args:
        file: what `find_files` gave.
        hidden_size: H of the target, by which joined states are split.
        rows: ids and masks of `hs_<i>.safetensors`, row i for file i; the ids must be the file's.
        max_bytes: largest content read from one file.

    Raises:
        IntegrityError: the file cannot be loaded.
        DataError: no known layout, shapes that do not fit, states that are not finite or no floats, other ids.
    """
    data = load_tensors(file.path, max_bytes)
    kind, parts = _recognise(file, data)
    ids = _vector(file, data["token_ids" if kind is HS else "input_ids"], "input_ids")
    total = sum(part.numel() * part.element_size() for _, _, part in parts)
    if total > max_bytes:  # a view can be larger than the file that it is in
        raise _bad(file, f"states of {total:,} bytes, at most {max_bytes:,} are read")
    slots = [slot for label, role, part in parts for slot in _split(file, label, role, part, ids.numel(), hidden_size)]
    if kind is HS or kind is V1:  # their reader takes the last one as the teacher
        slots[-1] = Slot(slots[-1].label, TEACHER, slots[-1].state)
    for slot in slots:
        if not bool(slot.state.isfinite().all()):
            raise _bad(file, f"{slot.label} holds NaN or infinite values")
    return LegacyRecord(file.record_id, file.path, kind, ids, _mask(file, kind, data, ids, rows), tuple(slots))


def _recognise(file: LegacyFile, data: dict[str, Any]) -> tuple[LegacyFormat, list[tuple[str, str, Tensor]]]:
    """The layout by its keys, and its tensors as (label, role, tensor)."""
    keys = set(data)
    if {"token_ids", "hidden_states"} <= keys:
        kind, parts = HS, [("hidden_states", INPUT, data["hidden_states"])]
    elif {"input_ids", "hidden_state", "target"} <= keys:
        kind, parts = V0, [("hidden_state", INPUT, data["hidden_state"]), ("target", TEACHER, data["target"])]
    elif {"input_ids", "hidden_states"} <= keys:
        states = data["hidden_states"]
        listed = states if isinstance(states, (list, tuple)) else None
        kind = V1
        parts = [("hidden_states", INPUT, states)]
        if listed is not None:
            parts = [(f"hidden_states[{i}]", INPUT, part) for i, part in enumerate(listed)]
    elif {"input_ids", "aux_hidden_state"} <= keys:
        kind, parts = SPECFORGE, [("aux_hidden_state", INPUT, data["aux_hidden_state"])]
        if data.get("hidden_state") is not None:
            parts.append(("hidden_state", TEACHER, data["hidden_state"]))
    else:
        raise _bad(file, f"keys {', '.join(sorted(map(str, keys))) or 'none'} are of no layout known here")
    for label, _, part in parts:
        if not isinstance(part, Tensor) or part.layout != torch.strided or not part.is_floating_point():
            raise _bad(file, f"{label} is no dense tensor of floats")
    if not parts:
        raise _bad(file, "hidden_states is an empty list")
    return kind, parts


def _split(file: LegacyFile, label: str, role: str, part: Tensor, tokens: int, width: int) -> list[Slot]:
    """Cut [T, k*H], [T, k, H] or [1, T, k*H] into k slots."""
    state = part
    if state.ndim == 3 and state.shape[0] == 1 and state.shape[1] == tokens:
        state = state[0]
    if state.ndim == 3:
        state = state.flatten(1)
    if state.ndim != 2 or state.shape[0] != tokens:
        raise _bad(file, f"{label} has shape {list(part.shape)} for {tokens} tokens")
    if state.shape[1] == 0 or state.shape[1] % width:
        raise _bad(file, f"{label} is {state.shape[1]} wide, no multiple of the target's hidden size {width}")
    count = state.shape[1] // width
    if count == 1:
        return [Slot(label, role, state)]
    return [Slot(f"{label} part {i}", role, state[:, i * width : (i + 1) * width]) for i in range(count)]


def _vector(file: LegacyFile, value: Any, name: str) -> Tensor:
    """[T] int64 from a tensor of shape [T] or [1, T], or a list."""
    try:
        vector = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise _bad(file, f"{name} is no list of numbers") from None
    if vector.ndim == 2 and vector.shape[0] == 1:
        vector = vector[0]
    if vector.ndim != 1 or vector.numel() == 0 or vector.is_complex() or vector.numel() > MAX_TOKENS:
        raise _bad(file, f"{name} has shape {list(vector.shape)}, expected [T]")
    if name == "input_ids" and vector.is_floating_point():
        raise _bad(file, f"input_ids has dtype {vector.dtype}")
    return vector.long()


def _mask(file: LegacyFile, kind: LegacyFormat, data: dict[str, Any], ids: Tensor, rows: Rows | None) -> Tensor | None:
    value = data.get("loss_mask")
    if kind is HS and rows is not None:
        value = _row(file, ids, rows)["loss_mask"]
    if value is None:
        return None
    mask = _vector(file, value, "loss_mask")
    if mask.numel() != ids.numel():
        raise _bad(file, f"{mask.numel()} mask entries for {ids.numel()} tokens")
    if not set(mask.unique().tolist()) <= {0, 1}:
        raise _bad(file, "loss_mask holds other values than 0 and 1")
    return mask.bool()


def _row(file: LegacyFile, ids: Tensor, rows: Rows) -> Any:
    match = re.search(r"hs_(\d+)$", file.record_id)
    if match is None or int(match[1]) >= len(rows):
        raise _bad(file, f"no row for it among {len(rows)} rows")
    row = rows[int(match[1])]
    if _vector(file, row["input_ids"], "input_ids").tolist() != ids.tolist():
        raise _bad(file, f"row {match[1]} holds other tokens than the file")
    return row


def _bad(file: LegacyFile, why: str) -> DataError:
    return DataError("a sample file does not fit", where=str(file.path), why=why, mend=MEND)


def spread(files: Sequence[LegacyFile], count: int) -> list[LegacyFile]:
    """`count` files spread evenly over the set, the first and the last among them."""
    if count >= len(files):
        return list(files)
    if count == 1:
        return [files[0]]
    return [files[round(i * (len(files) - 1) / (count - 1))] for i in range(count)]
