"""One training process: `python -m train.worker job.json`, started by `train.launch`, torchrun or deepspeed."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from eagle3.atomic import write_json
from eagle3.errors import RedraftError
from train.job import TrainJob


def leave_with_parent() -> None:
    """End this process when the parent's end of stdin closes, however the parent died."""

    def watch() -> None:
        while os.read(0, 1024):
            pass
        os._exit(143)

    threading.Thread(target=watch, daemon=True).start()


def main(arguments: list[str]) -> int:
    """Train; exit codes: 0 done, 2 an expected failure (one line on stderr, and a file for the parent)."""
    if "--with-parent" in arguments:
        leave_with_parent()
    # torchrun and deepspeed may add options of their own (--local_rank=...)
    path = next((Path(a) for a in arguments if not a.startswith("--")), None)
    if path is None:
        print("error: usage: python -m train.worker job.json", file=sys.stderr)
        return 2
    rank = os.environ.get("RANK", "0")
    job: TrainJob | None = None
    try:
        job = TrainJob.load(path)
        from train.launch import ERROR_FILE, train_here

        train_here(job)
    except RedraftError as err:
        if job is not None:
            told = {"what": err.what, "where": err.where, "why": err.why, "mend": err.mend}
            write_json(Path(job.run_dir) / ERROR_FILE.format(rank=rank), {"kind": type(err).__name__, **told})
        if "--with-parent" not in arguments:  # a parent prints it
            print(f"error: {err}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
