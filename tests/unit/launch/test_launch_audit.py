"""The audit fails on an advisory, and says plainly when nobody could be asked."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.audit import audit

FLAW = {"id": "GHSA-1", "fix_versions": ["2.0"]}


def tool(folder: Path, report: Any, code: int) -> list[str]:
    """A program that writes `report` where it is told, and ends with `code`."""
    script = folder / "tool.py"
    script.write_text(
        "import sys\n"
        f"report, code = {json.dumps(report)!r}, {code}\n"
        "if report != 'null': open(sys.argv[sys.argv.index('-o') + 1], 'w').write(report)\n"
        "else: print('ConnectionError: no such host', file=sys.stderr)\n"
        "sys.exit(code)\n"
    )
    return [sys.executable, str(script)]


@pytest.mark.parametrize(
    ("report", "code", "exit_code", "words"),
    [
        ({"dependencies": [{"name": "a", "version": "1.0", "vulns": []}]}, 0, 0, "1 packages of lock.txt looked up, 0"),
        ({"dependencies": [{"name": "a", "version": "1.0", "vulns": [FLAW]}]}, 1, 1, "a 1.0: GHSA-1, mended in 2.0"),
        (
            {"dependencies": [{"name": "b", "skip_reason": "not there"}]},
            0,
            0,
            "NOT AUDITED: osv knows none of the packages",
        ),
        (
            {"dependencies": [{"name": "b", "skip_reason": "not there"}, {"name": "a", "version": "1", "vulns": []}]},
            0,
            0,
            "not looked up: b (not there)\n1 packages",
        ),
        (None, 1, 0, "NOT AUDITED: ConnectionError: no such host"),
    ],
)
def test_each_end_of_an_audit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], report: Any, code: int, exit_code: int, words: str
) -> None:
    assert audit(tool(tmp_path, report, code), tmp_path / "lock.txt") == exit_code
    assert words in capsys.readouterr().out
