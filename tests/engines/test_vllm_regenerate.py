"""The regeneration against the real vLLM on a CPU; skipped by name where it is not set up."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from regenerating import Reference, check_greedy, check_sampled, make_target

from eagle3.wiring import Wiring
from eval.engines.server_config import ServerConfig
from eval.engines.vllm import VLLMEngine

ROOT = Path(__file__).resolve().parents[2]


def test_answers_of_vllm_are_the_targets_own(tmp_path: Path) -> None:
    python = Path(os.environ.get("VLLM_PYTHON") or ROOT / ".venv-vllm" / "bin" / "python")
    if not python.exists():
        pytest.skip("vLLM is not set up: run `make vllm-cpu`")
    target = make_target(tmp_path / "model")
    cfg = ServerConfig(
        python=str(python),
        env={"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        dtype="float32",
        start_timeout_s=600.0,
        extra_args=[
            "--enforce-eager", "--max-model-len=512", "--max-num-seqs=8", "--reasoning-parser=kimi_k2",
            "--enable-auto-tool-choice", "--tool-call-parser=kimi_k2",
        ],
    )  # fmt: skip
    wiring = Wiring.native("llama", 8, 64)  # of a draft that is never served
    engine = VLLMEngine(target, tmp_path / "no-draft", wiring, 3, cfg, tmp_path, trust_remote_code=True)
    reference = Reference(target)
    with engine.serve(None) as session:
        report = check_greedy(session.facts["url"], reference, tmp_path, tags_dropped=True)
        check_sampled(session.facts["url"], reference, tmp_path)
    assert (report["served"]["engine"], report["served"]["version"]) == ("vllm", session.facts["build"])
