"""What killed processes leave behind is told from what living ones write, and goes; nothing else does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from eagle3 import leftovers
from eagle3.atomic import replacing, write_text
from eagle3.leftovers import AGE, clear_leftovers, temporary

NAME = """
import sys
from pathlib import Path
from eagle3.leftovers import temporary
print(temporary(Path(sys.argv[1]), sys.argv[2]))
"""


def of_a_dead_writer(path: Path, kind: str = "tmp") -> Path:
    """A temporary name that a process of this machine gave, which has ended."""
    words = [sys.executable, "-c", NAME, str(path), kind]
    return Path(subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip())


@pytest.fixture(scope="module")
def dead(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Names of dead writers' leftovers by kind."""
    folder = tmp_path_factory.mktemp("names")
    return {kind: of_a_dead_writer(folder / "weights", kind).name for kind in ("tmp", "old")}


def test_a_dead_writers_file_and_folder_go_and_a_living_ones_stay(tmp_path: Path, dead: dict[str, str]) -> None:
    (tmp_path / "weights").write_text("whole")
    (tmp_path / dead["tmp"]).write_text("half")
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / dead["tmp"]).mkdir()
    (tmp_path / "below" / dead["tmp"] / "model").write_text("half")
    mine = temporary(tmp_path / "mine")
    mine.write_text("on its way")
    other = mine.with_name(mine.name.replace(leftovers._machine(), "0123abcd"))  # another machine's: nobody can tell
    other.write_text("on its way")
    for name in (".hidden", ".weights.tmp", ".lock", "x.tmp"):
        (tmp_path / name).write_text("not ours")
    clear_leftovers(tmp_path)
    assert not (tmp_path / dead["tmp"]).exists() and (tmp_path / "below" / dead["tmp"]).exists()
    clear_leftovers(tmp_path, deep=True)
    assert list((tmp_path / "below").iterdir()) == []
    kept = {"weights", mine.name, other.name, ".hidden", ".weights.tmp", ".lock", "x.tmp", "below"}
    assert {path.name for path in tmp_path.iterdir()} == kept
    clear_leftovers(tmp_path, alone=True)  # nobody else writes here: whose they are does not matter
    assert {path.name for path in tmp_path.iterdir()} == kept - {mine.name, other.name}
    clear_leftovers(tmp_path / "absent", deep=True)


def test_what_is_a_day_old_goes_whoever_wrote_it(tmp_path: Path) -> None:
    for name in (".a.0123abcd-7-01234567.tmp", ".b.77-01234567.tmp", ".c.0123456789abcdef.tmp", ".d.4711.tmp"):
        (tmp_path / name).write_text("half")
        fresh = tmp_path / f".fresh{name}"
        fresh.write_text("half")
        os.utime(tmp_path / name, (fresh.stat().st_mtime - AGE - 60,) * 2)
    clear_leftovers(tmp_path)
    assert len(list(tmp_path.iterdir())) == 4 and all(path.name.startswith(".fresh") for path in tmp_path.iterdir())


def test_what_was_moved_aside_is_put_back_unless_its_place_is_taken(tmp_path: Path, dead: dict[str, str]) -> None:
    old = tmp_path / dead["old"]
    old.mkdir()
    (old / "model").write_text("the old one")
    clear_leftovers(tmp_path)
    assert (tmp_path / "weights/model").read_text() == "the old one" and not old.exists()
    old.mkdir()
    clear_leftovers(tmp_path)
    assert (tmp_path / "weights/model").read_text() == "the old one" and not old.exists()


def test_an_atomic_write_leaves_a_name_that_is_known_while_it_lasts(tmp_path: Path) -> None:
    with replacing(tmp_path / "file") as tmp:
        tmp.write_text("new")
        assert leftovers._NAME.fullmatch(tmp.name)
        clear_leftovers(tmp_path)
        assert tmp.exists()  # its writer lives
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    write_text(tmp_path / "file", "newer")
    assert (tmp_path / "file").read_text() == "newer"
