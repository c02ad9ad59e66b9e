"""Conversations, prompts and topics of any bytes; chats of any words under any template."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from bad_values import changed, damaged, taken_or_refused, values, walked
from hypothesis import example, given
from hypothesis import strategies as st

from data_prep.conversations import read_conversations, to_conversation
from data_prep.regenerate.source import asking_lengths, for_request, read_source
from data_prep.render import Refused, Renderer
from data_prep.select.config import SourceConfig
from data_prep.select.sources import Source
from data_prep.targets.tokenizer import SPECIAL, build_tokenizer
from eval.benchmarks import BENCHMARKS
from eval.prompts import read_prompt_set
from scripts.make_prompts import build_prompts, read_topics
from scripts.write_answers import read_prompts

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
SOUND = {
    "id": "r1",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "A river?"}]},
        {"role": "assistant", "content": "Water.", "reasoning_content": "Hm.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "wet"},
        {"role": "assistant", "content": "Wet water."},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    "finish_reason": "stop",
    "generation": {"template_kwargs": {"thinking": True}},
    "provenance": {"file": "x"},
    "domain": "chat",
    "token_ids": {"prompt": [1, 2], "answer": [3]},
}
BENCHMARK = {"question_id": 1, "turns": ["a", "b"], "reference": ["c"], "question": "q", "prompt": "p", "problem": "x"}
KEYS = ("messages", "role", "content", "id", "tools", "tool_calls", "function", "arguments", "from", "value", "type")


def _raw(*records: Any) -> bytes:
    return "".join(json.dumps(one) + "\n" for one in records).encode()


LINES = _raw(SOUND, {**SOUND, "id": "r2"})


def _file(folder: Path, raw: bytes, name: str = "chats.jsonl") -> Path:
    path = folder / name
    path.write_bytes(raw)
    return path


@given(raw=damaged(LINES) | st.binary(max_size=40))
@example(raw=b"[" * 100_000)
@example(raw=b'{"messages": [{"role": "user", "content": "\\ud800"}]}')
@example(raw=b'{"messages": [{"role": "assistant", "content": "", "tool_calls": 5}]}')
@example(raw=b"\xef\xbb\xbf{}")
def test_lines_of_any_bytes_are_taken_or_refused(raw: bytes, tmp_path: Path) -> None:
    path = _file(tmp_path, raw)
    walked(read_conversations([str(path)]))
    walked(read_source(path))
    for one in Source(SourceConfig(path=str(path), name="s")).read():
        assert one.record is not None or one.error is not None
    taken_or_refused(lambda: read_prompts(path))
    for form in ("", *(f"{name}:" for name in BENCHMARKS)):
        taken_or_refused(lambda form=form: read_prompt_set(f"{form}{path}"))
    walked(read_conversations([str(_file(tmp_path, raw, "chats.json"))]))
    taken_or_refused(lambda: build_prompts(read_topics(path)))


@given(raw=damaged(gzip.compress(_raw(BENCHMARK), mtime=0)))
def test_a_gzip_of_any_bytes_is_taken_or_refused(raw: bytes, tmp_path: Path) -> None:
    path = _file(tmp_path, raw, "q.jsonl.gz")
    taken_or_refused(lambda: read_prompt_set(f"mtbench:{path}"))


@given(record=changed(SOUND) | st.dictionaries(st.sampled_from(KEYS), values(KEYS), max_size=4))
def test_a_record_of_any_shape_is_taken_or_refused(record: Any, tmp_path: Path) -> None:
    if isinstance(record, dict):
        found = taken_or_refused(lambda: to_conversation(record, "r", "s", "s, record 1"))
        for turns in ("last", "all") if found else ():
            asking_lengths(found.messages, turns)
            json.dumps(for_request(found.messages))
    text = json.dumps([record], ensure_ascii=True)
    path = _file(tmp_path, text[1:-1].encode())
    for form in ("", *(f"{name}:" for name in BENCHMARKS)):
        taken_or_refused(lambda form=form: read_prompt_set(f"{form}{path}"))
    taken_or_refused(lambda: read_prompts(path))


@given(record=changed(BENCHMARK), name=st.sampled_from(sorted(BENCHMARKS)))
def test_a_benchmark_of_any_shape_is_taken_or_refused(record: Any, name: str, tmp_path: Path) -> None:
    path = _file(tmp_path, _raw(record))
    found = taken_or_refused(lambda: read_prompt_set(f"{name}:{path}"))
    assert found is None or all(prompt.messages for prompt in found.prompts)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer(320, 2048)


words = st.text(max_size=20) | st.sampled_from([*SPECIAL, "<think>", "</think>", "\n", "\u0301", "a<|im_end|>b", " "])
said = st.builds("".join, st.lists(words, max_size=3))
roles = st.sampled_from(["user", "assistant", "system", "tool"])
turns = st.lists(
    st.fixed_dictionaries({"role": roles, "content": said}, optional={"reasoning_content": said}),
    min_size=1,
    max_size=6,
)
kinds = st.sampled_from(["served", "all", "last"])


@given(messages=turns, kind=kinds, longest=st.integers(4, 60), cut=st.booleans())
def test_a_chat_of_any_words_is_rendered_or_refused(
    messages: list[dict[str, Any]], kind: str, longest: int, cut: bool, tokenizer: Any
) -> None:
    renderer = Renderer(tokenizer, turns=kind, max_length=longest)
    record = {"messages": messages, "truncated": cut}
    found = taken_or_refused(lambda: renderer.records(to_conversation(record, "r", "s", "s, record 1"))) or []
    for one in found:
        if isinstance(one, Refused):
            assert one.error.why
            continue
        assert len(one.input_ids) == len(one.loss_mask) <= longest
        assert set(one.loss_mask) <= {0, 1}
        assert any(one.loss_mask[2:])


PIECES = [
    "{% for m in messages %}",
    "{% endfor %}",
    "{% if m.role == 'user' %}",
    "{% else %}",
    "{% endif %}",
    "{{ m.content }}",
    "{{ m.content | upper }}",
    "{{ messages[0].content }}",
    "{{ m['nosuch'].x }}",
    "{{ 1 / 0 }}",
    "{{ raise_exception('no') }}",
    "{{ messages | tojson }}",
    "{% set ns = namespace(n=0) %}",
    "{% generation %}",
    "{% endgeneration %}",
    "{% if add_generation_prompt %}<|im_assistant|>{% endif %}",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_middle|>",
    "<|im_end|>",
    "{{",
    "text",
]
templates = st.builds("".join, st.lists(st.sampled_from(PIECES), max_size=10))
CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b c"}]}


@given(template=templates, markers=st.sampled_from(["auto", "none", "kimi", "chatml"]))
@example(template="{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", markers="auto")
@example(template="{% for i in range(10**9) %}x{% endfor %}", markers="auto")
def test_a_template_of_any_shape_is_used_or_refused(template: str, markers: str, tokenizer: Any) -> None:
    before = tokenizer.chat_template
    tokenizer.chat_template = template
    try:
        renderer = taken_or_refused(lambda: Renderer(tokenizer, markers=markers))
        if renderer is not None:
            taken_or_refused(lambda: renderer.records(to_conversation(CHAT, "r", "s", "s, record 1")))
    finally:
        tokenizer.chat_template = before
