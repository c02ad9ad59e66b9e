"""Two "nodes" on this machine, by every launcher there is a script for: the weights are those of one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from train.world import free_port

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "scripts" / "launch"
SMALL = [
    "conf=tiny_kimi",
    "data.max_samples=12",
    "data.max_length=48",
    "data.val_fraction=0.2",
    "store.shard_tokens=100",
    "capture.batch_tokens=48",
    "train.max_steps=3",
    "train.global_batch_size=2",
    "train.micro_batch_size=1",
    "train.zero_stage=-1",
    "track.wandb=disabled",
    "mark_latest=false",
]
# `pdsh -S -f N -w a,b COMMAND`: the command once a host, %n its number.
PDSH = """#!/usr/bin/env bash
while [ $# -gt 0 ]; do
  case $1 in -S) shift ;; -f) shift 2 ;; -w) hosts=$2; shift 2 ;; *) break ;; esac
done
command="$*" n=0 pids=()
for host in ${hosts//,/ }; do bash -c "${command//%n/$n}" & pids+=($!); n=$((n + 1)); done
worst=0
for pid in "${pids[@]}"; do wait "$pid" || worst=$?; done
exit $worst
"""
SRUN = """#!/usr/bin/env bash
while [[ ${1:-} == --* ]]; do shift; done
pids=()
for rank in 0 1; do SLURM_PROCID=$rank SLURM_NTASKS=2 SLURM_LOCALID=0 "$@" & pids+=($!); done
worst=0
for pid in "${pids[@]}"; do wait "$pid" || worst=$?; done
exit $worst
"""


def environment(folder: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")}
    own = {"PYTHON": sys.executable, "PROCESSES": "1", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    return {**kept, **own, "PATH": f"{folder}:{os.environ['PATH']}"}


def finish(commands: list[list[str]], env: dict[str, str], cwd: Path) -> None:
    """Run all at once; each must end well."""
    started = [
        subprocess.Popen(c, env=env, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for c in commands
    ]
    told = [process.communicate(timeout=400)[0] for process in started]
    assert [process.returncode for process in started] == [0] * len(started), "\n".join(told)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, tiny_kimi_path: Path) -> Path:
    """A working folder with a store, and a draft that one process trained on it."""
    cwd = tmp_path_factory.mktemp("alone")
    command = [sys.executable, str(ROOT / "train" / "run.py"), *SMALL, f"target.path={tiny_kimi_path}"]
    finish([[*command, "run_dir=runs/one", "stages=[prepare,extract,train]"]], environment(cwd), cwd)
    return cwd


def launched(name: str, cwd: Path, arguments: list[str]) -> tuple[list[list[str]], dict[str, str]]:
    """Commands and environment of one launcher."""
    env, port = environment(cwd), str(free_port())
    for program, text in (("pdsh", PDSH), ("srun", SRUN)):
        (cwd / program).write_text(text)
        (cwd / program).chmod(0o755)
    head = f"127.0.0.1:{port}"
    if name == "torchrun":
        script = str(LAUNCH / "torchrun.sh")
        return [["bash", script, "2", rank, head, *arguments, "stages=[train]"] for rank in ("0", "1")], env
    if name == "hostfile":
        (cwd / "hosts").write_text("127.0.0.1 slots=1\nlocalhost slots=1\n")
        return [["bash", str(LAUNCH / "hostfile.sh"), "hosts", head, *arguments, "stages=[train]"]], env
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [["bash", str(LAUNCH / "train.sbatch"), *arguments]], {**env, **job, "REDRAFT_HOME": str(ROOT)}


@pytest.mark.parametrize("name", ["torchrun", "hostfile", "slurm"])
def test_two_nodes_train_the_draft_of_one_process(alone: Path, tiny_kimi_path: Path, name: str) -> None:
    shared = ["paths.prepared=runs/one/prepared", "paths.store=runs/one/store", f"target.path={tiny_kimi_path}"]
    commands, env = launched(name, alone, [*SMALL, *shared, f"run_dir=runs/{name}"])
    finish(commands, env, alone)
    one = load_file(alone / "runs" / "one" / "train" / "final.safetensors")
    two = load_file(alone / "runs" / name / "train" / "final.safetensors")
    assert one.keys() == two.keys()
    for key, tensor in one.items():
        torch.testing.assert_close(two[key].float(), tensor.float(), rtol=1e-2, atol=1e-3, msg=key)
    assert (alone / "runs" / name / "train" / "stage.json").is_file()
