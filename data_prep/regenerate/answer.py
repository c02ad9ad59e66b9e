"""What a chat endpoint answers, checked and brought into one form; SGLang and vLLM name some things differently."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from data_prep.regenerate.client import UnusableError

FINISHED = ("stop", "length", "tool_calls")


@dataclass(frozen=True)
class Answer:
    """One answer of the target.

    Args:
        message: `role`, `content`, perhaps `reasoning_content` and `tool_calls`.
        finish_reason: stop, length or tool_calls.
        answer_tokens: as the server counted them, the token that ended the turn included.
        prompt_tokens: as the server counted them.
        model: as the server names it.
        answer_ids: the very tokens emitted, where the server gives them.
        prompt_ids: the tokens it read before, where the server gives them.
    """

    message: dict[str, Any] = field(repr=False)
    finish_reason: str
    answer_tokens: int
    prompt_tokens: int
    model: str
    answer_ids: list[int] | None = field(default=None, repr=False)
    prompt_ids: list[int] | None = field(default=None, repr=False)

    @property
    def truncated(self) -> bool:
        """It was cut off at the token limit."""
        return self.finish_reason == "length"

    @property
    def empty(self) -> bool:
        """Nothing is said, not even thought."""
        said = (self.message.get("content"), self.message.get("reasoning_content"))
        return not any(text and text.strip() for text in said) and not self.message.get("tool_calls")


def read_answer(body: Any) -> Answer:
    """Read a chat completion.

    Token ids: SGLang from 0.5.23 gives `choices[].response_token_ids` and `choices[].prompt_token_ids`, vLLM
    `choices[].token_ids` and `prompt_token_ids`, both for `return_token_ids`. Reasoning: `reasoning_content` (SGLang)
    or `reasoning` (vLLM).

    Raises:
        UnusableError: it is no chat completion with a finished answer in it.
    """
    choice = _first_choice(body)
    message, finish = choice.get("message"), choice.get("finish_reason")
    if not isinstance(message, dict):
        raise UnusableError("a choice without a message")
    if finish not in FINISHED:
        raise UnusableError(f"finish_reason {finish!r}")
    content = message.get("content")
    if content is not None and not isinstance(content, str):
        raise UnusableError(f"content is {type(content).__name__}, not text")
    said: dict[str, Any] = {"role": "assistant", "content": content or ""}
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str):
        said["reasoning_content"] = reasoning
    if message.get("tool_calls"):
        said["tool_calls"] = _tool_calls(message["tool_calls"])
    usage: Any = body.get("usage") if isinstance(body.get("usage"), dict) else {}
    counts = [usage.get(key) for key in ("completion_tokens", "prompt_tokens")]
    if not all(isinstance(count, int) and count >= 0 for count in counts):
        raise UnusableError("no token counts in `usage`")
    return Answer(
        said,
        finish,
        int(counts[0] or 0),
        int(counts[1] or 0),
        str(body.get("model") or ""),
        _ids(choice.get("response_token_ids") or choice.get("token_ids")),
        _ids(choice.get("prompt_token_ids") or body.get("prompt_token_ids")),
    )


def _first_choice(body: Any) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise UnusableError(f"the answer is {type(body).__name__}, not an object")
    choices = body.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise UnusableError(f"no choices; keys {sorted(map(str, body))[:8]}")
    return choices[0]


def _tool_calls(raw: Any) -> list[dict[str, Any]]:
    calls = []
    for call in raw if isinstance(raw, list) else [None]:
        function = call.get("function") if isinstance(call, dict) else None
        if call is None or not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise UnusableError("a tool call without a function")
        named = {"name": function["name"], "arguments": function.get("arguments") or "{}"}
        calls.append({"id": str(call.get("id") or ""), "type": "function", "function": named})
    return calls


def _ids(raw: Any) -> list[int] | None:
    good = isinstance(raw, list) and raw and all(type(one) is int and one >= 0 for one in raw)
    return raw if good else None
