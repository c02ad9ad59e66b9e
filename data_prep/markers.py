"""Families of chat markers: the tokens with which a template opens and ends messages, known by name.

A family says what an assistant's turn looks like in *ids*: it follows on the assistant's opening and runs to the token
that ends it, with no other message's opening in between. So a loss mask can be checked without offsets, and a template
that shows history otherwise than it was served can still be taken apart. Ids are looked up in the tokenizer; the table
holds names alone. Sources: the chat templates that the models ship.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from data_prep.offsets import TextEncoder
from eagle3.errors import DataError

AUTO, NONE = "auto", "none"


@dataclass(frozen=True)
class Family:
    """How one family of chat templates marks messages.

    Args:
        name: as `data.markers` names it.
        openings: tokens that open a message.
        assistant: text that opens a message of the assistant; it starts with one of `openings`.
        end: token that ends the assistant's turn; the model writes it itself.
        parts: further tokens of structure, which no message's own text may hold.
    """

    name: str
    openings: tuple[str, ...]
    assistant: str
    end: str
    parts: tuple[str, ...] = ()

    @property
    def needed(self) -> tuple[str, ...]:
        """Tokens without which a tokenizer is not of this family."""
        return (*self.openings, self.end)

    def held(self, text: str) -> str:
        """The first name of a token of structure in a text, or ""."""
        return next((name for name in (*self.needed, *self.parts) if name in text), "")


FAMILIES = (
    Family(
        "kimi",
        ("<|im_user|>", "<|im_assistant|>", "<|im_system|>"),
        "<|im_assistant|>",
        "<|im_end|>",
        (
            "<|im_middle|>",
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            "<|media_begin|>",
            "<|media_content|>",
            "<|media_pad|>",
            "<|media_end|>",
        ),
    ),
    Family("chatml", ("<|im_start|>",), "<|im_start|>assistant", "<|im_end|>"),
    Family(
        "llama3",
        ("<|start_header_id|>",),
        "<|start_header_id|>assistant<|end_header_id|>",
        "<|eot_id|>",
        ("<|end_header_id|>", "<|eom_id|>"),
    ),
    Family("gemma", ("<start_of_turn>",), "<start_of_turn>model", "<end_of_turn>"),
    Family("phi3", ("<|user|>", "<|assistant|>", "<|system|>"), "<|assistant|>", "<|end|>"),
    Family(
        "granite",
        ("<|start_of_role|>",),
        "<|start_of_role|>assistant<|end_of_role|>",
        "<|end_of_text|>",
        ("<|end_of_role|>",),
    ),
)
CHOICES = (AUTO, NONE, *(family.name for family in FAMILIES))


@dataclass(frozen=True)
class Markers:
    """A family as one tokenizer has it.

    Args:
        family: the names.
        openings: ids of the tokens that open a message.
        assistant: ids of the assistant's opening.
        end: id of the end of turn.
    """

    family: Family
    openings: frozenset[int]
    assistant: tuple[int, ...]
    end: int

    @classmethod
    def of(cls, family: Family, encoder: TextEncoder, shown: str) -> Markers | None:
        """None where the tokenizer lacks one of the tokens, or encodes the assistant's opening otherwise in a chat."""
        ids = [encoder.encode(name) for name in family.needed]
        if any(len(one) != 1 for one in ids):
            return None
        *openings, end = (one[0] for one in ids)
        assistant, chat = encoder.encode(family.assistant), encoder.encode(shown)
        if not any(chat[t : t + len(assistant)] == assistant for t in range(len(chat))):
            return None
        return cls(family, frozenset(openings), tuple(assistant), end)

    def breaks(self, answer: Sequence[int]) -> bool:
        """Whether an answer opens a message, or goes on after an end of turn: the target lost the thread."""
        return any(token in self.openings for token in answer) or self.end in answer[:-1]

    def check(self, input_ids: Sequence[int], loss_mask: Sequence[int], where: str) -> None:
        """Hold a mask against the ids: what is learnt stands in turns of the assistant, and ends with them.

        Raises:
            DataError: a learnt token stands in another's message, or goes on after an end of turn.
        """
        inside = False  # a turn of the assistant, from its opening to its end
        for t, token in enumerate(input_ids):
            if token in self.openings:
                inside = tuple(input_ids[t : t + len(self.assistant)]) == self.assistant
            if loss_mask[t] and (not inside or token in self.openings):
                raise DataError(
                    "the loss mask leaves the assistant's turn", where=where,
                    why=f"token {t} of the record is learnt, but stands in no turn that {self.family.name} markers "
                    "give to the assistant", mend="set data.markers to the family of this template, or to none",
                    page="rendering",
                )  # fmt: skip
            if token == self.end:
                inside = False


def find_markers(encoder: TextEncoder, shown: str, choice: str = AUTO) -> Markers | None:
    """The one family whose tokens the tokenizer has and the chat template writes.

    Args:
        encoder: the tokenizer's.
        shown: a conversation of a user's and an assistant's turn as the template shows it.
        choice: "auto", "none" or the name of a family (`data.markers`).

    Returns:
        None where no family matches: turns are then found by comparing rendered texts alone.

    Raises:
        DataError: several families match, or the one asked for does not.
    """
    if choice == NONE:
        return None
    found = []
    for family in FAMILIES:
        if choice in (AUTO, family.name) and family.assistant in shown and family.end in shown:
            markers = Markers.of(family, encoder, shown)
            found += [markers] if markers else []
    where = str(getattr(encoder.tokenizer, "name_or_path", ""))
    if len(found) > 1:
        names = ", ".join(markers.family.name for markers in found)
        raise DataError(
            "the chat template writes markers of several families", where=where, why=f"{names} match",
            mend="set data.markers to the one that marks turns",
        )  # fmt: skip
    if not found and choice != AUTO:
        raise DataError(
            "the chat template does not write these markers", where=where, why=f"data.markers is {choice}",
            mend="set data.markers=auto", page="rendering",
        )  # fmt: skip
    return found[0] if found else None
