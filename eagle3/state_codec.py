"""How hidden states lie on disk: as they are, compressed bit for bit, or in 8 bits a channel.

A codec turns a state [T, H] into one or more *parts*, each a tensor of the data file, and back. The parts of `raw`,
`fp8` and `int8` have T rows of a fixed size; those of `lossless` have a length of their own for each record.

- `lossless`: the exponents of hidden states are few, their mantissas are noise. The most significant byte of every
  number is compressed by Huffman coding alone (zstd, its match search all but switched off: on real states matches
  save nothing and cost half the speed); the other bytes are kept as they are.
- `fp8`: E4M3 with a scale for each token and block of 128 channels.
- `int8`: 127 even steps to each side, with the same scales. A few channels of an LLM's residual stream are hundreds of
  times larger than the rest and would leave their block too few steps, so the two largest numbers of each block are
  kept aside in the store's dtype.

Scales are bfloat16, rounded up, so no number is clipped. Layout: docs/formats.md; figures: benchmarks/store.py.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import zstandard
from torch import Tensor
from torch.nn import functional

from eagle3.errors import DataError

warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # what is decoded is only read

Bytes = np.ndarray  # [n] uint8

BLOCK = 128  # channels that share a scale
ASIDE = 2  # numbers of a block that int8 keeps aside
CACHED = 1 << 17  # numbers encoded at a time
DECODED = 1 << 19  # numbers decoded at a time
FP8_MAX, INT8_MAX = 448.0, 127.0
CODES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}  # safetensors' names
ITEMSIZE = {"F32": 4, "I32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "I8": 1, "U8": 1}


@dataclass(frozen=True)
class Part:
    """A tensor of the data file that holds some of a state.

    Args:
        suffix: added to the state's name.
        code: safetensors' name of its dtype.
        row: its shape without the rows; None where its length depends on the content.
    """

    suffix: str
    code: str
    row: tuple[int, ...] | None

    @property
    def row_bytes(self) -> int:
        """Bytes a row; 0 where that depends on the content."""
        return 0 if self.row is None else int(np.prod(self.row)) * ITEMSIZE[self.code]


class Codec(ABC):
    """A way to keep a state."""

    @abstractmethod
    def parts(self, dtype: str, width: int) -> list[Part]:
        """The parts of a state of `width` channels whose dtype is `dtype` (`bfloat16`, `float16`, `float32`)."""

    @abstractmethod
    def encode(self, state: Tensor) -> list[Bytes]:
        """The bytes of each part of `state` [T, H].

        Raises:
            DataError: the codec cannot keep it.
        """

    def rows(self, parts: Sequence[Bytes], dtype: str, width: int) -> int:
        """Rows T of a state, by the length of its bytes.

        Raises:
            ValueError: they are of no whole number of rows.
        """
        each = self.parts(dtype, width)[0].row_bytes
        if len(parts[0]) % each:
            raise ValueError(f"{len(parts[0])} bytes in rows of {each}")
        return len(parts[0]) // each

    @abstractmethod
    def decode_into(self, parts: Sequence[Bytes], out: Tensor, first: int = 0) -> None:
        """Write rows `first` to `first + R` of a state into `out` [R, width], of its dtype, whose rows may lie apart.

        Raises:
            ValueError, RuntimeError: the bytes are not what `encode` gives for that dtype and width.
        """

    def decode(self, parts: Sequence[Bytes], dtype: str, width: int) -> Tensor:
        """[T, width] in `dtype`, a copy.

        Raises:
            ValueError, RuntimeError: the bytes are not what `encode` gives.
        """
        out = torch.empty(self.rows(parts, dtype, width), width, dtype=getattr(torch, dtype))
        self.decode_into(parts, out)
        return out


class Raw(Codec):
    """As they are."""

    def parts(self, dtype: str, width: int) -> list[Part]:
        """One part, [T, H]."""
        return [Part("", CODES[dtype], (width,))]

    def encode(self, state: Tensor) -> list[Bytes]:
        """The state's memory, uncopied when it is contiguous."""
        return [to_bytes(state)]

    def decode_into(self, parts: Sequence[Bytes], out: Tensor, first: int = 0) -> None:
        """From the bytes."""
        out.copy_(_rows(numbers_of(parts[0], out.dtype).view(-1, out.shape[1]), out, first))


class Lossless(Codec):
    """Bit for bit: one zstd frame of the most significant bytes, then the other bytes of each number as they are."""

    def __init__(self) -> None:
        self._params = zstandard.ZstdCompressionParameters.from_level(
            1, strategy=zstandard.STRATEGY_FAST, hash_log=6, min_match=7, target_length=0, write_content_size=True
        )

    def parts(self, dtype: str, width: int) -> list[Part]:
        """One part, of any length."""
        return [Part("", "U8", None)]

    def encode(self, state: Tensor) -> list[Bytes]:
        """Little-endian numbers, so the most significant byte is the last."""
        numbers = to_bytes(state).reshape(-1, state.element_size())
        high = zstandard.ZstdCompressor(compression_params=self._params).compress(
            np.ascontiguousarray(numbers[:, -1]).data
        )
        return [np.concatenate([np.frombuffer(high, np.uint8), numbers[:, :-1].reshape(-1)])]

    def rows(self, parts: Sequence[Bytes], dtype: str, width: int) -> int:
        """As the frame tells."""
        return self._frame(parts, getattr(torch, dtype).itemsize, width)[0] // width

    def _frame(self, parts: Sequence[Bytes], size: int, width: int) -> tuple[int, Bytes, Bytes]:
        """How many numbers there are, the frame, and the other bytes."""
        (block,) = parts
        try:
            count = zstandard.frame_content_size(block[:32].tobytes())
        except zstandard.ZstdError as err:
            raise ValueError(str(err)) from None
        rest = count * (size - 1)
        if count < 0 or rest > len(block) or count % width:
            raise ValueError(f"{len(block)} bytes for {count} numbers")
        return count, block[: len(block) - rest], block[len(block) - rest :]

    def decode_into(self, parts: Sequence[Bytes], out: Tensor, first: int = 0) -> None:
        """Any byte string that is not a whole block is refused."""
        size, width = out.element_size(), out.shape[1]
        count, frame, low = self._frame(parts, size, width)
        try:
            high = zstandard.ZstdDecompressor().decompress(frame.data, max_output_size=count, allow_extra_data=False)
        except zstandard.ZstdError as err:
            raise ValueError(str(err)) from None
        upper = _rows(numbers_of(np.frombuffer(high, np.uint8), torch.uint8).view(-1, width), out, first)
        lower = _rows(numbers_of(low, torch.uint8).view(-1, width * (size - 1)), out, first)
        for at in _steps_of(out):
            _merge(upper[at], lower[at], out[at])


def _merge(high: Tensor, low: Tensor, out: Tensor) -> None:
    """Numbers from their most significant bytes [R, W] and their other bytes [R, W * (size - 1)]."""
    size = out.element_size()
    if size == 2:  # twice as fast as filling in every other byte
        out.view(torch.int16).copy_(high.to(torch.int16).bitwise_left_shift_(8).bitwise_or_(low))
        return
    merged = torch.empty(*high.shape, size, dtype=torch.uint8)
    merged[..., -1], merged[..., :-1] = high, low.view(*high.shape, size - 1)
    out.copy_(merged.view(out.dtype).squeeze(-1))


class Fp8(Codec):
    """E4M3 codes and a bfloat16 scale for each token and block: an error of at most 1/16 of any normal number."""

    def parts(self, dtype: str, width: int) -> list[Part]:
        """Codes [T, H]; scales [T, ceil(H / 128)]."""
        return [Part("", "F8_E4M3", (width,)), Part(".scales", "BF16", (blocks(width),))]

    def encode(self, state: Tensor) -> list[Bytes]:
        """Refuses what is not finite."""
        return _by_rows(self._encode, [state], state.shape[1])

    def _encode(self, state: Tensor) -> list[Tensor]:
        numbers = in_blocks(state.float())
        scales = scales_of(numbers, FP8_MAX)
        return [divided(numbers, scales).to(torch.float8_e4m3fn).flatten(1)[:, : state.shape[1]], scales]

    def decode_into(self, parts: Sequence[Bytes], out: Tensor, first: int = 0) -> None:
        """From the codes and scales."""
        codes = _rows(numbers_of(parts[0], torch.int8).view(-1, out.shape[1]), out, first)
        scales = _rows(numbers_of(parts[1], torch.bfloat16).view(-1, blocks(out.shape[1])), out, first)
        for at in _steps_of(out):
            out[at] = _e4m3(codes[at], scales[at])


def _e4m3(codes: Tensor, scales: Tensor) -> Tensor:
    """Numbers [T, H] float32 of E4M3 bits [T, H] int8 and scales [T, B].

    E4M3 is the upper part of float16 with another bias: 256 times the float16 of the same bits, subnormals included.
    """
    halves = codes.to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)  # the sign stands in bits 15 and 14
    numbers = in_blocks(halves.view(torch.float16).float())
    return numbers.mul_((scales.float() * 256.0)[..., None]).flatten(1)[:, : codes.shape[1]]


class Int8(Codec):
    """Even steps, a bfloat16 scale for each token and block, and the block's two largest numbers aside, exactly.

    The error of a number is at most half a step: 1/254 of the third largest number of its block, scale rounded up.
    """

    def parts(self, dtype: str, width: int) -> list[Part]:
        """Codes [T, H]; scales [T, B]; numbers aside and their channels within the block, [T, B, 2]."""
        count = blocks(width)
        return [
            Part("", "I8", (width,)),
            Part(".scales", "BF16", (count,)),
            Part(".aside", CODES[dtype], (count, ASIDE)),
            Part(".places", "U8", (count, ASIDE)),
        ]

    def encode(self, state: Tensor) -> list[Bytes]:
        """Refuses what is not finite."""
        return _by_rows(self._encode, [state], state.shape[1])

    def _encode(self, state: Tensor) -> list[Tensor]:
        numbers = in_blocks(state.float())
        places = numbers.abs().topk(ASIDE, -1).indices
        aside = all_finite(numbers.gather(-1, places))
        numbers = numbers.scatter(-1, places, 0.0)
        scales = scales_of(numbers, INT8_MAX)
        codes = divided(numbers, scales).round_().to(torch.int8).flatten(1)[:, : state.shape[1]]
        return [codes, scales, aside.to(state.dtype), places.to(torch.uint8)]

    def decode_into(self, parts: Sequence[Bytes], out: Tensor, first: int = 0) -> None:
        """Steps times scale, then the numbers aside in their places."""
        count = blocks(out.shape[1])
        codes = _rows(numbers_of(parts[0], torch.int8).view(-1, out.shape[1]), out, first)
        scales = _rows(numbers_of(parts[1], torch.bfloat16).view(-1, count), out, first)
        aside = _rows(numbers_of(parts[2], out.dtype).view(-1, count, ASIDE), out, first)
        places = _rows(numbers_of(parts[3], torch.uint8).view(-1, count, ASIDE), out, first)
        if places.numel() and int(places.max()) >= BLOCK:
            raise ValueError("a place outside its block")
        fill = _steps_in_place if out.dtype == scales.dtype and not out.shape[1] % BLOCK else _steps
        for at in _steps_of(out):
            fill(codes[at], scales[at], aside[at], places[at], out[at])


def _steps(codes: Tensor, scales: Tensor, aside: Tensor, places: Tensor, out: Tensor) -> None:
    """Numbers [R, H]: steps [R, H] times scales [R, B], and the numbers aside [R, B, 2] in their places."""
    numbers = in_blocks(codes.float()).mul_(scales.float()[..., None]).to(out.dtype)
    numbers.scatter_(-1, places.long(), aside)
    out.copy_(numbers.flatten(1)[:, : out.shape[1]])


def _steps_in_place(codes: Tensor, scales: Tensor, aside: Tensor, places: Tensor, out: Tensor) -> None:
    """The same in bfloat16 with whole blocks, in fewer passes over memory.

    A step and a scale have 8 bits each at most: both are exact in bfloat16, and their product is rounded once.
    """
    numbers = codes.to(out.dtype).unflatten(1, (-1, BLOCK))
    torch.mul(numbers, scales[..., None], out=out.unflatten(1, (-1, BLOCK)))
    rows = torch.arange(len(out))[:, None, None]
    channels = places.long() + (torch.arange(scales.shape[1]) * BLOCK)[:, None]
    out[rows, channels] = aside


def _by_rows(run: Callable[..., list[Tensor]], inputs: Sequence[Tensor], width: int) -> list[Bytes]:
    """The bytes of what `run` gives for all rows, computed a few rows at a time: what it needs stays in the cache."""
    step = max(1, CACHED // width)
    pieces = [[to_bytes(out) for out in run(*(x[at : at + step] for x in inputs))] for at in _starts(inputs[0], step)]
    return [np.concatenate(part) for part in zip(*pieces, strict=True)]


def _starts(rows: Tensor, step: int) -> range:
    return range(0, max(len(rows), 1), step)


def _steps_of(out: Tensor) -> list[slice]:
    """Rows handled at a time when decoding."""
    step = max(1, DECODED // out.shape[1])
    return [slice(at, at + step) for at in range(0, len(out), step)]


def _rows(state: Tensor, out: Tensor, first: int) -> Tensor:
    """The rows of `state` that `out` asks for.

    Raises:
        ValueError: it has not so many.
    """
    if len(state) < first + len(out):
        raise ValueError(f"{len(state)} rows")
    return state[first : first + len(out)]


CODECS: dict[str, Codec] = {"raw": Raw(), "lossless": Lossless(), "fp8": Fp8(), "int8": Int8()}
ROUNDING = ("fp8", "int8")  # the codecs that do not give back what was stored


def state_bytes(codec: str, dtype: str, width: int) -> int:
    """Bytes a token of one state of `width` channels; for `lossless` its upper bound, that of `raw`."""
    parts = CODECS["raw" if codec == "lossless" else codec].parts(dtype, width)
    return sum(part.row_bytes for part in parts)


def blocks(width: int) -> int:
    """Blocks of `width` channels; the last may be short."""
    return -(-width // BLOCK)


def in_blocks(state: Tensor) -> Tensor:
    """[T, H] -> [T, B, 128], filled up with zeros."""
    short = -state.shape[1] % BLOCK
    return (functional.pad(state, (0, short)) if short else state).reshape(len(state), -1, BLOCK)


def all_finite(numbers: Tensor) -> Tensor:
    """The numbers themselves.

    Raises:
        DataError: one of them is not finite: it has no scale.
    """
    if not bool(torch.isfinite(numbers).all()):
        mend = "find out why the target computed NaN or infinity there, or set store.codec=lossless to keep it so"
        raise DataError("states that are not finite cannot be kept in 8 bits", mend=mend)
    return numbers


def scales_of(numbers: Tensor, largest: float) -> Tensor:
    """[T, B, 128] -> [T, B] bfloat16: what makes the largest number of each block `largest` or a little less."""
    return round_up(all_finite(numbers.abs().amax(-1)) / largest)


def round_up(scales: Tensor) -> Tensor:
    """Scales >= 0 as the next bfloat16 that is not smaller."""
    return ((scales.view(torch.int32) + 0xFFFF) >> 16).to(torch.int16).view(torch.bfloat16)


def divided(numbers: Tensor, scales: Tensor) -> Tensor:
    """[T, B, 128] over [T, B]; a block of zeros stays zero."""
    return numbers / torch.where(scales > 0, scales.float(), 1.0)[..., None]


def to_bytes(tensor: Tensor) -> Bytes:
    """The tensor's bytes in memory order, uncopied when it is contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


def numbers_of(data: Bytes, dtype: torch.dtype) -> Tensor:
    """`data` as [n] numbers of `dtype`, to be read only: the same memory, which may be mapped from a file."""
    return torch.from_numpy(data).view(dtype)
