"""One extraction worker of several: `python -m train.front.extract_worker TASK NUMBER ERRORS`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from omegaconf import OmegaConf

from eagle3.atomic import read_json
from eagle3.errors import RedraftError
from train.front.config import register, typed
from train.telling import refusal, tell
from train.worker import leave_with_parent


def main(task: Path, number: str, errors: str) -> int:
    """Work until nothing is left; exit codes: 0 done, 2 an expected failure (told to the parent in folder `errors`)."""
    leave_with_parent()
    os.environ.setdefault("TQDM_DISABLE", "1")
    told = read_json(task)
    try:
        register()
        config = typed(OmegaConf.create(told["config"]))
        from datasets import disable_progress_bars
        from transformers.utils.logging import disable_progress_bar, set_verbosity_error

        from data_prep.extract import Part
        from data_prep.store import StoreManifest
        from train.front.context import Run
        from train.front.extraction import Work, extract_here

        disable_progress_bars()
        disable_progress_bar()
        set_verbosity_error()
        run = Run.create(config, Path(told["run_dir"]))
        raw = told["part"]
        part = None if raw is None else Part(raw["name"], {int(i): int(kind) for i, kind in raw["wanted"]})
        work = Work(StoreManifest.from_dict(told["manifest"]), 0, part)
        extract_here(run, work, None, log=f"sglang-{number}.log")
    except (RedraftError, OSError) as err:
        tell(refusal(err, "an extraction worker"), errors, int(number))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3]))
