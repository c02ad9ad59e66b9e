"""The extract stage's choice of backend: what it keys on, and when it looks for an engine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from data_prep.capture.sglang_engine import EngineFacts, EnginePlan
from data_prep.config import CaptureConfig, SGLangCaptureConfig
from eagle3.conventions import convention
from eagle3.wiring import Site, Wiring
from train.front import capture as front
from train.front.capture import CaptureChoice

WIRING = Wiring((Site(2), Site(4), Site(5)), "final", "llama", 8, 16)


def choice(**capture: Any) -> CaptureChoice:
    config = SimpleNamespace(capture=CaptureConfig(**capture), target=SimpleNamespace(trust_remote_code=False))
    run: Any = SimpleNamespace(config=config, wiring=WIRING, identity={"dtype": "bfloat16"})
    return CaptureChoice(run)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []

    def plan(cfg: SGLangCaptureConfig, wiring: Wiring, compute_dtype: str, declared: str) -> EnginePlan:
        calls.append(f"{compute_dtype} {declared}")
        rule = convention("sglang-0.5.23")
        return EnginePlan(EngineFacts("0.5.23", Path()), rule, rule.render(wiring), declared, cfg.tp)

    monkeypatch.setattr(front, "plan_engine", plan)
    return calls


def test_the_reference_backend_keeps_its_key() -> None:
    one = choice(backend="hf", device="cpu")
    assert one.settings == one.identity == {"backend": "hf", "compute_dtype": "float32"}


def test_a_finished_stage_is_recognised_without_the_engine(planned: list[str]) -> None:
    settings = choice(backend="sglang").settings
    moved = SGLangCaptureConfig(python="/elsewhere/python", timeout_s=5, mem_fraction=0.5, env={"A": "1"})
    assert choice(backend="sglang", sglang=moved).settings == settings
    for other in (SGLangCaptureConfig(tp=2), SGLangCaptureConfig(convention="sglang-0.5.9")):
        assert choice(backend="sglang", sglang=other).settings != settings
    assert choice(backend="sglang", compute_dtype="float16").settings != settings
    assert not planned


def test_the_manifest_gets_engine_version_convention_ids_and_ranks(planned: list[str]) -> None:
    one = choice(backend="sglang", sglang=SGLangCaptureConfig(tp=4))
    want = {
        "backend": "sglang",
        "engine_version": "0.5.23",
        "convention": "sglang-0.5.23",
        "ids": [1, 3, 4],
        "tp": 4,
        "compute_dtype": "bfloat16",
    }
    assert one.identity == want == one.identity
    assert planned == ["auto bfloat16"]  # asked once


def test_the_backend_starts_with_its_first_batch_and_ends_with_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    class Backend:
        def run(self, batch: Any) -> Any:
            seen.append(batch)
            if batch == "bad":
                raise ValueError("broken")
            return [batch]

        def close(self) -> None:
            seen.append("closed")

    one = choice()
    monkeypatch.setattr(one, "make", lambda: seen.append("made") or Backend())
    with one.open():
        pass
    assert seen == []
    with pytest.raises(ValueError, match="broken"), one.open() as backend:
        assert backend.run("first") == ["first"]
        backend.run("bad")
    assert seen == ["made", "first", "bad", "closed"]
