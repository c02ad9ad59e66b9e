"""Prompt sets: held-out conversations that end with a user's turn, from JSON lines or in a benchmark's own form."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from eagle3.errors import DataError
from eval.prompt_sources import Source


@dataclass(frozen=True)
class Prompt:
    """One prompt: OpenAI-style messages, the last one from the user or a tool."""

    id: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class PromptSet:
    """Prompts measured together; `key` is a hash of their content, so that two runs can be compared."""

    name: str
    prompts: list[Prompt]
    key: str


def read_prompt_set(entry: Path | str, max_prompts: int = 0) -> PromptSet:
    """Read one entry of `eval.prompt_sets` (`eval.prompt_sources.Source`); the first `max_prompts`, 0 = all.

    A file without a set's name in front holds `{"id", "messages", "tools"?}` lines and is named by its stem.

    Raises:
        DataError: naming the file and line: missing file, not JSON, no messages, a repeated id, nothing inside.
    """
    source = Source.parse(str(entry))
    prompts: list[Prompt] = []
    for where, number, record in source.records():
        prompt = _prompt(source, record, where, number)
        if prompt is not None:
            prompts.append(prompt)
        if max_prompts and len(prompts) == max_prompts:
            break
    if not prompts:
        raise DataError("the prompt set is empty", where=source.entry, mend="give it at least one prompt")
    if len({prompt.id for prompt in prompts}) != len(prompts):
        raise DataError("two prompts share an id", where=source.entry, mend="give each prompt its own id")
    content = json.dumps([[prompt.messages, prompt.tools] for prompt in prompts], sort_keys=True)
    return PromptSet(source.name, prompts, hashlib.sha256(content.encode()).hexdigest()[:16])


def read_prompt_sets(entries: list[str], max_prompts: int = 0) -> list[PromptSet]:
    """Read several sets (`read_prompt_set`).

    Raises:
        DataError: also when two sets have the same name, since they are told apart by it.
    """
    sets = [read_prompt_set(entry, max_prompts) for entry in entries]
    names = [one.name for one in sets]
    for name in names:
        if names.count(name) > 1:
            raise DataError("two prompt sets share a name", why=f"{name!r}", mend="rename one of the files")
    return sets


def _prompt(source: Source, record: Any, where: str, number: int) -> Prompt | None:
    if source.benchmark is None:
        return _own_prompt(record, where, number, f"write {source.shape}")
    messages = source.benchmark.read(record, where)
    return None if messages is None else Prompt(source.benchmark.id_of(record, number), messages)


def _own_prompt(record: Any, where: str, number: int, mend: str) -> Prompt:
    messages = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise DataError("a prompt without messages", where=where, mend=mend)
    tools = record.get("tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        mend = "give OpenAI tool schemas, or leave `tools` out"
        raise DataError("tools are no list of schemas", where=where, mend=mend)
    if messages[-1]["role"] == "assistant":
        raise DataError("a prompt that ends with the assistant", where=where, mend="drop its last turn")
    return Prompt(str(record.get("id", number)), messages, tools)


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str)


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, template_kwargs: dict[str, Any] | None = None
) -> list[int]:
    """Token ids of the prompt under the target's chat template, up to where the answer begins.

    Raises:
        DataError: the template refuses the messages, or there is none.
    """
    try:
        ids: Any = tokenizer.apply_chat_template(
            prompt.messages,
            tools=prompt.tools,  # type: ignore[arg-type]
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            **(template_kwargs or {}),
        )
    except Exception as err:  # templates raise whatever they like
        raise DataError(
            "the chat template refuses a prompt", where=prompt.id, why=str(err), mend="mend the prompt or the template"
        ) from None
    return [int(token) for token in ids]
