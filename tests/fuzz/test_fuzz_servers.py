"""Servers' answers of any shape: counters, chats, model lists, flags and hidden states."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import httpx
from bad_values import changed, damaged, taken_or_refused, values
from hypothesis import example, given
from hypothesis import strategies as st

from data_prep.capture.sglang_http import SGLangHTTPCapture, plan_servers
from data_prep.regenerate.answer import read_answer
from data_prep.regenerate.client import UnusableError
from data_prep.regenerate.facts import _choose, _models
from eagle3.patience import message_of, not_json, retry_after
from eval.engines.sglang_counts import generation_from as from_sglang
from eval.engines.vllm_counts import generation_from as from_vllm
from eval.probe.server import ProbeServer, check_rows

UNIT = Path(__file__).resolve().parents[1] / "unit"
sys.path.append(str(UNIT / "capture"))
import test_capture_sglang_http as capturing  # noqa: E402

SGLANG = {
    "output_ids": [5, 6, 7, 8],
    "meta_info": {
        "finish_reason": {"type": "length"},
        "completion_tokens": 4,
        "spec_verify_ct": 2,
        "spec_num_correct_drafts": 1,
        "spec_num_proposed_drafts": 4,
        "spec_correct_drafts_histogram": [1, 1, 0],
        "spec_accept_length": 2.0,
        "num_retractions": 0,
    },
}
VLLM = {
    "choices": [{"finish_reason": "length", "token_ids": [5, 6, 7, 8]}],
    "usage": {"completion_tokens": 4},
    "metrics": {
        "time_to_first_token_ms": 3.0,
        "speculative_decoding": {
            "per_step_accepted": [1, 0],
            "per_step_drafted": [2, 2],
            "num_spec_tokens": 2,
            "num_accepted_draft_tokens": 1,
            "acceptance_histogram": [1, 1, 0],
            "mean_acceptance_length": 1.5,
        },
    },
}
CHAT = {
    "model": "m",
    "choices": [
        {
            "finish_reason": "stop",
            "message": {
                "role": "assistant",
                "content": "a",
                "reasoning": "b",
                "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}],
            },
            "token_ids": [1, 2],
        }
    ],
    "usage": {"completion_tokens": 2, "prompt_tokens": 3},
    "prompt_token_ids": [1],
}
STATES = {"meta_info": {"id": "a", "cached_tokens": 0, "hidden_states": [[[0.5] * 24] * 4]}, "output_ids": [1]}
INFO = capturing.Servers().info["aux"]


@given(answer=changed(SGLANG) | values(("output_ids", "meta_info")), steps=st.integers(0, 3))
@example(answer=SGLANG, steps=2)
def test_counts_of_sglang_are_possible_or_refused(answer: Any, steps: int) -> None:
    found = taken_or_refused(lambda: from_sglang(answer, 1.0, steps, steps + 1))
    if found is not None and steps:
        assert 0 <= found.correct <= steps * found.verifies
        assert sum(found.correct_histogram) == found.verifies
        assert min(found.correct_histogram) >= 0


@given(answer=changed(VLLM) | values(("choices", "metrics", "usage")), steps=st.integers(0, 3))
def test_counts_of_vllm_are_possible_or_refused(answer: Any, steps: int) -> None:
    found = taken_or_refused(lambda: from_vllm(answer, 1.0, steps))
    if found is not None and steps:
        assert 0 <= found.correct <= steps * found.verifies
        assert sum(found.correct_histogram) == found.verifies


def test_the_sound_answers_are_taken() -> None:
    assert from_sglang(SGLANG, 1.0, 2, 3).correct == 1
    assert from_vllm(VLLM, 1.0, 2).correct == 1
    assert read_answer(CHAT).answer_tokens == 2


@given(body=changed(CHAT) | values(("choices", "message", "usage")))
def test_a_chat_of_any_shape_is_read_or_refused(body: Any) -> None:
    found = taken_or_refused(lambda: read_answer(body), UnusableError)
    if found is not None:
        assert found.answer_tokens >= 0
        assert isinstance(found.empty, bool)
        json.dumps(found.message)


@given(
    body=changed({"data": [{"id": "m", "root": "/m"}]}) | values(("data", "id")), model=st.sampled_from(["", "m", "x"])
)
@example(body={"data": -1}, model="")
def test_a_list_of_models_of_any_shape_is_read_or_refused(body: Any, model: str) -> None:
    listed = taken_or_refused(lambda: _models(body), UnusableError)
    taken_or_refused(lambda: _choose(listed, model, "http://x")) if listed else None


def _client(answer: Any, info: Any = INFO) -> httpx.Client:
    """A server that says `info` of itself, and `answer` to everything else."""

    def respond(request: httpx.Request) -> httpx.Response:
        value = info if request.url.path.endswith("server_info") else answer
        if isinstance(value, bytes):
            return httpx.Response(200, content=value)
        return httpx.Response(200, content=json.dumps(value).encode())

    return httpx.Client(transport=httpx.MockTransport(respond))


def _captured(info: Any, answer: Any) -> None:
    plan = plan_servers(capturing.CFG, capturing.WIRING, _client(answer, info))
    client = _client(answer, info)
    one = SGLangHTTPCapture(capturing.WIRING, plan, capturing.CFG, vocab_size=64, client=client)
    one.run(capturing.RECORDS[:1])


@given(answer=changed(STATES) | damaged(json.dumps(STATES).encode()) | values(("meta_info", "hidden_states")))
@example(answer={"meta_info": {"hidden_states": [5]}})
@example(answer={"meta_info": {"hidden_states": [[]]}})
@example(answer={"meta_info": [1]})
def test_states_of_any_shape_are_read_or_refused(answer: Any) -> None:
    taken_or_refused(lambda: _captured(INFO, answer))
    server = ProbeServer("http://x", 5.0, _client(answer, {**INFO, "disable_radix_cache": True}))
    facts = server.facts()
    found = taken_or_refused(lambda: server.states([1, 2, 3, 4]))
    if found is not None:
        taken_or_refused(lambda: check_rows(found, 4, facts, 8, "here"))


@given(info=changed(INFO) | values(("version", "disable_radix_cache")))
@example(info={**INFO, "chunked_prefill_size": "many"})
@example(info={**INFO, "return_aux_hidden_state_layer_ids": "1,2,4"})
def test_flags_of_any_shape_are_read_or_refused(info: Any) -> None:
    taken_or_refused(lambda: _captured(info, STATES))
    server = ProbeServer("http://x", 5.0, _client(STATES, info))
    facts = taken_or_refused(server.facts)
    if facts is None:
        return
    for ask in (lambda: facts.capture_ids, lambda: facts.chunk, lambda: facts.prefix_cache, facts.convention):
        taken_or_refused(ask)
    taken_or_refused(lambda: facts.refuse_without_aux([1, 2, 4]))


@given(
    body=st.binary(max_size=60) | values(("error", "message", "detail")).map(lambda value: json.dumps(value).encode()),
    wish=st.text(max_size=12) | st.sampled_from(["-1", "1e9", "٣", "Mon, 01 Jan 2300 00:00:00 GMT", "9" * 400]),
)
def test_a_refusal_of_any_bytes_is_told_in_one_line(body: bytes, wish: str) -> None:
    response = httpx.Response(500, content=body, headers=[(b"retry-after", wish.encode("utf-8", "replace"))])
    assert "\n" not in message_of(response)
    assert "\n" not in not_json(response)
    assert retry_after(response) >= 0
