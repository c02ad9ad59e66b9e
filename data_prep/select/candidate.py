"""One raw record -> a conversation that may be chosen, with its labels, or the reason why it may not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from data_prep.conversations import ID_KEYS, to_conversation
from data_prep.select.config import SelectConfig, SourceConfig
from data_prep.select.language import detect
from data_prep.select.prints import TURN_BREAK, normalize
from data_prep.select.sources import Raw
from eagle3.atomic import sha256_json
from eagle3.errors import DataError


class LeftOut(Exception):
    """A sound record that the settings leave out; its text is the reason, the same for all of a kind."""


@dataclass(frozen=True)
class Candidate:
    """A conversation that may be chosen.

    Args:
        messages: what is asked; with the answer where answers are kept.
        tools: tool schemas, or None.
        turns: its user turns, normalized.
        domain, language: its labels.
        language_found: "set", "record", or "detected 0.93".
        sha256: of the source record, hex.
        given_id: the id that the record brought, or "".
        license: of the record.
    """

    messages: list[dict] = field(repr=False)
    tools: list | None = field(repr=False)
    turns: list[str] = field(repr=False)
    domain: str
    language: str
    language_found: str
    sha256: str
    given_id: str
    license: str

    @property
    def text(self) -> str:
        """What duplicates are found by: the user turns alone, for a system prompt may be shared by thousands."""
        return TURN_BREAK.join(self.turns)


Labels = tuple[str, str]
Accept = Callable[[str, str], str | None]


class Reader:
    """Turns records of one source into candidates.

    Args:
        cfg: the selection's settings.
        source: the source's.
        accept: says why a domain and a language are not wanted, or None.
    """

    def __init__(self, cfg: SelectConfig, source: SourceConfig, accept: Accept = lambda domain, language: None) -> None:
        self.cfg, self.source, self.accept = cfg, source, accept

    def read(self, raw: Raw) -> Candidate:
        """The candidate of a record.

        Raises:
            DataError: the record is bad; `where` names file and record.
            LeftOut: the settings leave it out.
        """
        if raw.error is not None:
            raise raw.error
        record = raw.record
        assert record is not None
        conv = to_conversation(record, "", self.source.name, raw.where)
        _check_unicode(conv.messages, raw.where)
        messages = self._asked(conv.messages)
        turns = [normalize(m["content"]) for m in messages if m["role"] == "user"]
        spoken = "\n".join(m["content"] for m in messages if m["role"] == "user")
        if len(spoken.strip()) < max(self.cfg.min_chars, 1):
            raise LeftOut("shorter than min_chars")
        domain = self._label(record, "domain", raw.where) or self.source.name
        language, found = self._language(record, spoken, raw.where)
        unwanted = self.accept(domain, language)
        if unwanted:
            raise LeftOut(unwanted)
        given = next((str(record[key]) for key in ID_KEYS if record.get(key) not in (None, "")), "")
        own = record.get("license")
        license_ = self.source.license or (own if isinstance(own, str) else "")
        return Candidate(messages, conv.tools, turns, domain, language, found, sha256_json(record), given, license_)

    def _asked(self, messages: list[dict]) -> list[dict]:
        """The messages to hand on: up to the last question, or with the answer to it."""
        asked = max((i for i, m in enumerate(messages) if m["role"] in ("user", "tool")), default=None)
        if asked is None or not any(m["role"] == "user" for m in messages[: asked + 1]):
            raise LeftOut("no user turn")
        if self.cfg.answers == "strip":
            return messages[: asked + 1]
        if messages[-1]["role"] != "assistant":
            raise LeftOut("no answer at its end")
        return messages

    def _label(self, record: dict, name: str, where: str) -> str:
        """What the record's own key says, else what the source's entry says."""
        key, constant = getattr(self.source, f"{name}_key"), getattr(self.source, name)
        value = record.get(key) if key else None
        if value in (None, ""):
            return str(constant)
        if not isinstance(value, str):
            raise DataError(f"`{key}` is no text", where=where, why=f"found {value!r}", mend="fix or drop the record")
        return value

    def _language(self, record: dict, spoken: str, where: str) -> tuple[str, str]:
        label = self._label(record, "language", where)
        if label != "auto":
            return label, "record" if self.source.language_key and record.get(self.source.language_key) else "set"
        code, sure = detect(spoken, self.cfg.language_confidence, tuple(self.cfg.detect_languages))
        return code, f"detected {sure:.2f}"


def _check_unicode(messages: list[dict], where: str) -> None:
    """Refuse text that JSON can escape but no tokenizer can read."""
    try:
        for message in messages:
            message["content"].encode("utf-8")
    except UnicodeEncodeError as err:
        why = f"half a surrogate pair at character {err.start}"
        raise DataError("text is not Unicode", where=where, why=why, mend="fix or drop the record") from None


class Ruler:
    """Measures conversations in the target's tokens.

    Args:
        tokenizer: the target's, with its chat template; None = estimated at 4 bytes of UTF-8 a token.
        answers: "strip": the prompt as the server sees it, up to where the answer begins; "keep": all of it.
        template_kwargs: further arguments of the chat template.
    """

    def __init__(self, tokenizer: Any, answers: str, template_kwargs: dict[str, Any]) -> None:
        self.tokenizer, self.prompt = tokenizer, answers == "strip"
        self.template_kwargs = template_kwargs

    @property
    def unit(self) -> str:
        """What the lengths are, for the report."""
        return "tokens" if self.tokenizer is not None else "estimated tokens (bytes / 4)"

    def render(self, one: Candidate, where: str) -> str:
        """The text that is counted. Raises DataError when the template refuses the messages."""
        if self.tokenizer is None:
            return "\n".join(str(message["content"]) for message in one.messages)
        try:
            text = self.tokenizer.apply_chat_template(
                one.messages, tools=one.tools, tokenize=False, add_generation_prompt=self.prompt, **self.template_kwargs
            )
        except Exception as err:  # a template may raise anything
            why = f"{type(err).__name__}: {err}"
            mend = "fix or drop the record"
            raise DataError("the chat template refuses the messages", where=where, why=why, mend=mend) from None
        return str(text)

    def lengths(self, texts: list[str]) -> list[int]:
        """Tokens of each rendered text."""
        if self.tokenizer is None:
            return [-(-len(text.encode("utf-8", "surrogatepass")) // 4) for text in texts]
        encoded = self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False)
        return [len(ids) for ids in encoded["input_ids"]]
