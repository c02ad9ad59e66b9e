"""A key enters by no setting, and what is in the environment is written nowhere."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from eagle3.errors import ConfigError, RedraftError
from eagle3.redact import hidden, hidden_words, is_secret_name
from eval.engines.process import server_process
from train import run as front_door
from train.front.config import RedraftConfig, register, typed
from train.front.page_facts import command_line
from train.front.provenance import write_provenance

ROOT = Path(__file__).resolve().parents[3]
CANARY = "c4n4ry-0f-a-k3y"
BY_SETTING = [
    f"+eval.server.env.HF_TOKEN={CANARY}",
    f"eval.server.extra_args=[--api-key,{CANARY}]",
    f"eval.server.extra_args=['--ssl-keyfile-password={CANARY}']",
    f"+capture.sglang.env.MY_SECRET={CANARY}",
    f"capture.sglang.extra_args=[--admin-api-key,{CANARY}]",
    f"regenerate.server_args=[--hf-token,{CANARY}]",
    f"eval.server.url=http://user:{CANARY}@host:1",
    f"eval.server.url=http://{CANARY}@host:1",
    f"eval.server.baseline_url=http://user:{CANARY}@host:1",
    f"regenerate.url=https://user:{CANARY}@host",
    f"capture.sglang.url=http://user:{CANARY}@host:1",
    f"capture.sglang.teacher_url=http://user:{CANARY}@host:1",
    f"paths.store=s3://user:{CANARY}@bucket/store",
    f"regenerate.api_key_env='{CANARY}'",
    f"+hf_token={CANARY}",
    f"+track.api_key={CANARY}",
    f"++eval.server.api_key={CANARY}",
]


def config(*overrides: str) -> RedraftConfig:
    register()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return typed(compose("config", overrides=["conf=tiny_kimi", *overrides]))


def everything(folder: Path) -> str:
    return "\n".join(path.read_text("utf-8", "replace") for path in sorted(folder.rglob("*")) if path.is_file())


@pytest.mark.parametrize("setting", BY_SETTING)
def test_a_key_in_a_setting_is_refused_unseen_and_nothing_is_written(
    setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ["run.py", "--config-path", str(ROOT / "conf"), "conf=tiny_kimi", f"run_dir={tmp_path / 'run'}", setting]
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(front_door, "failures", [])
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert front_door.cli() == 2
    assert err.getvalue().startswith("error: ") and err.getvalue().count("\n") == 1
    assert CANARY not in out.getvalue() + err.getvalue()
    assert not list(tmp_path.iterdir())


def test_keys_of_the_environment_are_in_no_record_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", CANARY)
    words = ["train/run.py", f"name={CANARY}", f"my_token={CANARY}2", "--api-key", f"{CANARY}3", "url=http://u:pw@h/"]
    monkeypatch.setattr(sys, "argv", words)
    write_provenance(config(f"name={CANARY}"), tmp_path)
    written = everything(tmp_path)
    assert CANARY not in written and "pw@" not in written
    told = json.loads((tmp_path / "run.json").read_text())["command"]
    assert told[2:] == ["name=(WANDB_API_KEY)", "my_token=...", "--api-key", "...", "url=http://...@h/"]
    assert CANARY not in command_line(words)


def test_keys_are_in_no_error_and_no_server_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", CANARY)
    err = ConfigError("bad value", where=f"https://me:{CANARY}x@host/", why=f"found {CANARY}", mend="other")
    assert CANARY not in str(err) and CANARY not in err.why and "(HF_TOKEN)" in str(err)
    command = [sys.executable, "-c", "import os; print('inherits', len(os.environ['HF_TOKEN']))", "--api-key", CANARY]
    with (
        server_process("x", command, "http://127.0.0.1:9", tmp_path / "log", {}) as server,
        contextlib.suppress(RedraftError),
    ):
        server.wait_ready("/health", 20)
    log = (tmp_path / "log").read_text()
    assert CANARY not in log and f"inherits {len(CANARY)}" in log  # what is started gets it all the same


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("HF_TOKEN", True),
        ("WANDB_API_KEY", True),
        ("AWS_SECRET_ACCESS_KEY", True),
        ("--api-key", True),
        ("--ssl-keyfile-password", True),
        ("eval.server.env.MY_PASSWORD", True),
        ("--speculative-token-map", False),
        ("TOKENIZERS_PARALLELISM", False),
        ("train.max_tokens", False),
        ("keep_token_ids", False),
        ("api_key_env", False),
    ],
)
def test_names_of_keys_are_known(name: str, secret: bool) -> None:
    assert is_secret_name(name) is secret


def words_of(command: Sequence[str]) -> str:
    return " ".join(hidden_words(command))


def test_what_is_no_key_stays_as_it_is() -> None:
    plain = ["train/run.py", "conf=tiny_kimi", "train.lr=1e-4", "--config-name", "config", "paths.store=s3://b/store"]
    assert words_of(plain) == " ".join(plain)
    assert hidden("mail me@home, see http://host:1/a@b") == "mail me@home, see http://host:1/a@b"
