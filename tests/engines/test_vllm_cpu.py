"""The adapter against the real vLLM on a CPU; skipped by name where `tests/engines/vllm_cpu/setup.sh` was not run.

The reference engine runs the same float32 weights in this process. Its counts hang on which sites feed the draft, so
equal counts, prompt by prompt, say that vLLM fed the sites that were asked for.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tiny_models import HIDDEN, LAYERS, VOCAB, WIRING, local_engine, make_served, make_target

from eagle3.wiring import Wiring
from eval.engines.base import Ask, BatchRun, Generation
from eval.engines.server_config import ServerConfig
from eval.engines.vllm import VLLMEngine

ROOT = Path(__file__).resolve().parents[2]
NATIVE = Wiring.native("llama", LAYERS, HIDDEN)
STEPS, TOKENS = 3, 24
ASKS = [Ask(f"p{k}", [0, 10 + k, 20, 30 + k, 40], k) for k in range(10)]


@pytest.fixture(scope="module")
def vllm_python() -> Path:
    """The interpreter that has the real vLLM."""
    python = Path(os.environ.get("VLLM_PYTHON") or ROOT / ".venv-vllm" / "bin" / "python")
    if not python.exists():
        pytest.skip("vLLM is not set up: run `make vllm-cpu`")
    return python


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Target and draft; the draft was exported for SGLang."""
    target = make_target(tmp_path_factory.mktemp("models") / "tiny")
    return target, make_served(target.parent / "served", target, "sglang-0.5.23")


@pytest.fixture
def vllm_config(vllm_python: Path) -> ServerConfig:
    return ServerConfig(
        python=str(vllm_python),
        env={
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        },
        dtype="float32",
        start_timeout_s=600.0,
        extra_args=["--enforce-eager", "--max-model-len=512", "--max-num-seqs=8"],
    )


@pytest.fixture
def engine(vllm_config: ServerConfig, folders: tuple[Path, Path], tmp_path: Path) -> VLLMEngine:
    return VLLMEngine(*folders, WIRING, STEPS, vllm_config, tmp_path)


def counts(made: Generation | None) -> tuple[list[int], list[int]]:
    assert made is not None
    return made.tokens, made.correct_histogram


def reference(folders: tuple[Path, Path], wiring: Wiring) -> list[tuple[list[int], list[int]]]:
    local = local_engine(*folders, wiring)
    return [counts(local.generate(ask.prompt_ids, TOKENS, STEPS)) for ask in ASKS]


def measured(engine: VLLMEngine, wiring: Wiring | None) -> tuple[dict[str, object], BatchRun, BatchRun]:
    with engine.serve(wiring) as session:
        one, four = (session.run(ASKS, max_new_tokens=TOKENS, temperature=0.0, concurrency=size) for size in (1, 4))
    assert one.failures == four.failures == {}
    return session.facts, one, four


@pytest.mark.parametrize("wiring", [WIRING, NATIVE], ids=["trained", "native"])
def test_vllm_feeds_the_sites_asked_for(engine: VLLMEngine, folders: tuple[Path, Path], wiring: Wiring) -> None:
    facts, one, four = measured(engine, wiring)
    expected = reference(folders, wiring)
    other = reference(folders, NATIVE if wiring == WIRING else WIRING)
    assert expected != other  # else equal counts would say nothing
    assert facts["ids"] == [site.layer for site in wiring.aux]
    assert [counts(made) for made in one.generations] == expected
    assert [counts(made) for made in four.generations] == expected


def test_the_target_alone_says_the_same_text(engine: VLLMEngine, folders: tuple[Path, Path]) -> None:
    _, one, four = measured(engine, None)
    expected = [tokens for tokens, _ in reference(folders, WIRING)]
    assert [made.tokens for made in one.generations if made] == expected
    assert [made.tokens for made in four.generations if made] == expected


def test_the_newer_norms_are_computed_as_trained(
    folders: tuple[Path, Path], tmp_path: Path, vllm_config: ServerConfig
) -> None:
    """fc_norm, norm_before_fc and norm_output, with the whole vocabulary: every verify keeps what it keeps locally."""
    target, older = folders
    norms = {"fc_norm": True, "norm_before_fc": True, "norm_output": True}
    newer = make_served(tmp_path / "newer", target, "sglang-0.5.23", draft_vocab=VOCAB, **norms)
    with VLLMEngine(target, newer, WIRING, STEPS, vllm_config, tmp_path).serve(WIRING) as session:
        made = session.run(ASKS, max_new_tokens=TOKENS, temperature=0.0, concurrency=4)
    expected = reference((target, newer), WIRING)
    assert expected != reference((target, older), WIRING)  # the norms change what is proposed
    assert [counts(one) for one in made.generations] == expected
