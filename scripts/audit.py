"""Look the pinned packages up in the public advisories: `python scripts/audit.py`, or `make audit`.

pip-audit runs in a virtual environment of its own. Where the advisories cannot be reached, the audit says so and
passes: a machine without that network can still build. Exit codes: 0 nothing is known against the packages, or nobody
could be asked; 1 something is; 2 a bad command line.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle3.command_line import Parser, one_line_errors

ROOT = Path(__file__).resolve().parents[1]
TOOL = "pip-audit>=2.9,<3"
SERVICES = ("pypi", "osv")  # asked in turn, until one knows any package
LIMIT_S = 300.0  # for the tool's installation, and for the audit


@one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = Parser(description=__doc__.partition("\n")[0], examples="python scripts/audit.py")
    parser.add_argument(
        "--venv", type=Path, default=ROOT / ".venv-audit", help="the tool's environment, made if absent"
    )
    parser.add_argument("--lock", type=Path, default=ROOT / "requirements" / "lock.txt", help="the pinned packages")
    args = parser.parse_args(argv)
    tool = args.venv / "bin" / "pip-audit"
    if not tool.exists():
        made = [sys.executable, "-m", "venv", str(args.venv)]
        why = _run(made) or _run([str(args.venv / "bin" / "python"), "-m", "pip", "install", "-q", TOOL])
        if why:
            return not_audited(f"pip-audit cannot be installed: {why}")
    return audit([str(tool)], args.lock)


def audit(tool: Sequence[str], lock: Path) -> int:
    """Run `tool` (pip-audit) on a file of pinned packages and judge its report; the exit code."""
    why = ""
    for service in SERVICES:
        packages, why = ask([*tool, "-s", service], lock)
        if any("skip_reason" not in one for one in packages):
            return judge(packages, lock)
        why = why or f"{service} knows none of the packages"
    return not_audited(why)


def ask(tool: Sequence[str], lock: Path) -> tuple[list[dict[str, Any]], str]:
    """What one service says of each package; or nothing, and why."""
    with tempfile.TemporaryDirectory(prefix="audit-") as folder:
        report = Path(folder) / "report.json"
        words = ["-r", str(lock), "--disable-pip", "--no-deps", "--progress-spinner", "off", "--timeout", "20"]
        why = _run([*tool, *words, "-f", "json", "-o", str(report)])
        try:
            return json.loads(report.read_text(encoding="utf-8"))["dependencies"], ""
        except (OSError, ValueError, KeyError):
            return [], why or "pip-audit wrote no report"


def judge(packages: list[dict[str, Any]], lock: Path) -> int:
    """Print what is known against each package; 1 if anything is."""
    skipped = [f"{one['name']} ({one['skip_reason']})" for one in packages if "skip_reason" in one]
    found = [(one, flaw) for one in packages for flaw in one.get("vulns", [])]
    for one, flaw in found:
        mended = ", ".join(flaw.get("fix_versions", [])) or "no version yet"
        print(f"{one['name']} {one['version']}: {flaw['id']}, mended in {mended}")
    for line in skipped:
        print(f"not looked up: {line}")
    print(f"{len(packages) - len(skipped)} packages of {lock.name} looked up, {len(found)} advisories against them")
    return 1 if found else 0


def not_audited(why: str) -> int:
    """Say that nobody could be asked; the exit code."""
    print(f"NOT AUDITED: {why}. The packages were not looked up; run `make audit` where the advisories can be reached")
    return 0


def _run(words: Sequence[str]) -> str:
    """Why a program failed, in one line; "" when it did not."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as err:
        return str(err).splitlines()[0]
    lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    return "" if done.returncode == 0 else (lines[-1].strip()[:300] if lines else f"exit code {done.returncode}")


if __name__ == "__main__":
    sys.exit(main())
