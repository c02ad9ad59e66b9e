"""One conversation answered: turn after turn, each turn with the history as the target itself has written it."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass, replace
from typing import Any

from data_prep.regenerate.answer import Answer, read_answer
from data_prep.regenerate.client import ChatClient, FailedError
from data_prep.regenerate.config import RegenerateConfig
from data_prep.regenerate.facts import ServerFacts, ask_prefill, read_back
from data_prep.regenerate.sampling import Sampling, seed_of
from data_prep.regenerate.source import ASKING, Asked, asking_lengths, for_request
from data_prep.regenerate.thinking import Prefill, closes, split_text
from eagle3.repetition import is_looping, words


@dataclass(frozen=True)
class Turn:
    """What is kept of each answer beside its text."""

    message: int  # its place in `messages`
    finish_reason: str
    answer_tokens: int
    prompt_tokens: int
    looping: bool


class Dialogues:
    """Answers conversations through one server.

    Args:
        client: of the server.
        facts: what it says of itself.
        cfg: the configuration.
        sampling: every value that is sent.
    """

    def __init__(self, client: ChatClient, facts: ServerFacts, cfg: RegenerateConfig, sampling: Sampling) -> None:
        self._client, self._facts, self._cfg, self._sampling = client, facts, cfg, sampling
        self._prefill_lock, self._prefill_known = asyncio.Lock(), False

    async def answer(self, asked: Asked) -> dict[str, Any]:
        """The record with the target's own answers in place of those it held.

        Raises:
            FailedError: no answer to one of its turns; the record is not kept.
        """
        lengths = asking_lengths(asked.messages, self._cfg.turns)
        if not lengths:
            raise FailedError("it does not end with a user or tool message to be answered", "request")
        messages, turns, ended = await self._talk(asked, lengths)
        last = turns[-1][1]
        record = {
            **asked.record,
            "id": asked.id,
            "messages": messages,
            "finish_reason": last.finish_reason,
            "truncated": last.truncated,
            "answer_tokens": sum(turn.answer_tokens for turn, _ in turns),
            "prompt_tokens": last.prompt_tokens,
            "looping": any(turn.looping for turn, _ in turns),
            "generation": self._generation(asked, len(turns) - 1, last),
        }
        record.pop("token_ids", None)
        if self._cfg.turns == "all":
            record["turns"] = [asdict(turn) for turn, _ in turns]
            record |= {"ended_early": ended} if ended else {}
        if self._cfg.keep_token_ids and last.prompt_ids and last.answer_ids:
            record["token_ids"] = {"prompt": last.prompt_ids, "answer": last.answer_ids}
        return record

    async def _talk(self, asked: Asked, lengths: list[int]) -> tuple[list[dict], list[tuple[Turn, Answer]], str]:
        """(messages, turns with their answers, why it ended before its last turn or "")."""
        history: list[dict] = list(asked.messages[: lengths[0]])
        turns: list[tuple[Turn, Answer]] = []
        for number, length in enumerate(lengths):
            answer = await self._ask(asked, history, number)
            turns.append((_turn(len(history), answer), answer))
            history.append(answer.message)
            if number + 1 == len(lengths):
                break
            if ended := _cannot_go_on(answer, asked.messages[length:]):
                return history, turns, ended
            between = asked.messages[length : lengths[number + 1]]
            history += [message for message in between if message["role"] != "assistant"]
        return history, turns, ""

    async def _ask(self, asked: Asked, history: list[dict], turn: int) -> Answer:
        body: dict[str, Any] = {
            "model": self._facts.model,
            "messages": for_request(history),
            "max_tokens": self._cfg.max_tokens,
            **self._sampling.values,
            # The tags of reasoning may be special tokens; the token that ends the turn is left out all the same.
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "return_token_ids": True,
        }
        if not self._sampling.greedy:
            body["seed"] = seed_of(self._cfg.seed, asked.id, turn)
        kwargs = dict(self._cfg.chat_template_kwargs)
        if self._facts.engine == "sglang":
            kwargs["spaces_between_special_tokens"] = False  # where SGLang reads it (protocol.py, to_sampling_params)
        if kwargs:
            body["chat_template_kwargs"] = kwargs
        if asked.tools:
            body |= {"tools": asked.tools, "tool_choice": "auto"}
        return await self._told_apart(await self._client.ask("POST", "/v1/chat/completions", body, read_answer))

    async def _told_apart(self, answer: Answer) -> Answer:
        """The answer with its reasoning apart, whether the server did it or not."""
        content = answer.message["content"]
        if "reasoning_content" in answer.message or self._facts.reasoning_parser or not content:
            return answer
        prefill = await self._prefill(answer)
        if prefill is Prefill.OPEN and not closes(content) and await self._closed_unseen(answer):
            return answer
        reasoning, rest = split_text(content, prefill)
        if not reasoning:
            return replace(answer, message={**answer.message, "content": rest})
        return replace(answer, message={**answer.message, "content": rest, "reasoning_content": reasoning})

    async def _closed_unseen(self, answer: Answer) -> bool:
        """Whether the tag that ends the reasoning was emitted, and a parser took it out with no reasoning before it.

        SGLang says whether it has a parser; of another server the tokens tell.
        """
        if self._facts.engine == "sglang" or not answer.answer_ids:
            return False
        emitted = await read_back(self._client, self._facts.model, answer.answer_ids)
        return emitted is not None and closes(emitted)

    async def _prefill(self, answer: Answer) -> Prefill:
        """How this run's prompts end: asked once, with the first answer that hangs on it."""
        async with self._prefill_lock:
            if not self._prefill_known and answer.prompt_ids:
                self._facts.prefill = await ask_prefill(self._client, self._facts.model, answer.prompt_ids)
                self._prefill_known = True
        return self._facts.prefill

    def _generation(self, asked: Asked, turn: int, last: Answer) -> dict[str, Any]:
        """How the last answer came about, as sent."""
        made: dict[str, Any] = {
            "model": last.model or self._facts.model,
            "engine": self._facts.label,
            **self._sampling.values,
        }
        made["max_tokens"] = self._cfg.max_tokens
        if not self._sampling.greedy:
            made["seed"] = seed_of(self._cfg.seed, asked.id, turn)
        if self._cfg.chat_template_kwargs:
            made["template_kwargs"] = self._cfg.chat_template_kwargs
        return made


def _turn(place: int, answer: Answer) -> Turn:
    said = answer.message
    tokens = answer.answer_ids or words(f"{said.get('reasoning_content') or ''} {said['content']}")
    return Turn(place, answer.finish_reason, answer.answer_tokens, answer.prompt_tokens, is_looping(tokens))


def _cannot_go_on(answer: Answer, following: list[dict]) -> str:
    """Why the conversation cannot go on after this answer as its source did, or ""."""
    if answer.truncated:
        return "the answer was cut off at the token limit"
    if answer.empty:
        return "the answer is empty"
    follower = next((m["role"] for m in following if m["role"] in ASKING), "")
    if answer.message.get("tool_calls"):
        return "the target called a tool, and the source holds no result of that call"
    return "the source goes on with the result of a call that the target did not make" if follower == "tool" else ""
