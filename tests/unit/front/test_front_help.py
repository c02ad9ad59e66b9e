"""The front door's own page of help, completion by the shell, and exit codes."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir

import train.run as door
from eagle3.errors import IncompleteError, RedraftError
from train.front.config import STAGES, RedraftConfig, typed

ROOT = Path(__file__).resolve().parents[3]


def called(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """`python train/run.py WORDS` in this process; its exit code."""
    monkeypatch.setattr(sys, "argv", [str(ROOT / "train" / "run.py"), *words])
    return door.cli()


def page(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as end:  # Hydra's way of ending
        called(monkeypatch, "--help")
    assert end.value.code == 0
    return capsys.readouterr().out


def test_help_fits_80_columns_and_names_presets_groups_and_stages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = page(monkeypatch, capsys)
    assert max(map(len, text.splitlines())) <= 80
    for path in (ROOT / "conf").glob("*/*.yaml"):
        assert re.search(rf"\b{path.stem}\b", text), f"{path} is not named"
    assert all(re.search(rf"^  {stage}  ", text, re.MULTILINE) for stage in STAGES)


def test_settings_and_examples_of_the_help_compose(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = page(monkeypatch, capsys)
    examples = [shlex.split(line) for line in text.splitlines() if line.startswith("  python train/run.py")]
    assert len(examples) == 5
    part = text.partition("settings given most often")[2].partition("examples")[0]
    settings = re.findall(r"\b[a-z_]+(?:\.[a-z_]+)*=\S+", part)
    assert len(settings) > 12
    given = [one.replace("FILE", "x.jsonl").replace("=N", "=512") for one in settings]
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        for words in [*(line[2:] for line in examples), ["conf=kimi_k25", *given]]:
            kept = [word.replace("1e-3,2e-3", "1e-3") for word in words if word not in ("-m", "--cfg", "job")]
            assert isinstance(typed(compose("config", kept)), RedraftConfig)


def test_help_of_a_finished_run_is_there_too(tmp_path: Path) -> None:
    """Its configuration stands in the run folder, without this page."""
    defaults = ["_self_", {"override hydra/hydra_logging": "none"}, {"override hydra/job_logging": "none"}]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"defaults": defaults, "name": "x"}))
    command = [sys.executable, str(ROOT / "train/run.py"), "--config-path", str(tmp_path), "--config-name", "config"]
    done = subprocess.run([*command, "--help"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "name: x" in done.stdout, done.stderr


COMPLETE = """
eval "$(python train/run.py --shell-completion install=bash)"
for COMP_LINE in "$@"; do
    COMP_POINT=${#COMP_LINE}; words=($COMP_LINE); COMP_CWORD=$((${#words[@]} - 1))
    hydra_bash_completion
    echo "${COMPREPLY[@]}"
done
"""


def test_the_shell_completes_presets_keys_and_groups() -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    typed_so_far = ["python train/run.py conf=smollm2_", "python train/run.py train.lo"]
    command = ["bash", "-c", COMPLETE, "bash", *typed_so_far]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.splitlines() == ["conf=smollm2_control", "train.loader_workers= train.log_every="], done.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [(None, 0), (RedraftError("it failed"), 2), (IncompleteError("the results are incomplete"), 3)],
)
def test_the_exit_code_tells_done_from_refused_and_incomplete(
    error: RedraftError | None, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(_config: RedraftConfig) -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(door, "work", work)
    assert called(monkeypatch, "conf=smollm2", "stages=[eval]") == code
    assert capsys.readouterr().err == (f"error: {error}\n" if error else "")


def test_the_jobs_of_a_sweep_are_one_group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    seen: list[tuple[str, str]] = []
    monkeypatch.setattr(door, "work", lambda config: seen.append((config.track.group, config.run_dir)))
    assert called(monkeypatch, "-m", "conf=smollm2", "train.lr=1e-3,2e-3") == 0
    assert [group for group, _ in seen] == ["smollm2", "smollm2"] and seen[0][1] != seen[1][1]
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]  # Hydra's own file stands there, too
