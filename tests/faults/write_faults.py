"""Write docs/faults.md and docs/bad_input.md: plant every fault and note the line that catches it.

python tests/faults/write_faults.py [faults] [bad_input]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import bad_all
import planted_all
import torch
from faults_page import normal
from planted_bench import Bench

from data_prep.targets.tiny_llama import make_tiny_llama
from eagle3.atomic import write_text


def main() -> int:
    """Entry point; 1 when a fault was not caught."""
    torch.set_num_threads(1)
    pages = [page for page in (planted_all.PAGE, bad_all.PAGE) if not sys.argv[1:] or page.name in sys.argv[1:]]
    missed = []
    with tempfile.TemporaryDirectory() as name:
        target = make_tiny_llama(Path(name) / "target")
        for page in pages:
            bench = Bench(Path(name) / page.name, target)
            lines = [normal(fault.run(bench, True), bench) for fault in page.faults]
            missed += [fault.name for fault, line in zip(page.faults, lines, strict=True) if not line]
            write_text(page.path, page.text(lines))
            print(f"{len(lines)} faults in {page.path.name}")
    if missed:
        print("not caught: " + "; ".join(missed), file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
