"""Check a hidden-state store byte by byte, and make room for what is damaged to be extracted again.

  check STORE   name every damaged shard and its records; change nothing
  mend STORE    remove the damaged shards: the extract stage captures them anew

Exit codes: 0 whole, or mended; 1 damage was found (check); 2 no store, or a file that cannot be read or removed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from data_prep.store.mend import find_damage, remove_damage
from eagle3.command_line import Parser, one_line_errors
from eagle3.errors import RedraftError
from eagle3.place import store_place
from eagle3.shard_file import mend_of


@one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; exit code 2 and one line on an expected failure."""
    parser = Parser(
        prog="python -m data_prep.store", description=__doc__, examples="python -m data_prep.store check runs/x/store"
    )
    parser.add_argument("command", choices=["check", "mend"], help="only look, or also remove what is damaged")
    parser.add_argument("store", help="folder of the store, or its URL")
    args = parser.parse_args(argv)
    try:
        return run(args.command, args.store)
    except OSError as err:
        where, why = str(err.filename or args.store), err.strerror or str(err)
        mend = "check the path and its permissions"
        raise RedraftError("cannot read or change the store", where=where, why=why, mend=mend) from None


def run(command: str, path: str) -> int:
    """Look, tell, and with `mend` remove; the exit code."""
    store = store_place(path)
    findings = find_damage(store)
    for finding in findings:
        print(finding.line)
    if not findings:
        print(f"{store}: every byte is as it was written")
        return 0
    if command == "check":
        print(f"{len(findings)} files are damaged. To mend: {mend_of(store)}")
        return 1
    remove_damage(store, findings)
    print(f"{len(findings)} damaged files are removed; the extract stage captures their records again, and no others")
    return 0


if __name__ == "__main__":
    sys.exit(main())
