"""The launch scripts start the right commands with the right variables; the programs they call are stand-ins here."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
LAUNCH = ROOT / "scripts" / "launch"
SCRIPTS = sorted([*LAUNCH.glob("*.sh"), *LAUNCH.glob("*.sbatch")])
# Prints its variables and arguments, as a training process would see them.
TELL = """#!/usr/bin/env bash
echo "rank=${RANK:-} world=${WORLD_SIZE:-} local=${LOCAL_RANK:-} head=${MASTER_ADDR:-}:${MASTER_PORT:-} args=$*"
"""
# Runs its command once a task, two tasks on each of two nodes, and fails as srun does when one of them fails.
SRUN = """#!/usr/bin/env bash
while [[ ${1:-} == --* ]]; do echo "srun option $1"; shift; done
worst=0
for rank in 0 1 2 3; do
  SLURM_PROCID=$rank SLURM_NTASKS=4 SLURM_LOCALID=$((rank % 2)) "$@" || worst=$?
done
exit $worst
"""
SCONTROL = '#!/usr/bin/env bash\n[ "$1 $2" = "show hostnames" ] && printf "first\\nsecond\\n"\n'


def program(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def stage(tmp_path: Path) -> dict[str, str]:
    """An environment whose python, srun and scontrol are the stand-ins."""
    python = program(tmp_path, "telling-python", TELL)
    program(tmp_path, "srun", SRUN)
    program(tmp_path, "scontrol", SCONTROL)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "MASTER_", "RANK", "WORLD_SIZE"))}
    return {**clean, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": str(python)}


def run(script: str, *arguments: str, env: dict[str, str], cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(LAUNCH / script), *arguments]
    return subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_sound(path: Path) -> None:
    assert subprocess.run(["bash", "-n", str(path)], capture_output=True).returncode == 0
    assert "set -euo pipefail" in path.read_text()
    if shutil.which("shellcheck"):
        done = subprocess.run(["shellcheck", str(path)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


def test_torchrun_names_the_node_and_the_front_door(stage: dict[str, str]) -> None:
    done = run("torchrun.sh", "2", "1", "head:4242", "conf=kimi_k25", "stages=[train]", env=stage)
    assert done.returncode == 0, done.stderr
    words = done.stdout.split("args=")[1].split()
    assert words[:2] == ["-m", "torch.distributed.run"]
    for name, value in (("--nnodes", "2"), ("--node-rank", "1"), ("--nproc-per-node", "8"), ("--master-port", "4242")):
        assert words[words.index(name) + 1] == value
    assert words[words.index("--master-addr") + 1] == "head"
    settings = ["conf=kimi_k25", "stages=[train]", "train.nodes=2", "train.processes=8"]
    assert words[-5:] == [str(ROOT / "train" / "run.py"), *settings]


def test_a_hostfile_gives_nodes_and_processes(stage: dict[str, str], tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("# ours\none slots=4\ntwo slots=4\nthree slots=4\n")
    done = run("hostfile.sh", str(hosts), "one", "conf=kimi_k25", env=stage)
    assert done.returncode == 0, done.stderr
    words = done.stdout.split("args=")[1].split()
    assert words[words.index("--hostfile") + 1] == str(hosts) and "--no_local_rank" in words
    assert words[words.index("--master_addr") + 1] == "one"
    assert words[-3:] == ["conf=kimi_k25", "train.nodes=3", "train.processes=4"]


@pytest.mark.parametrize("text", ["one slots=4\ntwo slots=2\n", "one\ntwo\n", ""])
def test_a_hostfile_with_unequal_or_no_slots_is_refused(stage: dict[str, str], tmp_path: Path, text: str) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text(text)
    done = run("hostfile.sh", str(hosts), "one", "conf=kimi_k25", env=stage)
    assert done.returncode == 2 and "slots=N" in done.stderr and not done.stdout


def test_too_few_arguments_are_told(stage: dict[str, str]) -> None:
    for script in ("torchrun.sh", "hostfile.sh"):
        done = run(script, "2", env=stage)
        assert done.returncode == 2 and "usage" in done.stderr


def test_a_slurm_task_becomes_a_rank(stage: dict[str, str]) -> None:
    task = {"SLURM_PROCID": "5", "SLURM_NTASKS": "16", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "123456"}
    nodes = {"SLURM_JOB_NODELIST": "node[1-2]"}
    done = run("slurm_task.sh", stage["PYTHON"], "train/run.py", "conf=x", env={**stage, **task, **nodes})
    assert done.stdout == "rank=5 world=16 local=1 head=first:23456 args=train/run.py conf=x\n", done.stderr
    named = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000"}
    done = run("slurm_task.sh", stage["PYTHON"], env={**stage, **task, **nodes, **named})
    assert "head=10.0.0.1:4000" in done.stdout


def test_a_task_outside_srun_is_refused(stage: dict[str, str]) -> None:
    done = run("slurm_task.sh", stage["PYTHON"], env={**stage, "SLURM_JOB_ID": "1", "SLURM_PROCID": "0"})
    assert done.returncode == 2 and "SLURM_NTASKS is not set: start this with srun" in done.stderr


def test_the_batch_script_starts_every_task_with_the_true_world(stage: dict[str, str]) -> None:
    job = {"SLURM_JOB_ID": "40007", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]", "PROCESSES": "2"}
    done = run("train.sbatch", "conf=kimi_k25", "run_dir=/shared/run", env={**stage, **job}, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("rank=")]
    assert [line.split(" args=")[0] for line in lines] == [
        f"rank={rank} world=4 local={rank % 2} head=first:20007" for rank in range(4)
    ]
    for line in lines:
        words = line.split("args=")[1].split()
        assert words[0] == str(ROOT / "train" / "run.py") and words[1:3] == ["conf=kimi_k25", "run_dir=/shared/run"]
        assert {"train.nodes=2", "train.processes=2", "stages=[train,export]"} <= set(words)
    assert "srun option --kill-on-bad-exit=1" in done.stdout


def test_a_failing_task_fails_the_batch_script(stage: dict[str, str], tmp_path: Path) -> None:
    failing = program(tmp_path, "failing-python", '#!/usr/bin/env bash\n[ "$RANK" != 3 ]\n')
    job = {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n", "PYTHON": str(failing)}
    assert run("train.sbatch", "conf=x", env={**stage, **job}, cwd=ROOT).returncode != 0


def test_extraction_runs_one_command_a_node_that_joins_no_group(stage: dict[str, str]) -> None:
    job = {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "4"}
    done = run("extract.sbatch", "conf=kimi_k25", env={**stage, **job}, cwd=ROOT)
    lines = [line for line in done.stdout.splitlines() if line.startswith("rank=")]
    assert done.returncode == 0 and len(lines) == 4
    assert all(line.startswith("rank= world=") and line.endswith("conf=kimi_k25 stages=[extract]") for line in lines)
    assert {"srun option --ntasks-per-node=1", "srun option --kill-on-bad-exit=0"} <= set(done.stdout.splitlines())
