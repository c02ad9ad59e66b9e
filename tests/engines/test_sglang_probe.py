"""The live and ranks probes against the real SGLang 0.5.23 on a CPU: with and without a draft loaded."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tiny_models import HIDDEN, LAYERS, make_served, make_target

from eagle3.wiring import Wiring
from eval.engines.process import free_port, server_process
from eval.probe.__main__ import main

WIRING = Wiring.native("llama", LAYERS, HIDDEN)  # layers 2, 4, 5
START_S = 600.0
WHOLE = ["--disable-radix-cache", "--chunked-prefill-size=-1"]
Probe = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("probe") / "target")


@pytest.fixture
def start(
    sglang_python: Path, sglang_env: dict[str, str], sglang_args: list[str], target: Path, tmp_path: Path
) -> Callable[[Sequence[str]], contextlib.AbstractContextManager[str]]:
    """`with start(flags) as url`: a server of the tiny target."""

    @contextlib.contextmanager
    def running(flags: Sequence[str], **env: str) -> Iterator[str]:
        port = free_port("127.0.0.1")
        url = f"http://127.0.0.1:{port}"
        command = [str(sglang_python), "-m", "sglang.launch_server", "--model-path", str(target), "--port", str(port)]
        command += ["--dtype", "float32", "--skip-tokenizer-init", *sglang_args, *flags]
        with server_process("sglang", command, url, tmp_path / "server.log", {**sglang_env, **env}) as server:
            server.wait_ready("/health", START_S)
            yield url

    return running


@pytest.fixture
def probe(capsys: pytest.CaptureFixture[str], target: Path) -> Probe:
    def run(name: str, *args: Any) -> tuple[int, dict[str, Any]]:
        capsys.readouterr()
        words = [name, "--target", str(target), "--max-tokens", "32", *map(str, args), "--json"]
        code = main(words)
        return code, json.loads(capsys.readouterr().out)

    return run


def test_server_that_captures_without_a_draft(start: Any, probe: Probe, tmp_path: Path, target: Path) -> None:
    served = make_served(tmp_path / "served", target, "sglang-0.5.23", WIRING)  # ids [1, 3, 4]
    other = make_served(
        tmp_path / "other", target, "vllm", WIRING
    )  # the same sites, written [2, 4, 5] for another engine
    capture = ["--speculative-algorithm=EAGLE3", "--enable-return-aux-hidden-states"]
    with start([*capture, "--return-aux-hidden-state-layer-ids", "1", "3", "4", *WHOLE]) as url:
        saved = tmp_path / "one.safetensors"
        code, verdict = probe("live", "--url", url, "--draft", served, "--save", saved)
        assert code == 0, verdict
        assert verdict["facts"]["measured"] == WIRING.names and verdict["facts"]["version"] == "0.5.23"
        assert all(row["sure"] == "yes" and row["error"] < 0.01 for row in verdict["rows"])
        assert any("generated tokens are fed alike" in line for line in verdict["reasons"])
        code, verdict = probe("live", "--url", url, "--draft", other)
        assert code == 2 and "--return-aux-hidden-state-layer-ids 2 4 5" in verdict["mend"]
        code, verdict = probe("live", "--url", url, "--wiring", "layer_3,layer_5,layer_6")
        assert code == 1 and "one layer earlier" in " ".join(verdict["reasons"]) and "[2, 4, 5]" in verdict["mend"]
        code, verdict = probe("ranks", "--dump", saved, "--url", url)
        assert code == 0 and all(row["error"] < 1e-3 for row in verdict["rows"])
    flags = [*capture, "--return-aux-hidden-state-layer-ids", "1", "3", "4", *WHOLE, "--tp-size=2"]
    with start(flags, SGLANG_CPU_OMP_THREADS_BIND="0|1") as url:  # a core for each of two ranks
        code, verdict = probe("ranks", "--dump", saved, "--url", url)
        assert code == 0 and all(row["error"] < 1e-3 for row in verdict["rows"])
        assert any("(2 ranks)" in line for line in verdict["reasons"])


def test_server_with_a_draft(start: Any, probe: Probe, tmp_path: Path, target: Path) -> None:
    served = make_served(
        tmp_path / "served", target, "vllm", WIRING
    )  # ids [2, 4, 5], which SGLang reads as layers 3, 5, 6
    flags = ["--speculative-algorithm=EAGLE3", f"--speculative-draft-model-path={served}"]
    flags += ["--speculative-num-steps=2", "--speculative-eagle-topk=1", "--speculative-num-draft-tokens=3"]
    with start([*flags, "--enable-return-hidden-states", *WHOLE]) as url:
        code, verdict = probe("live", "--url", url, "--draft", served, "--new-tokens", 16)
        assert code == 1, verdict
        assert verdict["facts"]["measured"] == ["layer_3", "layer_5", "layer_6"]
        assert verdict["facts"]["mode"] == "with its draft"
        assert any("off by one layer" in line for line in verdict["reasons"])
        assert "eagle_aux_hidden_state_layer_ids = [1, 3, 4]" in verdict["mend"]


def test_server_that_returns_no_states_is_told_its_flags(start: Any, probe: Probe) -> None:
    with start(WHOLE) as url:
        code, verdict = probe("live", "--url", url)
        assert code == 2 and "--speculative-algorithm EAGLE3 --enable-return-aux-hidden-states" in verdict["mend"]
