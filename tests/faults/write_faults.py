"""Write docs/faults.md: plant every fault and note the line that catches it.

python tests/faults/write_faults.py
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from planted_all import ALL, normal, table
from planted_bench import ROOT, Bench

from data_prep.targets.tiny_llama import make_tiny_llama
from eagle3.atomic import write_text


def main() -> int:
    """Entry point; 1 when a fault was not caught."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(Path(name) / "bench", make_tiny_llama(Path(name) / "target"))
        lines = [normal(fault.run(bench, True), bench) for fault in ALL]
    missed = [fault.name for fault, line in zip(ALL, lines, strict=True) if not line]
    if missed:
        print("not caught: " + "; ".join(missed), file=sys.stderr)
        return 1
    write_text(ROOT / "docs" / "faults.md", table(lines))
    print(f"{len(lines)} faults in docs/faults.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
