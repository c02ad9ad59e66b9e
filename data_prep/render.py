"""Conversations -> token ids and the mask of what the draft shall learn, for any chat template.

The convention, stated once: `loss_mask[t]` is 1 iff token t itself is assistant text to be learnt (unshifted). Learnt
are the words of the assistant and the token that ends its turn; not learnt is all that the server or the template puts
there: the generation prompt, an empty think block, line breaks after the end-of-turn token.

Assistant turns are found by rendering. The text of `messages[:i]` with the generation prompt must lead to the text of
`messages[:i+1]`, and what it leads to must stand in the whole conversation's text. Templates with `{% generation %}`
mark the turns themselves. Characters become tokens through offsets; a token that straddles the start of a turn belongs
to the generation prompt and is not learnt.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from data_prep.conversations import Conversation
from data_prep.offsets import tokenize_with_offsets
from data_prep.reasoning import inserted_length, reasoning_length, split_reasoning
from eagle3.atomic import sha256_json
from eagle3.errors import DataError

FIRST_LEARNABLE = 2  # the draft at row t predicts token t + 2, so tokens 0 and 1 are never predicted


class NothingToLearnError(DataError):
    """A sound record that holds no token the draft could learn under the settings; it may be skipped."""


@dataclass(frozen=True)
class Rendered:
    """One conversation as tokens.

    Args:
        record_id: the conversation's.
        input_ids: [T] token ids.
        loss_mask: [T] 0 or 1; 1 = assistant text to be learnt, on the token itself (unshifted).
    """

    record_id: str
    input_ids: list[int] = field(repr=False)
    loss_mask: list[int] = field(repr=False)


@dataclass(frozen=True)
class _Turn:
    """A turn of the assistant in the rendered text: its message and the characters [start, end) of its own text."""

    message: dict
    start: int
    end: int


class Renderer:
    """Renders conversations with one tokenizer's chat template.

    An assistant turn before the first user turn answers nothing that a server could be asked: it is context only.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template, fast or slow.
        thinking: learn the reasoning that a message itself holds; else it stays as context only.
        tools: learn turns that call tools; else they stay as context only.
        turns: "all" assistant turns, or the "last" one.
        max_length: tokens kept; the rest is cut off before it is judged whether anything is left to learn.
        template_kwargs: further arguments of the chat template, such as `{"enable_thinking": False}`.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        thinking: bool = True,
        tools: bool = True,
        turns: str = "all",
        max_length: int = 2048,
        template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.thinking, self.tools, self.turns, self.max_length = thinking, tools, turns, max_length
        self.template_kwargs = dict(template_kwargs or {})
        if not getattr(tokenizer, "chat_template", None):
            raise DataError(
                "tokenizer has no chat template", where=str(getattr(tokenizer, "name_or_path", "")),
                mend="put chat_template.jinja beside the target's tokenizer",
            )  # fmt: skip

    @property
    def tokenizer_hash(self) -> str:
        """SHA-256 of what decides the token ids: model, merges, normalizer, added tokens; not padding state."""
        return tokenizer_hash(self.tokenizer)

    @property
    def template_hash(self) -> str:
        """SHA-256 of the chat template and the arguments it is given."""
        return sha256_json({"template": self.tokenizer.chat_template, "kwargs": self.template_kwargs})

    def render(self, conv: Conversation) -> Rendered:
        """Render one conversation; turns after the last assistant turn are left off.

        Raises:
            NothingToLearnError: no token from position 2 on is to be learnt (within `max_length`).
            DataError: the template refuses the messages, or it drops text that should be learnt.
        """
        where = f"{conv.source}, record {conv.record_id}"
        last = max((i for i, m in enumerate(conv.messages) if m["role"] == "assistant"), default=None)
        if last is None:
            raise NothingToLearnError("nothing to learn", where=where, why="no assistant turn")
        messages = conv.messages[: last + 1]
        asked = next((i for i, message in enumerate(messages) if message["role"] in ("user", "tool")), last)
        answers = [i for i in self._wanted(messages) if i > asked]
        if not answers:
            raise NothingToLearnError("nothing to learn", where=where, why="the assistant answers no user turn")
        wanted = [i for i in answers if self.tools or not messages[i].get("tool_calls")]
        if not wanted:
            raise NothingToLearnError("nothing to learn", where=where, why="all its turns are tool calls")
        text, turns = self._find_turns(messages, wanted, conv.tools, where)
        ids, spans = tokenize_with_offsets(self.tokenizer, text, where)
        mask = self._mask(ids, spans, text, turns)
        ids, mask = ids[: self.max_length], mask[: self.max_length]
        if not any(mask[FIRST_LEARNABLE:]):
            cut = len(ids) == self.max_length
            why = f"no answer within {self.max_length} tokens" if cut else "its answers are empty"
            raise NothingToLearnError("nothing to learn", where=where, why=why, mend="raise data.max_length or drop it")
        return Rendered(conv.record_id, ids, mask)

    def _wanted(self, messages: list[dict]) -> list[int]:
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        return turns[-1:] if self.turns == "last" else turns

    # --- text ---------------------------------------------------------------------------------------------------

    def _text(self, messages: list[dict], tools: list | None, where: str, *, prompt: bool) -> str:
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=prompt, **self.template_kwargs
            )
        except Exception as err:  # a template may raise anything: its own raise_exception, a missing key, a wrong type
            raise DataError(
                "the chat template refuses the messages", where=where, why=f"{type(err).__name__}: {err}",
                mend="fix or drop the record",
            ) from None  # fmt: skip
        return str(text)

    def _find_turns(
        self, messages: list[dict], wanted: list[int], tools: list | None, where: str
    ) -> tuple[str, list[_Turn]]:
        """The whole text and the wanted turns in it."""
        text = self._text(messages, tools, where, prompt=False)
        marked = self._marked_turns(messages, tools, text, where)
        turns, cursor = [], 0
        for i in wanted:
            turn_where = f"{where}, message {i + 1}"
            if marked is not None:
                start, end = marked[i]
                turn = _Turn(messages[i], start + inserted_length(text[start:end], messages[i]), end)
            else:
                turn = self._rendered_turn(messages, i, tools, text, cursor, turn_where)
            self._check_reasoning(turn, text, turn_where)
            turns.append(turn)
            cursor = turn.end
        return text, turns

    def _marked_turns(
        self, messages: list[dict], tools: list | None, text: str, where: str
    ) -> dict[int, tuple[int, int]] | None:
        """Spans by message number that a template with `{% generation %}` marks; None where it marks not all."""
        template = self.tokenizer.get_chat_template(None, tools)
        if "generation %}" not in template and "generation -%}" not in template:
            return None
        from transformers.utils.chat_template_utils import render_jinja_template

        variables = {**self.tokenizer.special_tokens_map, **self.template_kwargs}
        render: Any = render_jinja_template  # its annotated return type is not what it returns
        rendered, indices = render(
            [messages], tools=tools, chat_template=template, return_assistant_tokens_mask=True, **variables
        )
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if rendered[0] != text or len(indices[0]) != len(turns):
            return None
        return dict(zip(turns, indices[0], strict=True))

    def _rendered_turn(
        self, messages: list[dict], i: int, tools: list | None, text: str, cursor: int, where: str
    ) -> _Turn:
        """Place turn i by comparing the text before it, with the generation prompt, and after it."""
        before = self._text(messages[:i], tools, where, prompt=False)
        asked = self._text(messages[:i], tools, where, prompt=True)
        told = self._text(messages[: i + 1], tools, where, prompt=False)
        common = _common_length(asked, told)
        header_start = _common_length(before, told)
        if common < len(before.rstrip()):
            raise DataError(
                "the chat template rewrites what came before this turn", where=where,
                why="the text with the turn does not continue the text of its prompt", mend="drop the record",
            )  # fmt: skip
        answer = split_reasoning(messages[i])[1]
        if common < len(asked) and answer and answer not in told[common:]:  # its first letters look like the prompt's
            common = max(told.find(answer, header_start), header_start)
        start = common + inserted_length(told[common:], messages[i])
        kept = told.rstrip()
        if text.startswith(kept):
            return _Turn(messages[i], start, len(told) if text.startswith(told) else len(kept))
        # An earlier turn that the template shows differently once later turns follow.
        if split_reasoning(messages[i])[0] and self.thinking:
            raise DataError(
                "the chat template drops the reasoning of an earlier turn", where=where,
                why="it would be learnt without the reasoning that led to it",
                mend="set data.turns=last, or data.thinking=false to learn the answers alone",
            )  # fmt: skip
        return self._rewritten_turn(messages[i], told[header_start:common], kept[start:], text, cursor, where)

    def _rewritten_turn(self, message: dict, header: str, body: str, text: str, cursor: int, where: str) -> _Turn:
        """Find an earlier turn's header and own text, reasoning left out, in the whole text."""
        own = body[reasoning_length(body, message) :]
        bare = {"content": split_reasoning(message)[1]}
        at = text.find(header + own, cursor)
        start, end = at + len(header), at + len(header) + len(own)
        if at < 0:  # perhaps an empty think block came in between
            first = text.find(own, cursor)
            at = text.rfind(header, cursor, max(first, cursor)) if own and header else -1
            start, end = first, first + len(own)
            if at >= 0 and inserted_length(text[at + len(header) : end], bare) != first - at - len(header):
                at = -1
        if at < 0:
            raise DataError(
                "the chat template rewrites an earlier assistant turn", where=where,
                why="its text cannot be found in the whole conversation", mend="set data.turns=last",
            )  # fmt: skip
        return _Turn(message, start, end)

    def _check_reasoning(self, turn: _Turn, text: str, where: str) -> None:
        reasoning = split_reasoning(turn.message)[0]
        if self.thinking and reasoning and reasoning not in text[turn.start : turn.end]:
            raise DataError(
                "the chat template drops the reasoning of this turn", where=where,
                why="it would be learnt without the reasoning that led to it",
                mend="use a template that prints it, or set data.thinking=false to learn the answers alone",
            )  # fmt: skip

    # --- tokens -------------------------------------------------------------------------------------------------

    def _mask(self, ids: list[int], spans: list[tuple[int, int]], text: str, turns: list[_Turn]) -> list[int]:
        """[T] 0 or 1 from the turns' characters."""
        mask = [0] * len(ids)
        special = set(self.tokenizer.all_special_ids) | _special_added(self.tokenizer)
        position = 0
        for turn in turns:
            start, end = turn.start, turn.start + len(text[turn.start : turn.end].rstrip())
            if not self.thinking:
                start += reasoning_length(text[start:end], turn.message)
            while position < len(ids) and spans[position][0] < start:
                position += 1
            while position < len(ids) and spans[position][0] < end:
                mask[position] = 1
                position += 1
            self._end_of_turn(ids, spans, mask, position, end, special)
        return mask

    @staticmethod
    def _end_of_turn(
        ids: list[int], spans: list[tuple[int, int]], mask: list[int], position: int, end: int, special: set[int]
    ) -> None:
        """Learn the end-of-turn token that follows directly on a turn marked without it."""
        ended = position > 0 and mask[position - 1] and ids[position - 1] in special
        if not ended and position < len(ids) and ids[position] in special and spans[position][0] == end:
            mask[position] = 1


def _common_length(a: str, b: str) -> int:
    """Length of the longest common start of two texts."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _special_added(tokenizer: Any) -> set[int]:
    return {i for i, token in getattr(tokenizer, "added_tokens_decoder", {}).items() if token.special}


def tokenizer_hash(tokenizer: Any) -> str:
    """SHA-256 of what decides a tokenizer's ids; the same for two loads of one folder, whatever padding is set."""
    if getattr(tokenizer, "is_fast", False):
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        return sha256_json({k: v for k, v in state.items() if k not in ("padding", "truncation")})
    added = {str(i): str(token) for i, token in getattr(tokenizer, "added_tokens_decoder", {}).items()}
    return sha256_json({"class": type(tokenizer).__name__, "vocab": tokenizer.get_vocab(), "added": added})
