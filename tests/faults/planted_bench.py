"""What faults are planted in: one sound run on a tiny target, up to the folder that is served, and how it is entered.

Where training or serving would begin stands a guard that raises `Reached`: a run that gets there was not refused.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from datasets import concatenate_datasets
from hydra import compose, initialize_config_dir
from safetensors.torch import load_file, save_file
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
UNIT = ROOT / "tests" / "unit"
for area in ("probe", "capture", "sglang_tree"):  # the stand-ins of these areas' own tests
    if str(UNIT / area) not in sys.path:
        sys.path.append(str(UNIT / area))

from data_prep.capture.hf import HFCapture  # noqa: E402
from data_prep.capture.sample import CapturedSample  # noqa: E402
from data_prep.extract import extract  # noqa: E402
from data_prep.prepare import load_prepared  # noqa: E402
from data_prep.store import StoreManifest  # noqa: E402
from eagle3.atomic import read_json, sha256_file, write_json  # noqa: E402
from eagle3.checked_json import CHECKSUM, with_checksum, write_checked  # noqa: E402
from eagle3.checkpoint import sealed_config  # noqa: E402
from eagle3.errors import RedraftError  # noqa: E402
from eagle3.hf_model import load_target  # noqa: E402
from eagle3.hf_states import all_site_states  # noqa: E402
from eagle3.wiring import Site, Wiring  # noqa: E402
from train.front import accept, stages  # noqa: E402
from train.front.config import register, typed  # noqa: E402
from train.front.pipeline import run_pipeline  # noqa: E402
from train.job import TrainJob, TrainResult  # noqa: E402
from train.parts import open_parts  # noqa: E402

LAYERS, HIDDEN, VOCAB, DRAFT_VOCAB = 8, 64, 320, 160
TRAINED = (2, 4, 6)  # not the engines' default, which is 2, 4, 5 here

register()


class Reached(Exception):
    """Training, or serving, would have begun."""


@dataclass(frozen=True)
class Fault:
    """One fault.

    Args:
        name: what is wrong, in a few words.
        stage: where it is caught.
        run: called with the bench and whether to plant the fault; returns the line printed, "" when nothing is wrong.
        words: what the line must say.
    """

    name: str
    stage: str
    run: Callable[[Bench, bool], str]
    words: tuple[str, ...]


def sites(*layers: int) -> str:
    """`[layer_2,layer_4]`, as a configuration writes it."""
    return "[" + ",".join(Site(k).name for k in layers) + "]"


def refusal(action: Callable[[], Any], reaches: bool = False) -> str:
    """The line of the error that `action` ends with; "" when there is none.

    With `reaches`, a sound action is one that gets to training or serving: one that ends before is no proof of it.
    """
    try:
        action()
    except Reached:
        return ""
    except RedraftError as err:
        return str(err)
    return "it ended before training or serving could begin" if reaches else ""


def printed(main: Callable[[list[str]], int], *arguments: Any) -> tuple[int, str, str]:
    """Run a command line in this process: exit code, standard output, standard error."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(one) for one in arguments])
    return code, out.getvalue(), err.getvalue()


def probed(*arguments: Any, reasons: int = 6) -> str:
    """What `python -m eval.probe` says, in one line with the first few reasons; "" when all is as expected."""
    from eval.probe.__main__ import main

    code, out, _ = printed(main, *arguments, "--json")
    if code == 0:
        return ""
    verdict = json.loads(out)
    because = "; ".join(verdict["reasons"][:reasons])
    told = [verdict["verdict"].upper(), verdict["what"], because]
    return f"{': '.join(one for one in told if one)}. To mend: {verdict['mend']}"


def _stop(*_: Any, **__: Any) -> None:
    raise Reached


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Put the guard where training or serving begins."""
    with (
        mock.patch.object(stages, "run_training", _stop),
        mock.patch.object(accept, "measure", _stop),
        mock.patch.object(accept, "measure_served", _stop),
    ):
        yield


def composed(preset: str, *overrides: str) -> Any:
    """The checked configuration, as `python train/run.py conf=... key=value` has it."""
    with initialize_config_dir(version_base="1.3", config_dir=str(ROOT / "conf")):
        return typed(compose(config_name="config", overrides=[f"conf={preset}", *overrides]))


class Bench:
    """A working folder with the sound artifacts of one run, each made when first asked for.

    Args:
        root: an empty folder.
        target: the 8-layer Llama of the tests.
    """

    def __init__(self, root: Path, target: Path) -> None:
        self.root, self.target = root, target
        self._folders = 0
        self._sound: dict[str, str] = {}

    def folder(self, name: str) -> Path:
        """A path not used before."""
        self._folders += 1
        return self.root / f"{self._folders}" / name

    @cached_property
    def model(self) -> nn.Module:
        """The target."""
        return load_target(self.target, "cpu", torch.float32, with_head=True)

    @cached_property
    def wiring(self) -> Wiring:
        """What the run is wired for."""
        return self.wire(*TRAINED)

    def wire(self, *layers: int, teacher: str = "final") -> Wiring:
        """A wiring of the target."""
        return Wiring(tuple(Site(k) for k in layers), teacher, "llama", LAYERS, HIDDEN)

    def front(self, stage: str, *overrides: str, run_dir: Path | None = None) -> None:
        """`python train/run.py stages=[stage] ...` in this process, stopped where training or serving begins."""
        config = composed("tiny_kimi", *self.settings(run_dir or self.sound_run), f"stages=[{stage}]", *overrides)
        with guarded(), contextlib.redirect_stdout(io.StringIO()):
            run_pipeline(config)

    def settings(self, run_dir: Path) -> list[str]:
        """The run's settings."""
        return [
            f"run_dir={run_dir}",
            f"target.path={self.target}",
            "target.maker=null",
            "target.model_type=llama",
            f"target.num_layers={LAYERS}",
            f"target.hidden_size={HIDDEN}",
            f"target.vocab_size={VOCAB}",
            f"wiring.aux={sites(*TRAINED)}",
            f"draft.vocab_size={DRAFT_VOCAB}",
            "data.max_samples=6",
            "data.max_length=96",
            "data.val_fraction=0.3",
            "store.shard_tokens=4096",
            "eval.max_prompts=1",
            "track.wandb=disabled",
            "mark_latest=false",
            f"paths.prepared={self.root / 'sound' / 'prepared'}",
            f"paths.store={self.root / 'sound' / 'store'}",
        ]

    @cached_property
    def sound_run(self) -> Path:
        """The run folder of the sound run, with tokens and hidden states beside it."""
        folder = self.root / "sound"
        self.front("prepare", run_dir=folder)
        self.front("extract", run_dir=folder)
        return folder

    @property
    def store(self) -> Path:
        """The sound store."""
        return self.sound_run / "store"

    @cached_property
    def trained_run(self) -> Path:
        """A run folder with a trained checkpoint (as it starts, for nothing here depends on what it learnt)."""

        def save_start(job: TrainJob) -> TrainResult:
            draft = open_parts(**job.model_args).draft
            weights = Path(job.run_dir) / "final.safetensors"
            state = {name: tensor.contiguous() for name, tensor in draft.state_dict().items() if "embed" not in name}
            save_file(state, weights)
            result = TrainResult(1, 0, str(weights), "", {}, {}, 0.0)
            write_checked(Path(job.run_dir) / "result.json", vars(result))
            return result

        folder = self.folder("trained")
        config = composed("tiny_kimi", *self.settings(folder), "stages=[train]")
        _ = self.store
        with mock.patch.object(stages, "run_training", save_start), contextlib.redirect_stdout(io.StringIO()):
            run_pipeline(config)
        return folder

    @cached_property
    def served_run(self) -> Path:
        """A run folder whose draft is exported."""
        self.front("export", run_dir=self.trained_run)
        return self.trained_run

    def once(self, name: str, entry: Callable[[], str]) -> str:
        """The answer to sound inputs that several faults share, asked for once."""
        if name not in self._sound:
            self._sound[name] = entry()
        return self._sound[name]

    def copy_of(self, folder: Path) -> Path:
        """A copy to plant a fault in."""
        out = self.folder(folder.name)
        shutil.copytree(folder, out)
        return out

    def copy_of_run(self, folder: Path) -> Path:
        """A copy of a run folder whose own paths point into the copy."""
        out = self.copy_of(folder)
        own = {"weights": str(out / "train" / "final.safetensors")}
        edit_json(out / "train" / "result.json", lambda result: result.update(own))
        return out

    def planted_store(self, plant: Callable[[CapturedSample], CapturedSample]) -> Path:
        """A store of the same records and manifest, whose samples were changed before they were written."""
        capture = HFCapture.from_model(self.model, self.wiring)

        class Planted:
            def run(self, batch: Sequence[Any]) -> list[CapturedSample]:
                return [plant(sample) for sample in capture.run(batch)]

        rows = concatenate_datasets([load_prepared(self.sound_run / "prepared", one) for one in ("train", "val")])
        out = self.folder("store")
        extract(rows, Planted(), out, StoreManifest.read(self.store), 512, 4096)
        return out

    def feed(self, sample: CapturedSample, final: str | None, **named: str) -> CapturedSample:
        """The sample with other sites of the target under its names, and another teacher."""
        states = {name: state.bfloat16() for name, state in all_site_states(self.model, sample.input_ids).items()}
        held = {name: states[named.get(name, name)] for name in sample.sites}
        return replace(sample, sites=held, final=states[final] if final else sample.final)


def edit_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a JSON file in place, as if it had been written so: its checksum agrees."""
    data = read_json(path)
    checked = data.pop(CHECKSUM, None) is not None
    change(data)
    write_json(path, sealed_config(with_checksum(data) if checked else data))


def edit_weights(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change a safetensors file in place."""
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    if (path.parent / "config.json").exists():  # a served folder, as if it had been exported so
        config = read_json(path.parent / "config.json")
        write_json(path.parent / "config.json", sealed_config(config, sha256_file(path)))


@contextlib.contextmanager
def quick_ends() -> Iterator[None]:
    """End stand-in servers at once."""
    with mock.patch("eval.engines.process.GRACE_S", 1.0), mock.patch("eval.engines.process.POLL_S", 0.05):
        yield
