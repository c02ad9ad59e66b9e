"""One training process: `python -m train.worker job.json`, started by `train.launch`, torchrun or deepspeed."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from eagle3.errors import RedraftError
from train.job import TrainJob
from train.telling import GONE, refusal, tell


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
    try:
        job = TrainJob.load(path)
        from train.launch import train_here

        train_here(job)
    except (RedraftError, OSError) as err:
        return leave(refusal(err, "a training process"), arguments)
    except KeyboardInterrupt:  # the parent, which has it too, says so
        return 130
    except RuntimeError as err:
        if not lost_group(err):
            raise
        return leave(RedraftError(GONE, why=str(err).splitlines()[0], mend="its own words say why"), arguments)
    return 0


def leave(err: RedraftError, arguments: list[str]) -> int:
    """Tell the parent, in the folder of `--errors`, and give the exit code."""
    folder = next((one.removeprefix("--errors=") for one in arguments if one.startswith("--errors=")), "")
    tell(err, folder, int(os.environ.get("RANK", "0")))
    return 2


def lost_group(err: RuntimeError) -> bool:
    """Whether torch says that another process of the group has ended; its errors have no common type."""
    return any(word in str(err) for word in ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
