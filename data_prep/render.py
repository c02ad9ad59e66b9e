"""Conversations -> token ids and the mask of what the draft shall learn, for any chat template.

The convention, stated once: `loss_mask[t]` is 1 iff token t itself is assistant text to be learnt (unshifted). Learnt
are the words of the assistant and the token that ends its turn; not learnt is all that the server or the template puts
there: the generation prompt, an empty think block, line breaks after the end-of-turn token.

A turn is learnt in the text that the server had before it (`turns.py`). Characters become tokens through offsets, or,
for tokenizers without them, through the special tokens at the borders (`offsets.py`); a token that straddles the start
of a turn belongs to the generation prompt and is not learnt. Where the chat template's markers are known (`markers.py`)
the mask is held against them. Where a record holds the very tokens of its last exchange, these are taken.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from data_prep.config import DataConfig
from data_prep.conversations import Conversation
from data_prep.markers import AUTO, find_markers
from data_prep.offsets import TextEncoder
from data_prep.reasoning import closing_tag
from data_prep.turns import ChatTemplate, NothingToLearnError, ServedTurn, TurnFinder, share_texts, turn_number
from eagle3.atomic import sha256_json
from eagle3.errors import DataError

__all__ = ["NothingToLearnError", "Refused", "Rendered", "Renderer", "tokenizer_hash"]

DROP = "drop the record, or leave it to be skipped"
FIRST_LEARNABLE = 2  # the draft at row t predicts token t + 2, so tokens 0 and 1 are never predicted


@dataclass(frozen=True)
class Rendered:
    """One text as tokens.

    Args:
        record_id: the conversation's; `<id>#<turn>` where it gives several records, named after their last turn.
        input_ids: [T] token ids.
        loss_mask: [T] 0 or 1; 1 = assistant text to be learnt, on the token itself (unshifted).
    """

    record_id: str
    input_ids: list[int] = field(repr=False)
    loss_mask: list[int] = field(repr=False)


@dataclass(frozen=True)
class Refused:
    """A record, or one turn, that gives nothing to learn."""

    record_id: str
    error: NothingToLearnError


class Renderer:
    """Renders conversations with one tokenizer's chat template.

    An assistant turn before the first user turn answers nothing that a server could be asked: it is context only.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template, fast or slow.
        thinking: learn the reasoning that a message itself holds; else it stays as context only.
        tools: learn turns that call tools; else they stay as context only.
        turns: "served": every assistant turn, in the text that the server had before it; turns that stand in one text
            share a record. "all": the same, refused where one text cannot hold them. "last": the last turn alone.
        max_length: tokens kept; the rest is cut off before it is judged whether anything is left to learn.
        template_kwargs: further arguments of the chat template, such as `{"thinking": False}`; those that a record
            says it was answered with go first.
        truncated: "keep" answers that were cut off, without an end of turn, or "skip" them.
        markers: the family of chat markers, "auto" or "none".
        exact_tokens: take the tokens of the last answer from the record where it holds what the server gave.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        thinking: bool = True,
        tools: bool = True,
        turns: str = "served",
        max_length: int = 2048,
        template_kwargs: dict[str, Any] | None = None,
        truncated: str = "keep",
        markers: str = AUTO,
        exact_tokens: bool = True,
    ) -> None:
        self.tokenizer = tokenizer
        self.thinking, self.tools, self.turns, self.max_length = thinking, tools, turns, max_length
        self.truncated, self.exact_tokens = truncated, exact_tokens
        self.template_kwargs = dict(template_kwargs or {})
        if not getattr(tokenizer, "chat_template", None):
            raise DataError(
                "tokenizer has no chat template", where=str(getattr(tokenizer, "name_or_path", "")),
                mend="put chat_template.jinja beside the target's tokenizer", page="rendering",
            )  # fmt: skip
        self._encoder = TextEncoder(tokenizer)
        template = ChatTemplate(tokenizer, self.template_kwargs)
        self._verbatim = template.keeps_argument_text()
        self._markers = find_markers(self._encoder, template.shown(), markers)
        self._special = {str(token) for token in tokenizer.all_special_tokens} | _special_added(tokenizer)

    @classmethod
    def of(cls, cfg: DataConfig, tokenizer: Any) -> Renderer:
        """The renderer that a configuration asks for."""
        return cls(
            tokenizer, thinking=cfg.thinking, tools=cfg.tools, turns=cfg.turns, max_length=cfg.max_length,
            template_kwargs=cfg.template_kwargs, truncated=cfg.truncated, markers=cfg.markers,
            exact_tokens=cfg.exact_tokens,
        )  # fmt: skip

    @property
    def tokenizer_hash(self) -> str:
        """SHA-256 of what decides the token ids: model, merges, normalizer, added tokens; not padding state."""
        return tokenizer_hash(self.tokenizer)

    @property
    def template_hash(self) -> str:
        """SHA-256 of the chat template and the arguments it is given."""
        return sha256_json({"template": self.tokenizer.chat_template, "kwargs": self.template_kwargs})

    @property
    def family(self) -> str:
        """Name of the family of chat markers that was found, or "none"."""
        return self._markers.family.name if self._markers else "none"

    def render(self, conv: Conversation) -> Rendered:
        """The one record of a conversation.

        Raises:
            NothingToLearnError: no token from position 2 on is to be learnt (within `max_length`).
            DataError: it gives several records, the template refuses the messages, or it drops text to be learnt.
        """
        found = self.records(conv)
        if len(found) > 1:
            raise DataError(
                "a conversation of several records",
                where=_where(conv),
                why=f"it gives {len(found)}",
                mend="ask for all of them with `records`",
            )
        if isinstance(found[0], Refused):
            raise found[0].error
        return found[0]

    def records(self, conv: Conversation) -> list[Rendered | Refused]:
        """Render one conversation; what comes after the last assistant turn is left off.

        Returns:
            At least one: the records in order of their last turns, or why there is nothing to learn.

        Raises:
            DataError: the template refuses the messages, it drops text that should be learnt, or, with turns "all", it
                shows an earlier turn otherwise than it was served.
        """
        where = _where(conv)
        conv = conv if self.exact_tokens else replace(conv, token_ids=None)
        try:
            wanted = self._wanted(conv, where)
        except NothingToLearnError as err:
            return [Refused(conv.record_id, err)]
        found: list[ServedTurn] = []
        refused: list[Rendered | Refused] = []
        finder = self._finder(conv)
        for i in wanted:
            try:
                found.append(finder.find(conv, i, f"{where}, message {i + 1}"))
            except NothingToLearnError as err:
                name = f"{conv.record_id}#{turn_number(conv.messages, i)}" if len(wanted) > 1 else conv.record_id
                refused.append(Refused(name, err))
        groups = share_texts(found)
        if self.turns == "all" and len(groups) > 1:
            raise DataError(
                "the chat template shows an earlier turn otherwise than it was served", where=where,
                why=f"turn {groups[0][-1].number} of the assistant does not stand in the whole text as it was written",
                mend="set data.turns=served to learn each turn as it was served, or last", page="rendering",
            )  # fmt: skip
        names = [f"{conv.record_id}#{group[-1].number}" if len(groups) > 1 else conv.record_id for group in groups]
        prompt = conv.token_ids["prompt"] if conv.token_ids else None
        return [self._rendered(name, group, prompt, where) for name, group in zip(names, groups, strict=True)] + refused

    def _finder(self, conv: Conversation) -> TurnFinder:
        template = ChatTemplate(self.tokenizer, {**self.template_kwargs, **conv.template_kwargs})
        family = self._markers.family if self._markers else None
        return TurnFinder(template, family, self._special, thinking=self.thinking, verbatim=self._verbatim)

    def _wanted(self, conv: Conversation, where: str) -> list[int]:
        """Numbers of the messages to be learnt."""
        messages = conv.messages
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not answers:
            raise NothingToLearnError(
                "nothing to learn", where=where, why="no assistant turn", mend=DROP, page="rendering"
            )
        asked = next((i for i, message in enumerate(messages) if message["role"] in ("user", "tool")), len(messages))
        checks = (
            (lambda i: i > asked, "the assistant answers no user turn"),
            (lambda i: self.turns != "last" or i == answers[-1], ""),
            (lambda i: self.tools or not messages[i].get("tool_calls"), "all its turns are tool calls"),
            (lambda i: not self._skips_cut(conv) or i != answers[-1], "its answer was cut off"),
            (lambda i: _says_something(messages[i]), "its answers are empty"),
        )
        wanted = answers
        for wants, why in checks:
            wanted = [i for i in wanted if wants(i)]
            if not wanted:
                raise NothingToLearnError("nothing to learn", where=where, why=why, mend=DROP, page="rendering")
        return wanted

    def _skips_cut(self, conv: Conversation) -> bool:
        return conv.truncated and self.truncated == "skip"

    def _rendered(
        self, record_id: str, turns: Sequence[ServedTurn], prompt: list[int] | None, where: str
    ) -> Rendered | Refused:
        """One record from the turns that stand in the text of the last of them."""
        placed = self._encoder.place(turns[-1].text, where)
        ids, mask = placed.ids, [0] * len(placed.ids)
        for turn in turns:
            first, last = placed.index(turn.start), placed.index(turn.end)
            mask[first:last] = [1] * (last - first)
        if turns[-1].answer:
            if ids != prompt:
                return _refused(record_id, where, "the server read other tokens than the chat template gives")
            if self._markers and self._markers.breaks(turns[-1].answer):
                return _refused(record_id, where, "the target wrote a marker of the chat into its answer")
            ids, mask = [*ids, *turns[-1].answer], mask + self._answer_mask(turns[-1])
        if self._markers:
            self._markers.check(ids, mask, where)
        kept = mask[: self.max_length]
        if not any(kept[FIRST_LEARNABLE:]):
            cut = len(mask) > self.max_length
            return _refused(record_id, where, f"no answer within {self.max_length} tokens" if cut else "empty answers")
        return Rendered(record_id, ids[: self.max_length], kept)

    def _answer_mask(self, turn: ServedTurn) -> list[int]:
        """[len(turn.answer)] 0 or 1 for tokens that the server gave; reasoning left out unless it is wanted."""
        tag = "" if self.thinking else closing_tag(turn.text)
        closing = self._encoder.encode(tag) if tag else []
        width = len(closing)
        ends = (t + width for t in range(len(turn.answer)) if list(turn.answer[t : t + width]) == closing)
        first = next(ends, len(turn.answer)) if tag else 0
        return [0] * first + [1] * (len(turn.answer) - first)


def _refused(record_id: str, where: str, why: str) -> Refused:
    mend = "raise data.max_length, or drop the record"
    return Refused(
        record_id, NothingToLearnError("nothing to learn", where=where, why=why, mend=mend, page="rendering")
    )


def _where(conv: Conversation) -> str:
    return f"{conv.source}, record {conv.record_id}"


def _says_something(message: dict) -> bool:
    texts = (message.get("content"), message.get("reasoning_content"), message.get("thinking"))
    return bool(message.get("tool_calls")) or any(isinstance(text, str) and text.strip() for text in texts)


def _special_added(tokenizer: Any) -> set[str]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {str(token) for token in added.values() if token.special}


def tokenizer_hash(tokenizer: Any) -> str:
    """SHA-256 of what decides a tokenizer's ids; the same for two loads of one folder, whatever padding is set."""
    if getattr(tokenizer, "is_fast", False):
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        return sha256_json({k: v for k, v in state.items() if k not in ("padding", "truncation")})
    added = {str(i): str(token) for i, token in getattr(tokenizer, "added_tokens_decoder", {}).items()}
    return sha256_json({"class": type(tokenizer).__name__, "vocab": tokenizer.get_vocab(), "added": added})
