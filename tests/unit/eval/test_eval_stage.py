"""The eval stage around a server engine: what it is told, when it runs again, what it leaves behind."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from fake_server import FakeEngine

from eagle3.checkpoint import save_served
from eagle3.config import DraftConfig, TargetConfig, WiringConfig
from eagle3.draft import Eagle3Draft
from eagle3.errors import ConfigError
from eagle3.target_weights import TargetWeights
from eagle3.vocab import vocab_from_maps
from eval.config import EvalConfig
from eval.engines.server_config import ServerConfig
from eval.engines.sglang import SGLangEngine
from eval.engines.vllm import VLLMEngine
from eval.probe.__main__ import _parser
from train.config import TrackConfig
from train.front import accept
from train.front.config import PathsConfig, RedraftConfig
from train.front.context import Run
from train.front.draft_shape import target_shape

PROMPTS = Path(__file__).resolve().parents[3] / "data" / "eval" / "samples" / "gsm8k_like.jsonl"


@pytest.fixture
def run(tiny_llama_path: Path, tmp_path: Path) -> Run:
    """A run whose draft is exported, on the 8-layer Llama, set to be measured in SGLang."""
    config = RedraftConfig(
        name="x",
        run_dir=str(tmp_path / "run"),
        paths=PathsConfig(str(tmp_path / "prepared"), str(tmp_path / "store")),
        target=TargetConfig("tiny", str(tiny_llama_path), None, False, "llama", 8, 64, 320),
        wiring=WiringConfig(["layer_1", "layer_3", "layer_5"]),
        draft=DraftConfig(vocab_size=320),
        track=TrackConfig(wandb="disabled"),
        eval=EvalConfig("sglang", [f"gsm8k:{PROMPTS}"], max_new_tokens=12, num_steps=2, batch_sizes=[1, 2]),
    )
    made = Run.create(config, tmp_path / "run")
    draft = Eagle3Draft(target_shape(config, TargetWeights(tiny_llama_path)))
    vocab = vocab_from_maps(draft.d2t, draft.t2d, "none")
    identity = TargetWeights(tiny_llama_path).identity().to_dict()
    save_served(made.served, draft, made.wiring, target=identity, convention_name="sglang-0.5.23", vocab=vocab)
    return made


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    fake = FakeEngine()
    monkeypatch.setattr(accept, "server_engine", lambda _run, _trained: fake)
    return fake


def starts(engine: FakeEngine) -> int:
    return sum(entry[0] == "start" for entry in engine.log)


def test_a_started_server_is_measured_once(run: Run, engine: FakeEngine) -> None:
    accept.eval_stage(run)
    folder = accept.eval_folder(run)
    assert {p.name for p in folder.iterdir()} == {
        "results.json", "table.txt", "accept.png", "report.html", "stage.json",
    }  # fmt: skip
    assert starts(engine) == 2
    accept.eval_stage(run)
    assert starts(engine) == 2
    run.config.eval.server.request_timeout_s = 5.0
    run.config.eval.server.port = 12345
    accept.eval_stage(run)
    assert starts(engine) == 2  # neither changes what is measured
    run.config.eval.server.extra_args = ["--disable-cuda-graph"]
    accept.eval_stage(run)
    assert starts(engine) == 4


def test_a_running_server_is_always_measured_again(run: Run, engine: FakeEngine) -> None:
    run.config.eval.server = ServerConfig(url="http://127.0.0.1:1", baseline_url="http://127.0.0.1:2")
    accept.eval_stage(run)
    accept.eval_stage(run)
    assert starts(engine) == 4


def test_failed_prompts_leave_the_stage_open(run: Run, engine: FakeEngine, capsys) -> None:
    engine.failing = {"layer_1": {"3": "timeout after 5 s"}}
    accept.eval_stage(run)
    said = " ".join(capsys.readouterr().out.split())
    assert "7 of 8 prompts; gsm8k_like/3: timeout after 5 s" in said
    assert run.incomplete == [f"2 continuations failed ({accept.eval_folder(run) / 'table.txt'} says why)"]
    assert "7 of 8 prompts" in (accept.eval_folder(run) / "table.txt").read_text()
    engine.failing, run.incomplete = {}, []
    accept.eval_stage(run)
    assert (accept.eval_folder(run) / "stage.json").exists() and run.incomplete == []
    assert [entry[1] for entry in engine.log if entry[0] == "start"] == ["none", "layer_1", "layer_1"]


def test_secrets_in_the_servers_environment_are_not_written(run: Run, engine: FakeEngine, monkeypatch) -> None:
    monkeypatch.setattr(accept, "predicted_acceptance", lambda _run: [0.9, 0.9])  # alarms, and prints its commands
    run.config.eval.server.env = {"HF_TOKEN": "hf_verysecret", "OMP_NUM_THREADS": "1"}
    accept.eval_stage(run)
    written = "".join(p.read_text(errors="replace") for p in (accept.eval_folder(run)).iterdir())
    assert "hf_verysecret" not in written
    assert accept.next_commands(run)[1].startswith("env OMP_NUM_THREADS=1 python -m sglang.launch_server")


def test_the_adapter_is_chosen_by_name(run: Run) -> None:
    assert isinstance(accept.server_engine(run, run.wiring), SGLangEngine)
    run.config.eval.engine = "vllm"
    assert isinstance(accept.server_engine(run, run.wiring), VLLMEngine)


def test_an_alarm_names_commands_that_the_probe_understands(run: Run, engine: FakeEngine, monkeypatch) -> None:
    monkeypatch.setattr(accept, "predicted_acceptance", lambda _run: [0.9, 0.9])
    engine.kept = {"layer_1": [0]}
    accept.eval_stage(run)
    (alarm, _) = json.loads((accept.eval_folder(run) / "results.json").read_text())["alarm"]
    draft, launch, live = (shlex.split(command) for command in alarm["commands"])
    assert _parser().parse_args(draft[3:]).draft == run.served
    assert _parser().parse_args(live[3:]).target == run.target_path
    port = launch[launch.index("--port") + 1]
    assert live[live.index("--url") + 1].endswith(f":{port}")
    assert "--enable-return-aux-hidden-states" in launch
    run.config.eval.server.url = "http://gpu7:30001"
    assert [shlex.split(c)[3] for c in accept.next_commands(run)] == ["draft", "live"]
    assert "--url http://gpu7:30001" in accept.next_commands(run)[1]
    run.config.eval.engine = "local"
    assert len(accept.next_commands(run)) == 1


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"engine": "tgi"}, "eval.engine"),
        ({"batch_sizes": []}, "eval.batch_sizes"),
        ({"batch_sizes": [1, 1]}, "eval.batch_sizes"),
        ({"batch_sizes": [0]}, "eval.batch_sizes"),
        ({"engine": "local", "batch_sizes": [4]}, "eval.batch_sizes"),
        ({"alarm": 0.0}, "eval.alarm"),
        ({"server": ServerConfig(url="localhost:30000")}, "eval.server.url"),
    ],
)
def test_wrong_settings_name_their_field(changes, field) -> None:
    with pytest.raises(ConfigError, match=field.replace(".", r"\.")):
        EvalConfig(**{"engine": "sglang", "prompt_sets": ["x"], **changes}).validate()
