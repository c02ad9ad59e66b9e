"""The assistant's turns in the texts that a server had before it when it wrote them.

A turn is served as the chat template's text of `messages[:i]` with the generation prompt, and then what the model
wrote. A template may show the same turn otherwise once others follow (thoughts of settled turns are dropped), and
Kimi's shows even the last answer without its thoughts. So each turn is put together: the prompt as served, then the
turn as the template writes it, the message's own thoughts set in where the template leaves its think block empty.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateSyntaxError

from data_prep.conversations import Conversation
from data_prep.markers import Family
from data_prep.reasoning import (
    Words,
    empty_block,
    inserted_length,
    opens_thoughts,
    own_words,
    reasoning_length,
)
from eagle3.errors import DataError


class NothingToLearnError(DataError):
    """A sound record that holds no token the draft could learn under the settings; it may be skipped."""


@dataclass(frozen=True)
class ServedTurn:
    """One turn of the assistant.

    Args:
        number: which of the assistant's turns it is, from 1.
        text: all that the server had before it when the turn was done.
        start: first character of `text` to be learnt.
        end: character after the last one to be learnt.
        answer: the very tokens that the model wrote after `text`, where they are known; `text` is then the prompt.
    """

    number: int
    text: str
    start: int
    end: int
    answer: tuple[int, ...] = ()


class ChatTemplate:
    """A tokenizer's chat template with its arguments."""

    def __init__(self, tokenizer: Any, kwargs: dict[str, Any]) -> None:
        self.tokenizer, self.kwargs = tokenizer, kwargs

    def text(self, messages: Sequence[dict], tools: list | None, where: str, *, prompt: bool) -> str:
        """Render. Raises DataError when the template refuses the messages."""
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages), tools=tools, tokenize=False, add_generation_prompt=prompt, **self.kwargs
            )
        except Exception as err:  # a template may raise anything: its own raise_exception, a missing key, a wrong type
            own = isinstance(err, (TemplateSyntaxError, RecursionError, OverflowError))
            raise DataError(
                "the chat template refuses the messages", where=where, why=f"{type(err).__name__}: {err}",
                mend="mend the target's chat template" if own else "fix or drop the record, or mend the chat template",
                page="rendering",
            ) from None  # fmt: skip
        return str(text)

    def shown(self) -> str:
        """A short exchange as the template shows it, "" where it refuses."""
        try:
            return self.text([_said("user", "a"), _said("assistant", "b")], None, "", prompt=False)
        except DataError:
            return ""

    def keeps_argument_text(self) -> bool:
        """Whether it writes the arguments of a tool call as they are when they are text, not quoted once more."""
        text = '{"a":"b"}'
        call = {"id": "f:0", "type": "function", "function": {"name": "f", "arguments": text}}
        try:
            shown = self.text(
                [_said("user", "a"), _said("assistant", "") | {"tool_calls": [call]}], None, "", prompt=False
            )
        except DataError:
            return False
        return text in shown

    def marked_end(self, messages: Sequence[dict], tools: list | None, text: str) -> tuple[int, int] | None:
        """Characters of the last turn that a template with `{% generation %}` marks; None where it marks not all."""
        template = self.tokenizer.get_chat_template(None, tools)
        if "generation %}" not in template and "generation -%}" not in template:
            return None
        from transformers.utils.chat_template_utils import render_jinja_template

        variables = {**self.tokenizer.special_tokens_map, **self.kwargs}
        render: Any = render_jinja_template  # its annotated return type is not what it returns
        rendered, indices = render(
            [list(messages)], tools=tools, chat_template=template, return_assistant_tokens_mask=True, **variables
        )
        if rendered[0] != text or len(indices[0]) != sum(message["role"] == "assistant" for message in messages):
            return None
        return indices[0][-1]


class TurnFinder:
    """Finds turns under one chat template.

    Args:
        template: the chat template.
        family: its family of markers, or None: then a turn is found by comparing texts alone, and a template that
            rewrites what stands before a turn is refused.
        special: names of the tokenizer's special tokens.
        thinking: learn the reasoning that a message itself holds.
        verbatim: the template writes arguments of tool calls that are given as text letter for letter.
    """

    def __init__(
        self, template: ChatTemplate, family: Family | None, special: set[str], *, thinking: bool, verbatim: bool
    ) -> None:
        self.template, self.family, self.special = template, family, special
        self.thinking, self.verbatim = thinking, verbatim

    def find(self, conv: Conversation, i: int, where: str) -> ServedTurn:
        """The assistant's turn in `conv.messages[i]`.

        Raises:
            NothingToLearnError: the message's own text holds a token of structure, or was cut off in a tool call.
            DataError: the template refuses the messages, or it drops text that should be learnt.
        """
        messages = conv.messages
        asked = self.template.text(messages[:i], conv.tools, where, prompt=True)
        last = not any(message["role"] == "assistant" for message in messages[i + 1 :])
        if last and conv.token_ids:
            answer = tuple(conv.token_ids["answer"])
            return ServedTurn(turn_number(messages, i), asked, len(asked), len(asked), answer)
        words = own_words(messages[i], asked)
        self._refuse_markers(conv, i, words, where)
        text, start = self._served(conv, i, asked, words, where)
        text = self._with_thoughts(text, start, words, where)
        marked = self.template.marked_end(messages[: i + 1], conv.tools, text)
        if marked:
            start, end = marked[0], marked[1]
        else:
            end = self._end(text, start)
        start += inserted_length(text[start:end], words)
        if last and conv.truncated:
            text, end = self._cut(messages[i], text, start, words, where)
        else:
            end = self._with_end_token(text, start, end)
        if not self.thinking:
            start += reasoning_length(text[start:end], words)
        return ServedTurn(turn_number(messages, i), text, start, end)

    def _refuse_markers(self, conv: Conversation, i: int, words: Words, where: str) -> None:
        """Refuse own words that name a token of structure: the model wrote letters, but they would become the token."""
        if self.family is None:
            return
        calls = json.dumps(conv.messages[i].get("tool_calls") or [], ensure_ascii=False)
        held = next(filter(None, map(self.family.held, (words.reasoning, words.answer, calls))), "")
        if held:
            why = f"the assistant's own text holds {held}, which would be encoded as that token"
            raise NothingToLearnError(
                "nothing to learn", where=where, why=why, mend="drop the record", page="rendering"
            )

    # --- text ---------------------------------------------------------------------------------------------------

    def _served(self, conv: Conversation, i: int, asked: str, words: Words, where: str) -> tuple[str, int]:
        """The text up to the turn's end, and where in it the prompt ends."""
        turn = conv.messages[i]
        text, start = self._continued(conv, i, turn, asked, words, where)
        if opens_thoughts(asked) and empty_block(text[start:]) and words.answer != (turn.get("content") or ""):
            apart = turn | {"reasoning_content": words.reasoning, "content": words.answer}
            text, start = self._continued(conv, i, apart, asked, words, where)
        return text, start

    def _continued(
        self, conv: Conversation, i: int, turn: dict, asked: str, words: Words, where: str
    ) -> tuple[str, int]:
        told = self._told(conv, i, turn, where)
        common = _common_length(asked, told)
        if common == len(asked):
            return told, common
        before = self.template.text(conv.messages[:i], conv.tools, where, prompt=False)
        if common < len(before.rstrip()):
            return self._spliced(before, asked, told, where)
        answer = words.answer.strip()
        if answer and answer not in told[common:]:  # its first letters look like the prompt's
            header = _common_length(before, told)
            common = max(told.find(answer, header), header)
        return told, common

    def _told(self, conv: Conversation, i: int, turn: dict, where: str) -> str:
        """The text with the turn, its tool calls' arguments as the model wrote them where the template lets them be."""
        turn = {key: value for key, value in turn.items() if key != "name"}  # the prompt names nobody
        texts = conv.arguments.get(i, [])
        if self.verbatim and any(texts):
            calls = [
                call | {"function": call["function"] | {"arguments": text}} if text else call
                for call, text in zip(turn["tool_calls"], texts, strict=True)
            ]
            turn = turn | {"tool_calls": calls}
        return self.template.text([*conv.messages[:i], turn], conv.tools, where, prompt=False)

    def _spliced(self, before: str, asked: str, told: str, where: str) -> tuple[str, int]:
        """The prompt as served, and the turn out of a text that shows what came before it otherwise."""
        at = told.rfind(self.family.assistant) if self.family else -1
        opening = asked.find(self.family.assistant, len(before)) if self.family else -1
        if at < 0 or opening < 0 or not asked.startswith(before):
            raise DataError(
                "the chat template rewrites what came before this turn", where=where,
                why="the text with the turn does not continue the text of its prompt", mend="drop the record",
            )  # fmt: skip
        common = _common_length(asked[opening:], told[at:])
        return asked[:opening] + told[at:], opening + common

    def _with_thoughts(self, text: str, start: int, words: Words, where: str) -> str:
        """The text, the message's own reasoning set in where the template left its think block empty."""
        reasoning = words.reasoning.strip()
        block = empty_block(text[start:])
        if not reasoning or (not block and reasoning in text[start:]):
            return text
        if block and opens_thoughts(text[:start]):
            return text[:start] + words.reasoning + text[start:]
        if self.thinking:
            raise DataError(
                "the chat template drops the reasoning of this turn", where=where,
                why="it would be learnt without the reasoning that led to it",
                mend="use a template that prints it, or set data.thinking=false to learn the answers alone",
            )  # fmt: skip
        return text

    # --- ends ---------------------------------------------------------------------------------------------------

    def _end(self, text: str, start: int) -> int:
        """Character after the turn: after its end token, white space that the template sets after it left off."""
        at = text.rfind(self.family.end, start) if self.family else -1
        if self.family and at >= 0:
            return at + len(self.family.end)
        return start + len(text[start:].rstrip())

    def _with_end_token(self, text: str, start: int, end: int) -> int:
        """Take in the end-of-turn token that follows directly on a turn marked without it."""
        if any(text.endswith(name, start, end) for name in self.special):
            return end
        return end + max((len(name) for name in self.special if text.startswith(name, end)), default=0)

    @staticmethod
    def _cut(message: dict, text: str, start: int, words: Words, where: str) -> tuple[str, int]:
        """The text of an answer that was cut off: it ends with its last word, no end-of-turn token follows."""
        if message.get("tool_calls"):
            raise NothingToLearnError(
                "nothing to learn",
                where=where,
                why="it was cut off inside a tool call",
                mend="drop the record",
                page="rendering",
            )
        said = words.answer if words.answer.strip() else words.reasoning
        at = text.rfind(said, start)
        if at < 0:
            said = said.strip()
            at = text.rfind(said, start)
        if at < 0:
            raise DataError(
                "the chat template changes the words of this turn",
                where=where,
                mend="drop the record",
                page="rendering",
            )
        return text[: at + len(said)], at + len(said)


def turn_number(messages: Sequence[dict], i: int) -> int:
    """Which of the assistant's turns `messages[i]` is, from 1."""
    return sum(message["role"] == "assistant" for message in messages[: i + 1])


def share_texts(turns: Sequence[ServedTurn]) -> list[list[ServedTurn]]:
    """Turns in groups whose longest text holds each turn just as it was served: one record is enough for each group."""
    groups: list[list[ServedTurn]] = []
    for turn in reversed(turns):
        served = turn.text[: turn.end]
        group = next((group for group in groups if group[0].text.startswith(served)), None)
        if group is None:
            groups.append([turn])
        else:
            group.append(turn)
    return [group[::-1] for group in reversed(groups)]


def _said(role: str, content: str) -> dict:
    return {"role": role, "content": content}


def _common_length(a: str, b: str) -> int:
    """Length of the longest common start of two texts."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a.startswith(b[low:middle], low):
            low = middle
        else:
            high = middle - 1
    return low
