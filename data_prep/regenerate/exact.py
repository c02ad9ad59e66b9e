"""Whether the target's tokenizer, given an answer's text, gives back the tokens that the target emitted.

It need not: a model may write a word in smaller pieces than its tokenizer would, and a chat template drops or trims
what the text says (reasoning of earlier turns, white space around it, the missing end of an answer that was cut off).
"""

from __future__ import annotations

from typing import Any

from data_prep.conversations import to_conversation

SAMPLE = 1000  # answers looked at; the first ones
NAMED = 20


class Retokenized:
    """Counts the answers whose rendered text gives other tokens.

    With token ids kept, the ids are compared, and the prompt's apart from the answer's. Without them, the number of
    tokens is compared with what the server counted.

    Args:
        tokenizer: the target's; None = nothing is looked at.
        template_kwargs: of the chat template, as the server was given them.
    """

    def __init__(self, tokenizer: Any, template_kwargs: dict[str, Any]) -> None:
        self._tokenizer, self._kwargs = tokenizer, template_kwargs
        self.seen = self.answers_differ = self.prompts_differ = self.by_count = 0
        self.ids: list[str] = []

    def add(self, record: dict[str, Any]) -> None:
        """Look at one record."""
        if self._tokenizer is None or self.seen >= SAMPLE or not getattr(self._tokenizer, "chat_template", None):
            return
        messages, tools = decoded(record["messages"]), record.get("tools") or None
        try:
            prompt = self._rendered(messages[:-1], tools, True)
            whole = self._rendered(messages, tools, False)
        except Exception:  # a template may raise anything; `prepare` names the record and why
            return
        self.seen += 1
        exact = record.get("token_ids")
        if exact:
            self.prompts_differ += prompt != exact["prompt"]
            end = exact["answer"] if not record["truncated"] else exact["answer"][:-1]
            differs = whole[len(prompt) : len(prompt) + len(end)] != end
        else:
            self.by_count += 1
            self.prompts_differ += len(prompt) != record["prompt_tokens"]
            last = record["turns"][-1]["answer_tokens"] if record.get("turns") else record["answer_tokens"]
            differs = not 0 <= len(whole) - len(prompt) - last <= 2  # line breaks may follow the end of the turn
        self.answers_differ += differs
        if differs and len(self.ids) < NAMED:
            self.ids.append(record["id"])

    def _rendered(self, messages: list[dict], tools: Any, prompt: bool) -> list[int]:
        text = self._tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=prompt, **self._kwargs
        )
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def figures(self) -> dict[str, Any]:
        """Counts, and a line of words; empty when nothing was looked at."""
        if not self.seen:
            return {}
        line = f"{self.answers_differ} of {self.seen} answers give other tokens than the target emitted"
        if self.prompts_differ:
            line += f", {self.prompts_differ} prompts other tokens than the server read"
        if self.by_count:
            line += f" (judged by their number for {self.by_count})"
        return {
            "looked_at": self.seen, "answers_differ": self.answers_differ, "prompts_differ": self.prompts_differ,
            "judged_by_count": self.by_count, "named": self.ids, "line": line,
        }  # fmt: skip


def decoded(messages: list[dict]) -> list[dict]:
    """Messages as chat templates take them: arguments of tool calls as objects."""
    return to_conversation({"messages": messages}, "", "", "answer").messages
