"""The small tokenizer and its Kimi-like chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from data_prep.targets.corpus import read_corpus
from data_prep.targets.tokenizer import SPECIAL, build_tokenizer

CALL = {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "reasoning_content": "greet", "content": "hello"},
    {"role": "user", "content": "look it up"},
    {"role": "assistant", "reasoning_content": "call", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "functions.f:0", "content": "42"},
]


@pytest.fixture(scope="module")
def tokenizer(tiny_llama_path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_llama_path, local_files_only=True)


def test_round_trip_and_special_ids(tokenizer: Any) -> None:
    assert len(tokenizer) == 320
    text = "Ada bakes brød, 3 times a day.\n  两次\t\U0001f35e"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL)) == list(range(len(SPECIAL)))
    assert (tokenizer.bos_token_id, tokenizer.eos_token, tokenizer.pad_token_id) == (0, "<|im_end|>", 2)
    rendered = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert tokenizer.decode(tokenizer.apply_chat_template(CHAT, return_dict=False)) == rendered


def test_same_size_same_tokenizer(tokenizer: Any) -> None:
    texts = [m["content"] for conversation in read_corpus()[:50] for m in conversation]
    again = build_tokenizer(320, 2048)
    assert again.get_vocab() == tokenizer.get_vocab()
    assert [again.encode(t) for t in texts] == [tokenizer.encode(t) for t in texts]


def test_template_thinking_history_and_tools(tokenizer: Any) -> None:
    render = lambda chat, **kw: tokenizer.apply_chat_template(chat, tokenize=False, **kw)  # noqa: E731
    head, open_turn = "<|im_user|>user<|im_middle|>hi<|im_end|>", "<|im_assistant|>assistant<|im_middle|><think>"
    assert render(CHAT[:1], add_generation_prompt=True) == head + open_turn
    assert render(CHAT[:1], add_generation_prompt=True, thinking=False) == head + open_turn + "</think>"
    whole = render(CHAT)
    assert "greet" not in whole and "<think>call</think>" in whole  # thoughts stay only after the last plain answer
    assert "call" not in render(CHAT, thinking=False).replace("tool_call", "")
    section = "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
    assert section + '{"a": 1}<|tool_call_end|><|tool_calls_section_end|><|im_end|>' in whole
    assert whole.endswith("<|im_system|>tool<|im_middle|>## Return of functions.f:0\n42<|im_end|>")
    assert render(CHAT[:1], tools=[{"x": 1}]).startswith("<|im_system|>tool_declare<|im_middle|>")


def test_smollm2_tokenizer_keeps_each_digit_alone() -> None:
    from data_prep.targets.smollm2 import split_digits

    tokenizer = build_tokenizer(1024, 2048)
    split_digits(tokenizer)
    text = "in 2024, room 7"
    assert [t for t in tokenizer.tokenize(text) if any(c.isdigit() for c in t)] == list("20247")
    assert tokenizer.decode(tokenizer.encode(text)) == text
