"""Codecs: bit for bit where they say so, within their bound elsewhere, as a plain second implementation computes."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from benchmarks import store as benchmark
from data_prep.capture.sample import CapturedSample
from data_prep.store import Store, StoreManifest, StoreWriter
from eagle3 import state_codec
from eagle3.errors import DataError, IntegrityError, RedraftError
from eagle3.shard_file import Shard
from eagle3.state_codec import ASIDE, BLOCK, CODECS, blocks, numbers_of, state_bytes

Maker = Callable[..., CapturedSample]
DTYPES = ("bfloat16", "float16", "float32")
EIGHT_BITS = ("fp8", "int8")


def through(codec: str, state: Tensor) -> Tensor:
    pieces = CODECS[codec].encode(state)
    name = str(state.dtype).removeprefix("torch.")
    for part, piece in zip(CODECS[codec].parts(name, state.shape[1]), pieces, strict=True):
        assert piece.dtype == np.uint8 and (part.row is None or len(piece) == len(state) * part.row_bytes)
    return CODECS[codec].decode(pieces, name, state.shape[1])


def bits(state: Tensor) -> Tensor:
    return state.contiguous().view(torch.uint8)


@st.composite
def any_bits(draw: st.DrawFn) -> Tensor:
    """States of any bit pattern: NaN, infinities, minus zero and subnormals come up among them."""
    dtype, rows, width = draw(st.sampled_from(DTYPES)), draw(st.integers(1, 5)), draw(st.integers(1, 40))
    size = getattr(torch, dtype).itemsize
    some = st.lists(st.sampled_from([0, 1, 127, 128, 192, 255]), min_size=1, max_size=17)
    data = np.resize(np.array(draw(some), np.uint8), rows * width * size)
    return torch.from_numpy(data.copy()).view(getattr(torch, dtype)).view(rows, width)


@given(any_bits(), st.sampled_from(["raw", "lossless"]))
@settings(max_examples=150, deadline=None)
def test_raw_and_lossless_keep_every_bit(state: Tensor, codec: str) -> None:
    again = through(codec, state)
    assert again.shape == state.shape and again.dtype == state.dtype and torch.equal(bits(again), bits(state))


@pytest.mark.parametrize("dtype", DTYPES)
def test_lossless_keeps_special_numbers_and_makes_states_smaller(dtype: str) -> None:
    kind = getattr(torch, dtype)
    special = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 0.0, 1e-40, -1e-40, 65504.0]).to(kind)
    state = torch.cat([special.repeat(8), torch.randn(192, generator=torch.Generator().manual_seed(0)).to(kind)])
    assert torch.equal(bits(through("lossless", state[None])), bits(state[None]))
    many = torch.randn(64, 512, generator=torch.Generator().manual_seed(1)).to(kind)
    (piece,) = CODECS["lossless"].encode(many)
    assert len(piece) < {"bfloat16": 0.72, "float16": 0.87, "float32": 0.86}[dtype] * many.numel() * kind.itemsize


def plain_e4m3(code: int) -> float:
    """The number of an E4M3 code, from the definition of the format."""
    exponent, mantissa = (code >> 3) & 15, code & 7
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if code & 128 else size


E4M3 = {code: plain_e4m3(code) for code in range(256) if code & 127 != 127}


def plain_scale(largest: float, top: float) -> float:
    """`largest / top` in float32, then the next bfloat16 that is not smaller."""
    (word,) = struct.unpack("<I", struct.pack("<f", np.float32(largest) / np.float32(top)))
    word = (word + 0xFFFF) // 65536 * 65536
    return float(struct.unpack("<f", struct.pack("<I", word))[0])


def plain_fp8(row: list[float]) -> list[float]:
    out: list[float] = []
    for at in range(0, len(row), BLOCK):
        block = row[at : at + BLOCK]
        scale = plain_scale(max(map(abs, block)), 448.0)
        for number in block:
            ratio = float(np.float32(number) / np.float32(scale or 1.0))
            # the nearest code; of two equally near ones that with the even mantissa
            code = min(E4M3, key=lambda c: (abs(E4M3[c] - ratio), c & 1, (c >> 7) != (ratio < 0)))
            out.append(float(np.float32(E4M3[code]) * np.float32(scale)))
    return out


def plain_int8(row: list[float]) -> list[float]:
    out: list[float] = []
    for at in range(0, len(row), BLOCK):
        block = row[at : at + BLOCK]
        aside = set(sorted(range(len(block)), key=lambda i: -abs(block[i]))[:ASIDE])
        scale = plain_scale(max([abs(x) for i, x in enumerate(block) if i not in aside], default=0.0), 127.0)
        for i, number in enumerate(block):
            step = round(float(np.float32(number) / np.float32(scale or 1.0)))  # half to even, as IEEE
            out.append(number if i in aside else float(np.float32(step) * np.float32(scale)))
    return out


PLAIN = {"fp8": plain_fp8, "int8": plain_int8}


@st.composite
def states(draw: st.DrawFn) -> Tensor:
    """Finite bfloat16 or float32 states, with channels a thousand times larger, zero blocks and short last blocks."""
    rows, width = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3, 8, 127, 128, 129, 300]))
    gen = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    state = torch.randn(rows, width, generator=gen) * 10.0 ** draw(st.integers(-30, 30))
    for channel in draw(st.lists(st.integers(0, width - 1), max_size=4, unique=True)):
        state[:, channel] *= 1000.0
    if draw(st.booleans()):
        state[:, : width // 2] = 0.0
    return state.to(draw(st.sampled_from([torch.bfloat16, torch.float32])))


@pytest.mark.parametrize("codec", EIGHT_BITS)
@given(states())
@settings(max_examples=40, deadline=None)
def test_eight_bits_are_what_the_plain_way_computes(codec: str, state: Tensor) -> None:
    wanted = torch.tensor([PLAIN[codec](row) for row in state.float().tolist()], dtype=torch.float32).to(state.dtype)
    assert torch.equal(through(codec, state), wanted)


@pytest.mark.parametrize("codec", EIGHT_BITS)
@given(states())
@settings(max_examples=60, deadline=None)
def test_eight_bits_stay_within_their_bound(codec: str, state: Tensor) -> None:
    exact, found = state.double(), through(codec, state).double()
    rounding = 2.0**-8 if state.dtype == torch.bfloat16 else 2.0**-22  # of what is read, to its dtype
    for at in range(0, state.shape[1], BLOCK):
        block, again = exact[:, at : at + BLOCK], found[:, at : at + BLOCK]
        largest = block.abs().sort(dim=1, descending=True).values
        if codec == "fp8":  # half a step of 3 mantissa bits; of a subnormal, of 2^-9 of the scale
            bound = torch.maximum(block.abs() / 16, largest[:, :1] * 1.01 / 448 * 2.0**-10)
        else:
            third = largest[:, ASIDE : ASIDE + 1] if block.shape[1] > ASIDE else torch.zeros(len(block), 1)
            bound = (third * 1.01 / 127 / 2).expand_as(block)
            kept = block.abs() >= largest[:, min(ASIDE, block.shape[1]) - 1 :][:, :1]
            distinct = kept.sum(1, keepdim=True) <= ASIDE
            assert torch.equal(again[kept & distinct], block[kept & distinct])
        assert bool(((again - block).abs() <= bound + again.abs() * rounding + 1e-38).all())


@pytest.mark.parametrize("codec", EIGHT_BITS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_eight_bits_refuse_what_is_not_finite(
    codec: str, bad: float, tmp_path: Path, manifest: StoreManifest, make_sample: Maker
) -> None:
    sample = make_sample("odd", 4)
    sample.final[2, 3] = bad
    words = r"not finite.*record odd, final.*store\.codec=lossless"
    with StoreWriter(tmp_path, replace(manifest, codec=codec), 9) as writer, pytest.raises(DataError, match=words):
        writer.append(sample)
        writer.flush()
    assert not list(tmp_path.glob("*.safetensors"))


@pytest.fixture(params=list(CODECS))
def codec(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_store_gives_each_record_back_at_random(
    tmp_path: Path, manifest: StoreManifest, make_sample: Maker, codec: str
) -> None:
    samples = [make_sample(f"r{i}", tokens) for i, tokens in enumerate((5, 1, 9, 20, 3, 4))]
    with StoreWriter(tmp_path, replace(manifest, codec=codec), 12) as writer:
        for sample in samples:
            writer.append(sample)
        assert writer.finalize()
    store = Store.open(tmp_path)
    assert len(store.shards) > 1 and store.manifest.codec == codec
    for i in (5, 0, 3, 1, 4, 2):
        got, want = store[i], samples[i]
        assert torch.equal(got.input_ids, want.input_ids) and torch.equal(got.loss_mask, want.loss_mask)
        for name, state in {**want.sites, "final": want.final}.items():
            found = got.final if name == "final" else got.sites[name]
            assert torch.equal(bits(found), bits(through(codec, state))) and found.dtype == torch.bfloat16
    store.verify()


def test_only_the_asked_bytes_are_decoded(tmp_path: Path, manifest: StoreManifest, make_sample: Maker) -> None:
    """A block that is damaged costs its own record; the others of its shard are read as before."""
    with StoreWriter(tmp_path, replace(manifest, codec="lossless"), 100) as writer:
        samples = [make_sample(f"r{i}", 6) for i in range(3)]
        for sample in samples:
            writer.append(sample)
        writer.finalize()
    store = Store.open(tmp_path)
    shard = store.shards[0]
    whole = bytearray(shard.data.read_bytes())
    first = load_file(shard.data)["layer_1"].numpy().tobytes()
    at = whole.index(first) + shard.records[0].sizes["layer_1"]  # of r1
    whole[at] ^= 0xFF  # its frame's magic number
    shard.data.write_bytes(bytes(whole))
    store = Store.open(tmp_path)
    assert torch.equal(store[0].final, samples[0].final) and torch.equal(store[2].final, samples[2].final)
    with pytest.raises(IntegrityError, match=r"damaged.*record r1"):
        store[1]
    with pytest.raises(IntegrityError, match=r"1 of 3 records: r1\."):
        store.verify()


def test_every_flipped_bit_of_any_codec_is_laid_at_a_record_or_the_header(
    tmp_path: Path, manifest: StoreManifest, make_sample: Maker, codec: str
) -> None:
    with StoreWriter(tmp_path, replace(manifest, codec=codec), 100) as writer:
        for i in range(2):
            writer.append(make_sample(f"r{i}", 3))
        writer.finalize()
    (path,) = tmp_path.glob("*.safetensors")
    whole = path.read_bytes()
    for at in range(0, len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        with pytest.raises(IntegrityError, match=r"header is damaged|1 of 2 records: r[01]\."):
            Store.open(tmp_path).verify()
    path.write_bytes(whole)
    Store.open(tmp_path).verify()


def test_the_files_are_plain_safetensors(tmp_path: Path, manifest: StoreManifest, make_sample: Maker) -> None:
    """A reader that knows the documented layout alone finds the states."""
    sample = make_sample("r0", 7)
    for codec in ("lossless", "fp8", "int8"):
        with StoreWriter(tmp_path / codec, replace(manifest, codec=codec), 100) as writer:
            writer.append(sample)
            writer.finalize()
    state = sample.sites["layer_3"]
    files = {codec: load_file(tmp_path / codec / "shard-0-00000.safetensors") for codec in ("lossless", "fp8", "int8")}
    block = files["lossless"]["layer_3"].numpy().tobytes()
    high = zstandard.ZstdDecompressor().decompressobj().decompress(block)
    low = block[-state.numel() :]
    assert bytes(b for pair in zip(low, high, strict=True) for b in pair) == bits(state).numpy().tobytes()
    fp8 = files["fp8"]
    assert fp8["layer_3"].dtype == torch.float8_e4m3fn and fp8["layer_3.scales"].shape == (7, 1)
    read = (fp8["layer_3"].float() * fp8["layer_3.scales"].float()).bfloat16()
    assert torch.equal(read, through("fp8", state))
    int8 = files["int8"]
    read = (int8["layer_3"].float() * int8["layer_3.scales"].float()).bfloat16()
    read.scatter_(1, int8["layer_3.places"][:, 0].long(), int8["layer_3.aside"][:, 0])
    assert torch.equal(read, through("int8", state))


def test_bytes_a_token_follow_from_the_layout(tmp_path: Path, manifest: StoreManifest, make_sample: Maker) -> None:
    kimi = {codec: 4 * state_bytes(codec, "bfloat16", 7168) for codec in CODECS}
    assert kimi == {"raw": 57_344, "lossless": 57_344, "fp8": 29_120, "int8": 30_464} and blocks(7168) == 56
    for codec in ("raw", "fp8", "int8"):
        with StoreWriter(tmp_path / codec, replace(manifest, codec=codec), 1000) as writer:
            writer.append(make_sample("r", 200))
            writer.finalize()
        (shard,) = Store.open(tmp_path / codec).shards
        assert shard.bytes - shard.header_bytes == 200 * (3 * state_bytes(codec, "bfloat16", 8) + 5)


def test_a_store_is_not_continued_with_another_codec(
    tmp_path: Path, manifest: StoreManifest, make_sample: Maker
) -> None:
    with StoreWriter(tmp_path, replace(manifest, codec="int8"), 9) as writer:
        writer.append(make_sample("r0"))
        writer.finalize()
    with pytest.raises(RedraftError, match="codec is 'int8', expected 'raw'"):
        StoreWriter(tmp_path, manifest, 9)
    with pytest.raises(RedraftError, match=r"unknown store codec: found 'zip'.*raw, lossless, fp8, int8"):
        replace(manifest, codec="zip")
    manifest.write(tmp_path)
    with pytest.raises(IntegrityError, match="its states are kept as int8, the store's as raw"):
        Store.open(tmp_path)


def test_blocks_that_are_cut_or_made_up_are_refused() -> None:
    (block,) = CODECS["lossless"].encode(torch.randn(3, 8).bfloat16())
    for bad in (block[:-1], block[5:], block[:3], np.zeros(40, np.uint8)):
        with pytest.raises(ValueError):
            CODECS["lossless"].decode([bad], "bfloat16", 8)
    pieces = CODECS["int8"].encode(torch.randn(3, 8).bfloat16())
    pieces[3] = np.full_like(pieces[3], 200)
    with pytest.raises(ValueError, match="outside its block"):
        CODECS["int8"].decode(pieces, "bfloat16", 8)


def test_what_is_read_does_not_change_with_the_file(
    tmp_path: Path, manifest: StoreManifest, make_sample: Maker
) -> None:
    with StoreWriter(tmp_path, manifest, 9) as writer:
        writer.append(make_sample("r0"))
        writer.finalize()
    store = Store.open(tmp_path)
    got = store[0]
    kept = got.final.clone()
    got.final.add_(1.0)
    assert torch.equal(store[0].final, kept) and isinstance(store.shards[0], Shard)
    assert numbers_of(np.zeros(4, np.uint8), torch.float32).tolist() == [0.0]


def test_the_benchmark_leaves_its_figures_and_no_shard(
    tmp_path: Path, manifest: StoreManifest, make_sample: Maker
) -> None:
    with StoreWriter(tmp_path / "s", manifest, 100) as writer:
        for i in range(3):
            writer.append(make_sample(f"r{i}", 12))
        writer.finalize()
    out = tmp_path / "out"
    assert benchmark.main(["--store", str(tmp_path / "s"), "--rounds", "2", "--out", str(out)]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["store.json", "store.txt"]
    codecs = json.loads((out / "store.json").read_text())["codecs"]
    assert codecs["raw"]["ratio"] == 1.0 and codecs["lossless"]["error"]["worst_row"] == 0.0
    assert 0.0 < codecs["int8"]["error"]["row"] < codecs["fp8"]["error"]["row"] < 0.05
    with StoreWriter(tmp_path / "eight", replace(manifest, codec="fp8"), 100) as writer:
        writer.append(make_sample("r0"))
        writer.finalize()
    assert benchmark.main(["--store", str(tmp_path / "eight"), "--out", str(out)]) == 2


@pytest.mark.parametrize("width", [BLOCK, 3 * BLOCK])
@pytest.mark.parametrize("power", [-38, -30, -3, 0, 4, 30, 35])
def test_steps_in_place_are_the_steps_to_the_bit(width: int, power: int) -> None:
    gen = torch.Generator().manual_seed(power)
    state = (torch.randn(9, width, generator=gen) * torch.randn(width, generator=gen).exp() * 10.0**power).bfloat16()
    state[2] = 0.0
    parts = CODECS["int8"].encode(state)
    codes, scales = numbers_of(parts[0], torch.int8).view(9, width), numbers_of(parts[1], torch.bfloat16).view(9, -1)
    aside = numbers_of(parts[2], torch.bfloat16).view(9, -1, ASIDE)
    places = numbers_of(parts[3], torch.uint8).view(9, -1, ASIDE)
    plain, fast = torch.empty(9, width).bfloat16(), torch.empty(9, 2 * width).bfloat16()[:, width:]
    state_codec._steps(codes, scales, aside, places, plain)
    state_codec._steps_in_place(codes, scales, aside, places, fast)
    assert torch.equal(plain.view(torch.int16), fast.contiguous().view(torch.int16))
    assert torch.equal(CODECS["int8"].decode(parts, "bfloat16", width), plain)
