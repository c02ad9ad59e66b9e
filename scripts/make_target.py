"""Build one of the small targets: `python scripts/make_target.py NAME PATH`, NAME being smollm2 or tiny_kimi."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from data_prep.targets.ensure import MAKERS, make_target
from eagle3.errors import RedraftError


def main(argv: list[str] | None = None) -> int:
    """Entry point; exit code 2 and one line on an expected failure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", help=f"which target: {', '.join(sorted(MAKERS))}")
    parser.add_argument("path", type=Path, help="folder to write")
    args = parser.parse_args(argv)
    try:
        print(make_target(args.name, args.path))
    except RedraftError as err:
        print(err, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
