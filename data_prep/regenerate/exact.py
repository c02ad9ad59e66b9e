"""Whether the target's tokenizer, given an answer's text, gives back the tokens that the target emitted.

It need not: a model may write a word in smaller pieces than its tokenizer would, and parsers and chat templates trim or
respell what was said. So the emitted tokens are kept where a server gives them, and `prepare` takes them; this counts
what that is worth.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from data_prep.conversations import to_conversation
from data_prep.render import Renderer
from eagle3.errors import RedraftError

SAMPLE = 1000  # answers looked at: the first ones
NAMED = 20
AFTER_THE_END = 2  # tokens that a template may put behind the end of a turn, such as a line break


class Retokenized:
    """Counts the answers whose rendered text gives other tokens.

    With token ids kept, the ids are compared. Without them, the number of tokens is compared with the server's count.

    Args:
        tokenizer: the target's; None = nothing is looked at.
        template_kwargs: of the chat template, as the server was given them.
    """

    def __init__(self, tokenizer: Any, template_kwargs: dict[str, Any]) -> None:
        self._renderer = None
        if tokenizer is not None:
            self._renderer = Renderer(
                tokenizer, turns="last", max_length=2**31 - 1, template_kwargs=template_kwargs
            )  # fmt: skip
        self.seen = self.refused = self.prompts_differ = self.answers_differ = self.by_count = 0
        self.ids: list[str] = []

    def add(self, record: dict[str, Any]) -> None:
        """Look at one record."""
        if self._renderer is None or self.seen + self.refused >= SAMPLE:
            return
        try:
            conversation = to_conversation(record, record["id"], "answers", f"answer {record['id']}")
            ids = self._renderer.render(replace(conversation, token_ids=None)).input_ids
        except RedraftError:
            self.refused += 1  # the prepare stage says why
            return
        self.seen += 1
        exact = record.get("token_ids")
        if exact:
            read, said = exact["prompt"], exact["answer"]
            prompt, answer = ids[: len(read)] != read, ids[len(read) : len(read) + len(said)] != said
        else:
            self.by_count += 1
            last = record["turns"][-1]["answer_tokens"] if record.get("turns") else record["answer_tokens"]
            prompt, answer = False, not 0 <= len(ids) - record["prompt_tokens"] - last <= AFTER_THE_END
        self.prompts_differ += prompt
        self.answers_differ += answer and not prompt
        if (prompt or answer) and len(self.ids) < NAMED:
            self.ids.append(record["id"])

    def figures(self) -> dict[str, Any]:
        """Counts, and a line of words; empty when nothing was looked at."""
        if not self.seen + self.refused:
            return {}
        line = f"{self.answers_differ} of {self.seen} answers give other tokens than the target emitted"
        if self.prompts_differ:
            line += f", {self.prompts_differ} prompts others than the server read"
        if self.by_count:
            line += f" ({self.by_count} judged by their number)"
        if self.refused:
            line += f"; {self.refused} cannot be rendered"
        return {
            "looked_at": self.seen, "answers_differ": self.answers_differ, "prompts_differ": self.prompts_differ,
            "judged_by_count": self.by_count, "refused": self.refused, "named": self.ids, "line": line,
        }  # fmt: skip
