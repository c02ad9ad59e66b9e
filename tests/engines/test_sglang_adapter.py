"""The adapter against the real SGLang on a CPU (`make sglang-cpu`).

The reference engine runs the same float32 weights in this process. Its counts hang on which sites feed the draft, so
equal counts, prompt by prompt, say that SGLang fed the sites that were asked for.
"""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from tiny_models import HIDDEN, LAYERS, WIRING, local_engine, make_served, make_target

from eagle3.errors import RedraftError
from eagle3.wiring import Wiring
from eval.engines.base import Ask, Generation
from eval.engines.server_config import ServerConfig
from eval.engines.sglang import SGLangEngine

NATIVE = Wiring.native("llama", LAYERS, HIDDEN)
STEPS, TOKENS = 3, 24
ASKS = [Ask(f"p{k}", [0, 10 + k, 20, 30 + k, 40], k) for k in range(10)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Target and draft; the draft was exported for another build than the one that serves it here."""
    target = make_target(tmp_path_factory.mktemp("models") / "tiny")
    return target, make_served(target.parent / "served", target, "vllm")


@pytest.fixture(scope="module")
def cfg(sglang_python: Path, sglang_env: dict[str, str], sglang_args: list[str]) -> ServerConfig:
    return ServerConfig(
        python=str(sglang_python), env=sglang_env, dtype="float32", start_timeout_s=600.0, extra_args=sglang_args
    )


def counts(made: Generation | None) -> tuple[list[int], list[int]]:
    assert made is not None
    return made.tokens, made.correct_histogram


def reference(folders: tuple[Path, Path], wiring: Wiring) -> list[tuple[list[int], list[int]]]:
    local = local_engine(*folders, wiring)
    return [counts(local.generate(ask.prompt_ids, TOKENS, STEPS)) for ask in ASKS]


def test_sglang_feeds_the_sites_asked_for(cfg: ServerConfig, folders: tuple[Path, Path], tmp_path: Path) -> None:
    expected = reference(folders, WIRING)
    assert expected != reference(folders, NATIVE)  # else equal counts would say nothing
    engine = SGLangEngine(*folders, WIRING, STEPS, cfg, tmp_path)
    with engine.serve(WIRING) as session:
        for size in (1, 4):
            batch = session.run(ASKS, max_new_tokens=TOKENS, temperature=0.0, concurrency=size)
            assert batch.failures == {}
            assert [counts(made) for made in batch.generations] == expected
        assert session.facts["convention"] == "sglang-0.5.23" and session.facts["ids"] == [0, 3, 5]
        assert "source of SGLang" in session.facts["convention_from"]
        joined(session.facts["url"], folders, tmp_path)
    with pytest.raises(httpx.ConnectError):
        httpx.get(session.facts["url"] + "/health")


def joined(url: str, folders: tuple[Path, Path], tmp_path: Path) -> None:
    """The same server, connected to as if others had started it."""
    engine = SGLangEngine(*folders, WIRING, STEPS, ServerConfig(url=url), tmp_path)
    with engine.serve(WIRING) as session:
        assert session.facts["mode"] == "connected" and session.facts["ids"] == [0, 3, 5]
        (made,) = session.run(ASKS[:1], max_new_tokens=TOKENS, temperature=0.0, concurrency=1).generations
        assert made is not None and made.verifies > 0
    with pytest.raises(RedraftError, match="expected layer 2"), engine.serve(NATIVE):
        pass


def test_a_flag_that_sglang_refuses_is_told_in_one_line(
    cfg: ServerConfig, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    wrong = ServerConfig(python=cfg.python, env=cfg.env, extra_args=[*cfg.extra_args, "--no-such-flag"])
    engine = SGLangEngine(*folders, WIRING, STEPS, wrong, tmp_path)
    with (
        pytest.raises(RedraftError, match=r"did not start.*unrecognized arguments: --no-such-flag"),
        engine.serve(None),
    ):
        pass
