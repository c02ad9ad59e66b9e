"""docs/kimi_k25.md on the miniature: every command of the runbook, in its order, in one shell.

What is exchanged is listed here and nothing else is: the weights for the miniature, the installation of SGLang for the
one that `make sglang-cpu` has made, the batch system for a shell, eight GPUs for two cores.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from eagle3.atomic import read_json

ROOT = Path(__file__).resolve().parents[2]
RUNBOOK = ROOT / "docs" / "kimi_k25.md"
MACHINE = {"runs", "targets", ".venv", ".venv-sglang", ".venv-vllm", ".git", ".cache"}  # not the repository's
INSTALLED = ".venv-sglang/bin/pip install sglang==0.5.23"  # `make sglang-cpu` installs that release
SMALLER = {"--tp-size 8": "--tp-size 1", "disk_budget=2TB run_dir": "disk_budget=1MB train.epochs=1 run_dir"}

# Commands that are not to be had here, as functions of the shell that runs the runbook.
PRELUDE = """
set -euo pipefail
hf() { [ "$1 $2 $3" = "download moonshotai/Kimi-K2.5 --local-dir" ]; mkdir -p targets; cp -r "$MINIATURE" "$4"; }
python3() { [ "$1 $2 $3" = "-m venv .venv-sglang" ]; }
make() { if [ "$1" = setup ]; then command make --dry-run "$@" > /dev/null; else command make "$@"; fi; }
srun() { while [ "${1#--}" != "$1" ]; do shift; done; "$@"; }
sbatch() { while [ "${1#--}" != "$1" ]; do shift; done; export -f srun; SLURM_SUBMIT_DIR=$PWD bash "$@"; }
"""
AFTER_KIMI = """export KIMI="$KIMI +size=mini +server=sglang_cpu +capture=sglang_cpu target.path=targets/Kimi-K2.5 \
  select.total=64 data.max_samples=64 eval.max_prompts=2 eval.max_new_tokens=32"
"""
ASKED = {"model": "default", "messages": [{"role": "user", "content": "Name three fruits."}], "max_tokens": 16}
SERVED = f"""
server=$!
trap 'kill $server; wait $server || true' EXIT
for _ in $(seq 300); do
  curl -sf http://127.0.0.1:30000/health > /dev/null && break
  kill -0 $server || {{ tail -5 server.log; exit 1; }}
  sleep 2
done
curl -sf http://127.0.0.1:30000/v1/chat/completions -H 'Content-Type: application/json' \\
  -d {shlex.quote(json.dumps(ASKED))} > answer.json
curl -sf http://127.0.0.1:30000/server_info > server_info.json
kill $server; wait $server || true
trap - EXIT
"""


def blocks() -> list[str]:
    """The runbook's shell commands, block by block."""
    return re.findall(r"^```sh\n(.*?)^```$", RUNBOOK.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def script(sglang_args: list[str]) -> str:
    """The whole runbook as one shell script, made smaller."""
    parts = [PRELUDE]
    for block in blocks():
        for old, new in SMALLER.items():
            block = block.replace(old, new)
        block = block.replace(INSTALLED + "\n", "")
        if "sglang.launch_server" in block:
            flags = shlex.join([*sglang_args, "--dtype=float32"])
            block = f"env $SGLANG_CPU {block.rstrip()} {flags} > server.log 2>&1 &\n{SERVED}"
        if "export KIMI=" in block:
            block += AFTER_KIMI
        parts.append(f"echo {shlex.quote('## ' + block.splitlines()[0])}\n{block}")
    return "\n".join(parts)


def workplace(folder: Path) -> Path:
    """A checkout of links, with this interpreter as its environment and SGLang's beside it."""
    folder.mkdir()
    for path in ROOT.iterdir():
        if path.name not in MACHINE:
            (folder / path.name).symlink_to(path)
    (folder / ".venv").mkdir()
    for path in Path(sys.prefix).iterdir():  # the whole environment: Python looks for it beside the interpreter
        if not path.name.startswith(".ready"):
            (folder / ".venv" / path.name).symlink_to(path)
    for stamp in (".ready-cpu", ".ready-cuda"):
        (folder / ".venv" / stamp).touch()
    (folder / ".venv-sglang").symlink_to(ROOT / ".venv-sglang")
    return folder


def test_exchanges_are_in_the_runbook() -> None:
    text = "\n".join(blocks())
    for needed in (INSTALLED, *SMALLER, "sglang.launch_server", "export KIMI=", "hf download", "sbatch "):
        assert needed in text, f"the runbook no longer has {needed!r}"


def test_every_command_of_the_runbook(
    sglang_python: Path,
    sglang_env: dict[str, str],
    sglang_args: list[str],
    kimi_mini_path: Path,
    tmp_path: Path,
) -> None:
    here = workplace(tmp_path / "checkout")
    (here / "runbook.sh").write_text(script(sglang_args))
    env = {
        **os.environ,
        "MINIATURE": str(kimi_mini_path),
        "SGLANG_CPU": " ".join(f"{name}={value}" for name, value in sglang_env.items()),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    log = here / "runbook.log"
    with log.open("w") as out:
        done = subprocess.run(["bash", "runbook.sh"], cwd=here, env=env, stdout=out, stderr=out, check=False)
    told = log.read_text()
    assert done.returncode == 0, told[-6000:]

    run = here / "runs" / "kimi_k25"
    check_run(run)
    rounds = read_json(here / "runs" / "kimi_k25_rounds" / "train" / "result.json")
    assert rounds["steps"] == read_json(run / "train" / "result.json")["steps"] // 4  # of four epochs
    assert re.search(r"[2-9] rounds: at most", told)
    info = json.loads((here / "server_info.json").read_text())
    assert info["speculative_algorithm"] == "EAGLE3"
    message = json.loads((here / "answer.json").read_text())["choices"][0]["message"]
    assert message.get("content") or message.get("reasoning_content")


def check_run(run: Path) -> None:
    """What the runbook promises of the run folder."""
    config = read_json(run / "served" / "config.json")
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [3, 31, 59]
    assert read_json(run / "store" / "manifest.json")["codec"] == "int8"
    answers = [json.loads(line) for line in (run / "answers" / "answers.jsonl").read_text().splitlines()]
    assert answers and all(one["finish_reason"] in ("stop", "length", "tool_calls") for one in answers)
    assert all(one["provenance"]["sha256"] for one in answers)
    result = read_json(run / "eval-sglang" / "results.json")
    taus = [served["overall"]["tau"] for served in result["served"]]
    assert taus and min(taus) > 1.0, "the draft proposes nothing that the target keeps"
