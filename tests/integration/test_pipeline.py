"""The product as a user types it: the whole path on a 61-layer target at layers 3/31/59, reruns, kills, refusals."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    "data.max_samples=12",
    "data.max_length=48",
    "data.val_fraction=0.2",
    "store.shard_tokens=100",
    "capture.batch_tokens=48",
    "train.max_steps=6",
    "train.global_batch_size=2",
    "train.micro_batch_size=2",
    "train.save_every=2",
    "eval.max_prompts=1",
    "eval.max_new_tokens=6",
    "track.wandb=disabled",
]


KEYS = ("HF_TOKEN", "MY_API_KEY", "AWS_SECRET_ACCESS_KEY")
CANARY = "c4n4ry-0f-a-k3y"


def command(target: Path, *arguments: str) -> list[str]:
    run = [sys.executable, str(ROOT / "train" / "run.py"), "conf=tiny_kimi", f"target.path={target}"]
    return [*run, *SMALL, *arguments]


def run(cwd: Path, target: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(
        command(target, *arguments), cwd=cwd, env=environment, capture_output=True, text=True, timeout=400
    )


def succeeded(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def refused(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 2 and len(lines) == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return lines[0]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_kimi_path: Path) -> Path:
    """A working folder with one finished run of all stages."""
    cwd = tmp_path_factory.mktemp("finished")
    os.environ.update(dict.fromkeys(KEYS, CANARY))
    try:
        done = run(cwd, tiny_kimi_path)
        out = succeeded(done)
    finally:
        for name in KEYS:
            del os.environ[name]
    assert CANARY not in out
    (cwd / "said.txt").write_text(out)
    (cwd / "complained.txt").write_text(done.stderr)
    return cwd


def test_no_key_of_the_environment_is_in_anything_that_a_run_writes(finished: Path) -> None:
    files = [path for path in finished.rglob("*") if path.is_file()]
    assert len(files) > 30
    assert not [str(path) for path in files if CANARY.encode() in path.read_bytes()]


def test_the_run_speaks_for_itself_alone(finished: Path) -> None:
    """In a file: no colours, no bars, no banner or warning of a library, each stage with its end, then all places."""
    said = (finished / "said.txt").read_text()
    assert (finished / "complained.txt").read_text() == ""
    assert "\x1b" not in said and "\r" not in said and "━" not in said
    stages = re.findall(r"^\[(\d)/5\] (\w+)  \w", said, re.MULTILINE)
    assert stages == [("1", "prepare"), ("2", "extract"), ("3", "train"), ("4", "export"), ("5", "eval")]
    assert len(re.findall(r"^      done in ", said, re.MULTILINE)) == 5
    assert re.search(r"^      hidden states: (\d+) of \1 tokens, [\d,.]+/s, ", said, re.MULTILINE)
    places = dict(re.findall(r"^  ([a-z ]+?)  +(runs\S+)", said.split("Where everything is\n")[1], re.MULTILINE))
    assert {"tokens and masks", "hidden states", "trained weights", "served draft", "accept length"} <= set(places)
    assert all((finished / place).exists() for place in places.values())
    page = (finished / places["accept length"]).read_text()
    assert page.count('<svg class="chart"') == 2 and "Draft vocabulary: 512 of" in page  # it knows of the training


def shards(store: Path) -> dict[str, bytes]:
    """Each shard's data by the shard's name; the data file has a random part in its own."""
    names = {path.name: json.loads(path.read_text())["data_name"] for path in store.glob("shard-*.json")}
    assert sorted(names.values()) == sorted(path.name for path in store.rglob("*.safetensors"))
    return {name: (store / data).read_bytes() for name, data in names.items()}


def test_the_served_folder_names_its_tensors(finished: Path) -> None:
    config = json.loads((finished / "runs/tiny_kimi/served/config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [3, 31, 59]  # as SGLang 0.5.23 counts
    assert config["redraft"]["wiring"]["aux"] == ["layer_3", "layer_31", "layer_59"]
    assert config["redraft"]["ids"]["sglang-0.5.9"] == [2, 30, 58]


def test_the_run_folder_says_what_it_was_made_with(finished: Path) -> None:
    facts = json.loads((finished / "runs/tiny_kimi/run.json").read_text())
    assert facts["versions"]["torch"] and facts["versions"]["deepspeed"]
    assert facts["hardware"]["cores"] == os.cpu_count()
    assert "conf=tiny_kimi" in facts["command"]
    assert (finished / "runs/latest").resolve() == (finished / "runs/tiny_kimi").resolve()


def test_acceptance_is_reported_and_lossless(finished: Path) -> None:
    folder = finished / "runs/tiny_kimi/eval"
    result = json.loads((folder / "results.json").read_text())
    prompts = [prompt for served in result["served"] for one in served["sets"] for prompt in one["prompts"]]
    assert prompts and all(prompt["verifies"] > 0 for prompt in prompts)
    assert (folder / "accept.png").stat().st_size > 1000
    assert "<svg" in (folder / "report.html").read_text()
    metrics = (finished / "runs/tiny_kimi/train/metrics.jsonl").read_text().splitlines()
    assert {json.loads(line)["kind"] for line in metrics} == {"train", "val", "eval"}


def test_unchanged_stages_are_skipped_and_the_saved_config_runs_again(finished: Path) -> None:
    rerun = [sys.executable, str(ROOT / "train/run.py"), "--config-path", str(finished / "runs/latest")]
    done = subprocess.run(
        [*rerun, "--config-name", "config", "eval.max_new_tokens=4"],
        cwd=finished, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    out = succeeded(done)
    assert out.count("unchanged since it finished: skipped") == 4
    assert "continuations" in out


def test_a_damaged_shard_is_refused_and_mended_as_its_line_says(finished: Path, tiny_kimi_path: Path) -> None:
    store = finished / "damaged"
    shutil.copytree(finished / "runs/tiny_kimi/store", store)
    whole = shards(store)
    data = sorted(store.glob("*.safetensors"))[1]
    content = data.read_bytes()
    data.write_bytes(content[:5000] + bytes([content[5000] ^ 1]) + content[5001:])
    paths = ("paths.prepared=runs/tiny_kimi/prepared", f"paths.store={store}", "name=mended", "mark_latest=false")
    line = refused(run(finished, tiny_kimi_path, *paths, "stages=[extract,train]"))
    assert data.name in line and "checksums differ for record" in line
    command = re.search(r"run (python -m data_prep\.store mend \S+), then the extract stage again", line)
    assert command is not None
    done = subprocess.run(
        [sys.executable, *command[1].split()[1:]], cwd=ROOT, capture_output=True, text=True, timeout=99
    )
    assert "1 damaged files are removed" in succeeded(done) and not data.exists()
    out = succeeded(run(finished, tiny_kimi_path, *paths, "stages=[extract]"))
    lost = re.search(r"records; (\d+) were there", out)
    assert lost is not None and int(lost[1]) >= 6  # of 12
    assert shards(store) == whole


def test_another_wiring_is_refused_slot_by_slot(finished: Path, tiny_kimi_path: Path) -> None:
    other = "wiring.aux=[embedding,layer_3,layer_31]"
    line = refused(run(finished, tiny_kimi_path, other, "stages=[train]"))
    assert "slot 0 holds layer 3; expected the embedding" in line
    line = refused(run(finished, tiny_kimi_path, other, "stages=[eval]"))
    assert "slot 2 holds layer 59; expected layer 31" in line


def test_a_control_reads_the_same_store_by_name(finished: Path, tiny_kimi_path: Path) -> None:
    arguments = ("wiring.aux=[embedding,layer_3,layer_31]", "store.accept_other_wiring=true", "name=control")
    paths = ("paths.prepared=runs/tiny_kimi/prepared", "paths.store=runs/tiny_kimi/store", "mark_latest=false")
    stages = ("stages=[train,export,eval]", "eval.serve=[native,matched]", "eval.baseline=false")
    succeeded(run(finished, tiny_kimi_path, *arguments, *paths, *stages))
    result = json.loads((finished / "runs/control/eval/results.json").read_text())
    assert [served["mode"] for served in result["served"]] == ["native", "matched"]
    assert result["served"][0]["wiring"]["aux"] == ["layer_2", "layer_30", "layer_58"]
    assert (finished / "runs/latest").resolve().name == "tiny_kimi"


def kill_when(process: subprocess.Popen[str], ready: Path, pattern: str) -> None:
    """SIGKILL the process as soon as a file matching `pattern` stands in `ready`."""
    deadline = time.monotonic() + 300
    while not list(ready.glob(pattern)):
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()


def test_killed_and_rerun_equals_uninterrupted(finished: Path, tmp_path: Path, tiny_kimi_path: Path) -> None:
    folder = tmp_path / "runs/tiny_kimi"
    for ready, pattern in ((folder / "store", "shard-*.json"), (folder / "train/checkpoints", "step-00000002*")):
        process = subprocess.Popen(
            command(tiny_kimi_path, "stages=[prepare,extract,train]"),
            cwd=tmp_path, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        kill_when(process, ready, pattern)
    succeeded(run(tmp_path, tiny_kimi_path, "stages=[prepare,extract,train]"))
    whole = finished / "runs/tiny_kimi"
    assert shards(folder / "store") == shards(whole / "store")
    assert (folder / "train/final.safetensors").read_bytes() == (whole / "train/final.safetensors").read_bytes()


def test_a_sweep_shares_the_store_and_keeps_its_runs_apart(finished: Path, tiny_kimi_path: Path) -> None:
    out = succeeded(run(finished, tiny_kimi_path, "train.lr=0.001,0.002", "stages=[extract,train]", "-m"))
    assert out.count("unchanged since it finished: skipped") == 2
    runs = [path.name for path in (finished / "runs/tiny_kimi/sweep").iterdir() if path.is_dir()]
    assert sorted(runs) == ["train.lr=0.001", "train.lr=0.002"]


def test_a_truncated_shard_is_named(finished: Path, tmp_path: Path, tiny_kimi_path: Path) -> None:
    shard = sorted((finished / "runs/tiny_kimi/store").glob("shard-*.safetensors"))[0]
    whole = shard.read_bytes()
    try:
        shard.write_bytes(whole[:-100])
        line = refused(run(finished, tiny_kimi_path, "stages=[train]", "name=other", "paths.store=runs/tiny_kimi/store",
                           "paths.prepared=runs/tiny_kimi/prepared"))  # fmt: skip
        assert shard.name in line
    finally:
        shard.write_bytes(whole)


def test_a_full_disk_in_training_is_one_line(finished: Path, tiny_kimi_path: Path) -> None:
    """A limit on file size stands in for the full disk: the system refuses the write in the same way."""
    shared = ("paths.prepared=runs/tiny_kimi/prepared", "paths.store=runs/tiny_kimi/store", "name=full")
    limited = ["bash", "-c", 'ulimit -f 200; exec "$@"', "limited", *command(tiny_kimi_path, *shared, "stages=[train]")]
    done = subprocess.run(limited, cwd=finished, capture_output=True, text=True, timeout=400)
    assert "cannot write the checkpoint" in refused(done)
    assert not list((finished / "runs/full/train/checkpoints").glob("*/complete.json"))


def test_stages_out_of_order_say_what_to_run_first(tmp_path: Path, tiny_kimi_path: Path) -> None:
    assert "prepare stage first" in refused(run(tmp_path, tiny_kimi_path, "stages=[extract]"))
    assert "train stage first" in refused(run(tmp_path, tiny_kimi_path, "stages=[export]"))
    assert "export stage first" in refused(run(tmp_path, tiny_kimi_path, "stages=[eval]"))


def test_kimi_plans_without_weights_and_refuses_to_extract(tmp_path: Path) -> None:
    base = [sys.executable, str(ROOT / "train/run.py"), "conf=kimi_k25"]
    environment = {**os.environ, "COLUMNS": "160"}
    done = subprocess.run(
        [*base, "stages=[plan]"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    out = succeeded(done)
    for words in ("[2, 30, 58]", "[3, 31, 59]", "= 21504", "4 x 7,168 x 2 = 57,344 B", "11.74 TB", "targets/Kimi-K2.5"):
        assert words in out
    assert list(tmp_path.iterdir()) == []
    done = subprocess.run([*base, "stages=[extract]"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert "targets/Kimi-K2.5" in refused(done)
