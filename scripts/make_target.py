"""Build one of the small targets: `python scripts/make_target.py NAME PATH`, NAME being smollm2 or tiny_kimi."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from data_prep.targets.ensure import MAKERS, make_target
from eagle3.command_line import Parser, one_line_errors


@one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; exit code 2 and one line on an expected failure."""
    parser = Parser(
        prog="python scripts/make_target.py",
        description="Build one of the small targets that the demo and the tests use.",
        examples="python scripts/make_target.py smollm2 targets/smollm2-135m-instruct",
    )
    parser.add_argument("name", help=f"which target: {', '.join(sorted(MAKERS))}")
    parser.add_argument("path", type=Path, help="folder to write")
    args = parser.parse_args(argv)
    print(make_target(args.name, args.path))
    return 0


if __name__ == "__main__":
    sys.exit(main())
