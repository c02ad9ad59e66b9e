from __future__ import annotations

import gzip
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from data_prep.legacy.formats import TEACHER, find_files, find_rows, read_record, spread
from data_prep.legacy.loading import load_tensors
from eagle3.errors import DataError, IntegrityError, RedraftError

H = 64
ORIGIN = ("embedding", "layer_2", "layer_4", "layer_6")


def first(folder: Path) -> Any:
    return read_record(find_files(folder)[0], H)


def test_v1_lists_keep_their_order_and_the_last_is_the_teacher(write_v1: Callable[..., Path], samples: Any) -> None:
    record = first(write_v1(*ORIGIN))
    assert record.format.name == "speculators-v1"
    assert [slot.label for slot in record.slots] == [f"hidden_states[{i}]" for i in range(4)]
    assert [slot.role == TEACHER for slot in record.slots] == [False, False, False, True]
    assert torch.equal(record.slots[2].state, samples[0].states["layer_4"])
    assert torch.equal(record.input_ids, samples[0].ids)
    assert record.loss_mask.tolist() == samples[0].mask.bool().tolist()  # on the token itself, unshifted


def test_v0_and_specforge_joined_states_are_cut_by_width(
    write_v0: Callable[..., Path], write_specforge: Callable[..., Path], samples: Any
) -> None:
    v0, forge = first(write_v0(*ORIGIN)), first(write_specforge(*ORIGIN))
    assert (v0.format.name, forge.format.name) == ("speculators-v0", "specforge")
    for record in (v0, forge):
        assert [slot.role == TEACHER for slot in record.slots] == [False, False, False, True]
        for slot, site in zip(record.slots, ORIGIN, strict=True):
            assert torch.equal(slot.state, samples[0].states[site])


def test_gzipped_files_read_the_same(write_specforge: Callable[..., Path], samples: Any) -> None:
    files = find_files(write_specforge(*ORIGIN, compressed=True))
    assert [file.record_id for file in files] == [
        "rows_0-2/data_0", "rows_0-2/data_1", "rows_2-4/data_2", "rows_2-4/data_3",
    ]  # fmt: skip
    assert torch.equal(read_record(files[3], H).slots[1].state, samples[3].states["layer_2"])


def test_hs_files_take_their_masks_from_the_rows(write_hs: Callable[..., Path], samples: Any) -> None:
    folder = write_hs(*ORIGIN)
    rows = find_rows(folder)
    files = find_files(folder)
    record = read_record(files[1], H, rows)
    assert record.format.name == "speculators-hs"
    assert record.loss_mask is not None
    assert record.loss_mask.tolist() == samples[1].mask.bool().tolist()
    assert torch.equal(record.slots[3].state, samples[1].states["layer_6"])
    assert record.slots[3].role == TEACHER
    assert read_record(files[1], H).loss_mask is None


def test_hs_files_of_other_tokens_than_the_row_are_refused(write_hs: Callable[..., Path]) -> None:
    folder = write_hs(*ORIGIN, other_tokens_in=2)
    with pytest.raises(DataError, match="row 2 holds other tokens"):
        read_record(find_files(folder)[2], H, find_rows(folder))


def test_files_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for i in (10, 9, 2):
        (tmp_path / f"data_{i}.pt").touch()
    assert [file.record_id for file in find_files(tmp_path)] == ["data_2", "data_9", "data_10"]
    (tmp_path / "data_2.pt.gz").touch()
    with pytest.raises(IntegrityError, match="two files of one name"):
        find_files(tmp_path)


def test_samples_are_spread_from_first_to_last(tmp_path: Path) -> None:
    for i in range(9):
        (tmp_path / f"data_{i}.pt").touch()
    files = find_files(tmp_path)
    assert [file.record_id for file in spread(files, 3)] == ["data_0", "data_4", "data_8"]
    assert len(spread(files, 20)) == 9


def test_code_in_a_file_is_never_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(marker),)

    torch.save({"input_ids": torch.ones(3), "hidden_states": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(IntegrityError) as err:
        load_tensors(tmp_path / "evil.pt")
    assert "mkdir" in str(err.value)
    assert "could run code" in str(err.value)
    assert not marker.exists()


def test_truncated_files_are_one_line(write_v1: Callable[..., Path], write_specforge: Callable[..., Path]) -> None:
    plain = write_v1(*ORIGIN) / "data_0.pt"
    packed = write_specforge(*ORIGIN, compressed=True) / "rows_0-2" / "data_0.ckpt.gz"
    for path in (plain, packed):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        with pytest.raises(IntegrityError, match="truncated or corrupt") as err:
            load_tensors(path)
        assert str(path) in str(err.value)
        assert "\n" not in str(err.value)
    plain.write_bytes(b"")
    with pytest.raises(IntegrityError):
        load_tensors(plain)


def test_content_that_unpacks_to_more_than_allowed_is_refused(tmp_path: Path) -> None:
    bomb = tmp_path / "data_0.ckpt.gz"
    with gzip.open(bomb, "wb") as handle:
        handle.write(bytes(3_000_000))
    assert bomb.stat().st_size < 10_000
    with pytest.raises(IntegrityError, match="sample file too large"):
        load_tensors(bomb, max_bytes=2_000_000)
    archive = tmp_path / "data_1.pt"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as handle:
        handle.writestr("x/data/0", bytes(3_000_000))
    with pytest.raises(IntegrityError, match="sample file too large"):
        load_tensors(archive, max_bytes=2_000_000)


def test_a_view_larger_than_its_file_is_refused(tmp_path: Path) -> None:
    states = torch.zeros(1, 64).expand(1000, 64)
    torch.save({"input_ids": torch.ones(1000).long(), "hidden_states": [states]}, tmp_path / "data_0.pt")
    (file,) = find_files(tmp_path)
    with pytest.raises(DataError, match="at most 100,000 are read"):
        read_record(file, H, max_bytes=100_000)


def save(path: Path, **data: Any) -> None:
    base = {"input_ids": torch.arange(8), "loss_mask": torch.ones(8), "hidden_states": [torch.zeros(8, H)] * 4}
    torch.save({k: v for k, v in {**base, **data}.items() if v is not None}, path)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"hidden_states": [torch.zeros(7, H)] * 4}, "shape [7, 64] for 8 tokens"),
        ({"hidden_states": [torch.zeros(8, H + 1)] * 4}, "65 wide, no multiple of the target's hidden size 64"),
        ({"hidden_states": [torch.full((8, H), float("nan"))] * 4}, "hidden_states[0] holds NaN"),
        ({"hidden_states": [torch.zeros(8, H).long()] * 4}, "no dense tensor of floats"),
        ({"hidden_states": []}, "empty list"),
        ({"hidden_states": None}, "of no layout known here"),
        ({"loss_mask": torch.ones(7)}, "7 mask entries for 8 tokens"),
        ({"loss_mask": torch.full((8,), 3)}, "other values than 0 and 1"),
        ({"input_ids": torch.rand(8)}, "input_ids has dtype"),
        ({"input_ids": torch.zeros(0).long()}, "expected [T]"),
    ],
)
def test_files_that_do_not_fit_say_what_does_not(tmp_path: Path, data: dict[str, Any], said: str) -> None:
    save(tmp_path / "data_0.pt", **data)
    with pytest.raises(RedraftError) as err:
        first(tmp_path)
    assert said in str(err.value)
    assert "data_0.pt" in str(err.value)


def test_a_folder_without_samples_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match="no sample files"):
        find_files(tmp_path)
