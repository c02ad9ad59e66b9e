"""A file of ours proves itself whole, bit by bit; names in files stay in their folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eagle3.atomic import write_json
from eagle3.checked_json import LINE_CHECKSUM, read_checked, with_checksum, without_checksum, write_checked
from eagle3.errors import IntegrityError
from eagle3.inside import inside, is_inside

VALUE = {"lr": 1e-05, "name": "naïve", "nested": {"b": [1, 2], "a": None}, "on": True}


def test_every_flipped_bit_is_found_or_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_checked(path, VALUE)
    whole, equal = path.read_bytes(), 0
    assert read_checked(path, "") == VALUE
    for bit in range(8 * len(whole)):
        path.write_bytes(whole[: bit // 8] + bytes([whole[bit // 8] ^ 1 << bit % 8]) + whole[bit // 8 + 1 :])
        try:
            assert read_checked(path, "") == VALUE
            equal += 1
        except IntegrityError:
            continue
    assert equal == 1  # 1e-05 may be written 1E-05


@pytest.mark.parametrize("content", ["[1]", "7", "{", '{"a": 1} x', "[" * 100_000])
def test_what_is_no_object_is_refused_in_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(IntegrityError, match="not a readable JSON file") as caught:
        read_checked(tmp_path / "x.json", "do this")
    assert "\n" not in str(caught.value) and "To mend: do this" in str(caught.value)


def test_files_of_before_are_read_as_they_are(tmp_path: Path) -> None:
    for value in (VALUE, {}, {"sha256": "0" * 64}):
        write_json(tmp_path / "x.json", value)
        assert read_checked(tmp_path / "x.json", "") == value


def test_a_line_of_others_may_have_a_checksum_of_its_own() -> None:
    foreign: dict[str, Any] = {"id": "1", "checksum": "f" * 64}
    assert without_checksum(foreign, LINE_CHECKSUM) == foreign
    ours = json.loads(json.dumps(with_checksum(foreign, LINE_CHECKSUM)))
    assert without_checksum(ours, LINE_CHECKSUM) == foreign
    with pytest.raises(ValueError, match="checksum"):
        without_checksum({**ours, "id": "2"}, LINE_CHECKSUM)
    with pytest.raises(ValueError, match="checksum"):
        without_checksum({**ours, "more": 1}, LINE_CHECKSUM)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x", "", ".", "a\0b", "..\\x", 7, None])
def test_a_name_that_leads_out_is_refused(tmp_path: Path, name: Any) -> None:
    assert not is_inside(name)
    with pytest.raises(IntegrityError, match="leads out of its folder"):
        inside(tmp_path, name, "here", "no")


def test_a_name_below_is_joined(tmp_path: Path) -> None:
    assert inside(tmp_path, "a/model-00001.safetensors", "here", "no") == tmp_path / "a/model-00001.safetensors"
