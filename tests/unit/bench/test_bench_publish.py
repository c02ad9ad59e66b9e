"""Tables of benchmarks: the same figures in the file and on any terminal."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.table import Table

from benchmarks.side_by_side import publish


@pytest.mark.parametrize("columns", ["60", "80", "200"])
def test_no_figure_is_cut_off_on_a_narrow_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    table = Table(*(f"a long heading {i}" for i in range(5)))
    table.add_row(*(f"{i}.123 (0.456-7.890)" for i in range(5)))
    publish(table, {"rows": []}, tmp_path, "one")
    told, kept = capsys.readouterr().out, (tmp_path / "one.txt").read_text()
    for i in range(5):
        assert f"{i}.123" in told and f"{i}.123" in kept
    assert "…" not in kept and "…" not in told
