"""The compatibility matrix: what is computed, and how measured cells are held against it."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from eagle3.wiring import Site, Wiring
from eval.matrix import __main__ as command
from eval.matrix.cells import BUILDS, Cell, matrix
from eval.matrix.measure import Measured
from eval.matrix.table import report


def kimi(*layers: int) -> Wiring:
    return Wiring(tuple(Site(k) for k in layers), "final", "deepseek_v3", 61, 64)


DRAFTS = {"native": kimi(3, 31, 59), "embedding": kimi(0, 3, 31)}
CELLS = {(c.draft, c.build, c.style): c for c in matrix(DRAFTS)}


@pytest.mark.parametrize(
    "draft, build, style, ids, fed, verdict",
    [
        ("native", "sglang-0.5.9", "old", (2, 30, 58), (3, 31, 59), "right"),
        ("native", "sglang-0.5.9-patched", "old", (2, 30, 58), (3, 31, 59), "right"),
        ("native", "sglang-0.5.23", "old", (2, 30, 58), (2, 30, 58), "wrong"),
        ("native", "sglang-0.5.23", "new", (3, 31, 59), (3, 31, 59), "right"),
        ("native", "sglang-0.5.23-patched", "new", (3, 31, 59), (3, 31, 59), "right"),
        ("native", "sglang-0.5.9", "new", (3, 31, 59), (4, 32, 60), "wrong"),
        ("embedding", "sglang-0.5.9", "old", (-1, 2, 30), None, "refused"),
        ("embedding", "sglang-0.5.9", "other", (2, 30, 58), (3, 31, 59), "wrong"),
        ("embedding", "sglang-0.5.9-patched", "old", (-1, 2, 30), (0, 3, 31), "right"),
        ("embedding", "sglang-0.5.23", "old", (-1, 2, 30), None, "refused"),
        ("embedding", "sglang-0.5.23", "new", (0, 3, 31), (0, 3, 31), "right"),
        ("embedding", "sglang-0.5.23-patched", "old", (-1, 2, 30), (0, 3, 31), "right"),
    ],
)
def test_a_cell_says_what_the_build_feeds(
    draft: str, build: str, style: str, ids: tuple[int, ...], fed: tuple[int, ...] | None, verdict: str
) -> None:
    one = CELLS[draft, build, style]
    assert one.ids == ids
    assert (one.fed and tuple(site.layer for site in one.fed.aux)) == fed
    assert one.verdict == verdict
    assert bool(one.why) == (verdict != "right")


def test_the_origin_storys_fault_is_named_slot_by_slot() -> None:
    why = CELLS["embedding", "sglang-0.5.9", "other"].why
    assert "slot 0 holds layer 3; expected the embedding" in why and "slot 2 holds layer 59; expected layer 31" in why


def test_a_native_draft_is_served_alike_patched_and_unpatched() -> None:
    for release in ("sglang-0.5.9", "sglang-0.5.23"):
        for style in ("old", "new"):
            plain, patched = (CELLS["native", build, style] for build in (release, f"{release}-patched"))
            assert (plain.ids, plain.fed, plain.serve_with) == (patched.ids, patched.fed, patched.serve_with)


def test_every_build_says_what_to_serve_with_or_that_nothing_will_do() -> None:
    assert {CELLS["native", build, "old"].serve_with for build in BUILDS} == {(2, 30, 58), (3, 31, 59)}
    assert CELLS["embedding", "sglang-0.5.13", "old"].serve_with is None


def served(cell: Cell, tau: float = 1.5, same: int = 2, verifies: int = 40) -> Measured:
    return Measured(cell.key, tau, tau - 0.1, tau + 0.1, verifies, ((1, 2), (3, 4)), same)


def shown(measured: dict[tuple[str, str, str], Measured]) -> tuple[str, bool]:
    by_key = {CELLS[place].key: one for place, one in measured.items()}
    return report(list(CELLS.values()), by_key, {"sglang-0.5.23": "SGLang 0.5.23"}, Console(quiet=True))


RIGHT = ("native", "sglang-0.5.23", "new")
ALSO_RIGHT = ("native", "sglang-0.5.23-patched", "new")
REFUSED = ("embedding", "sglang-0.5.23", "old")
WRONG = ("native", "sglang-0.5.23", "old")


def test_cells_that_did_as_computed_agree() -> None:
    text, agrees = shown(
        {
            RIGHT: served(CELLS[RIGHT]),
            ALSO_RIGHT: served(CELLS[ALSO_RIGHT]),
            WRONG: served(CELLS[WRONG], tau=1.1),
            REFUSED: Measured(CELLS[REFUSED].key, None, said="the server did not start: IndexError"),
        }
    )
    assert agrees
    assert "1.500 (1.40-1.60)" in text and "stopped" in text and "the server did not start: IndexError" in text
    assert "served without a word" in text and "6 of 6 texts" in text
    table = text.split("native on")[0]
    assert max(map(len, table.splitlines())) <= 80


@pytest.mark.parametrize(
    "planted, said",
    [
        ({RIGHT: Measured(CELLS[RIGHT].key, None, said="it died")}, "computed right, but it stopped (it died)"),
        ({REFUSED: served(CELLS[REFUSED])}, "computed refused, but it served (tau 1.500)"),
        ({RIGHT: served(CELLS[RIGHT], same=1)}, "1 of 2 texts are plain decoding's"),
        (
            {RIGHT: served(CELLS[RIGHT]), ALSO_RIGHT: served(CELLS[ALSO_RIGHT], tau=1.4)},
            "but accepts 1.400 and 1.500",
        ),
    ],
)
def test_a_cell_that_did_otherwise_is_named(planted: dict[tuple[str, str, str], Measured], said: str) -> None:
    text, agrees = shown(planted)
    assert not agrees
    assert said in next(line for line in text.splitlines() if line.startswith("DISAGREES"))


def test_finished_cells_are_kept_for_the_same_drafts_and_prompts_only(tmp_path: Path) -> None:
    path, one = tmp_path / "matrix.json", served(CELLS[RIGHT])
    kept = command._Kept(path, {"drafts": "a"})
    kept.keep_plain([[1, 2]])
    kept.keep(one)
    again = command._Kept(path, {"drafts": "a"})
    assert again.cells == {one.key: one} and again.plain == [[1, 2]]
    assert command._Kept(path, {"drafts": "b"}).cells == {}


def test_a_folder_that_is_no_run_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([str(tmp_path / "nowhere"), "--only-computed", "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and said[0].startswith("error: ") and "export stage" in said[0]
