"""Prompt sets: JSONL files of held-out conversations that end with a user's turn."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from eagle3.errors import DataError


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


def read_prompt_set(path: Path | str, max_prompts: int = 0) -> PromptSet:
    """Read `{"id", "messages", "tools"?}` lines; the set is named by the file's stem. `max_prompts` 0 = all.

    Raises:
        DataError: naming the file and line: missing file, not JSON, no messages, a repeated id, nothing inside.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as err:
        raise DataError(
            "cannot read the prompt set", where=str(path), why=str(err), mend="check eval.prompt_sets"
        ) from None
    prompts: list[Prompt] = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            prompts.append(_read_prompt(line, f"{path}, line {number}", number))
        if max_prompts and len(prompts) == max_prompts:
            break
    if not prompts:
        raise DataError("the prompt set is empty", where=str(path), mend="give it at least one prompt")
    if len({prompt.id for prompt in prompts}) != len(prompts):
        raise DataError("two prompts share an id", where=str(path), mend="give each prompt its own id")
    content = json.dumps([[prompt.messages, prompt.tools] for prompt in prompts], sort_keys=True)
    return PromptSet(path.stem, prompts, hashlib.sha256(content.encode()).hexdigest()[:16])


def read_prompt_sets(paths: list[str], max_prompts: int = 0) -> list[PromptSet]:
    """Read several sets (`read_prompt_set`).

    Raises:
        DataError: also when two files have the same stem, since sets are told apart by it.
    """
    sets = [read_prompt_set(path, max_prompts) for path in paths]
    names = [one.name for one in sets]
    for name in names:
        if names.count(name) > 1:
            raise DataError("two prompt sets share a name", why=f"{name!r}", mend="rename one of the files")
    return sets


def _read_prompt(line: str, where: str, number: int) -> Prompt:
    mend = 'write {"id": "...", "messages": [{"role": "user", "content": "..."}]} on one line'
    try:
        record = json.loads(line)
    except ValueError as err:
        raise DataError("not a JSON line", where=where, why=str(err), mend=mend) from None
    messages = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise DataError("a prompt without messages", where=where, mend=mend)
    if messages[-1]["role"] == "assistant":
        raise DataError("a prompt that ends with the assistant", where=where, mend="drop its last turn")
    return Prompt(str(record.get("id", number)), messages, record.get("tools"))


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
