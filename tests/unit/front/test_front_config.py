"""The command line as typed: presets compose, wrong input fails before any model library loads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]


def run(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "train" / "run.py"), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("preset", ["kimi_k25", "smollm2", "smollm2_control", "tiny_kimi"])
def test_presets_compose_from_any_folder(preset: str, tmp_path: Path) -> None:
    done = run(f"conf={preset}", "--cfg", "job", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    composed = yaml.safe_load(done.stdout)
    assert composed["name"] == preset
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("argument", "field", "words"),
    [
        ("train.lrr=1", "train.lrr", "not in"),
        ("train.lr=fast", "train.lr", "could not be converted"),
        ("train.lr=-1", "train.lr", "a positive number"),
        ("wiring.aux=[layer_99]", "layer_99", "layers 0 to 29"),
        ("wiring.aux=[layer_2,layer_2]", "wiring.aux", "twice"),
        ("wiring.aux=[2,15,27]", "wiring.aux", "bare id"),
        ("wiring.teacher=last", "wiring.teacher", "final_normed"),
        ("stages=[trian]", "stages", "trian"),
        ("draft.vocab_size=50000", "draft.vocab_size", "49152"),
        ("store.codec=zip", "store.codec", "raw or lossless or fp8 or int8"),
        ("paths.store='s3://key:hidden@bucket/store'", "paths.store", "must not carry a password"),
        ("train.micro_batch_size=3", "train.global_batch_size", "multiple"),
        ("eval.serve=[mirrored]", "eval.serve", "matched or native"),
        ("conf=nope", "conf/nope", "kimi_k25"),
    ],
)
def test_wrong_input_is_one_line_that_names_the_field(argument: str, field: str, words: str, tmp_path: Path) -> None:
    done = run(argument, cwd=tmp_path)
    assert done.returncode == 2
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("error: ")
    assert field in lines[0]
    assert words in lines[0]
    assert list(tmp_path.iterdir()) == []


def test_configuration_fails_before_torch_is_imported() -> None:
    code = "import sys; sys.argv = ['run.py', 'train.lrr=1'];"
    code += "import train.run as r; r.cli(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip().endswith("False"), done.stdout + done.stderr
