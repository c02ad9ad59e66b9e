"""Well-known prompt sets, read in the form their authors publish: MT-bench, GSM8K, HumanEval, MATH-500.

Only the prompts are used: acceptance needs no right answers. The words around a question are ours, one wording a set.

| name | from | fields read |
|---|---|---|
| `mtbench` | FastChat's `question.jsonl` | `question_id`, `turns` (the hub's copies: `prompt_id`, `prompt`) |
| `mtbench2` | the same | second turns, after the `reference` answer to the first; questions without one are left out |
| `gsm8k` | openai/grade-school-math, `test.jsonl` | `question` |
| `humaneval` | openai/human-eval, `HumanEval.jsonl(.gz)` | `task_id`, `prompt` |
| `math500` | HuggingFaceH4/MATH-500, `test.jsonl` | `problem`, `unique_id` |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from eagle3.errors import DataError

Record = dict[str, Any]
Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Benchmark:
    """How one published set becomes prompts.

    Args:
        name: what stands before the colon in `eval.prompt_sets`.
        id_fields: the first of these that a record has names the prompt; without any it is its number.
        shape: what a record must hold, for error lines.
        messages: record -> messages ending with the user's turn; None leaves the record out.
        config: the hub dataset's configuration that holds the prompts.
        split: its split.
    """

    name: str
    id_fields: tuple[str, ...]
    shape: str
    messages: Callable[[Record], Messages | None]
    config: str | None = None
    split: str = "test"

    def read(self, record: Any, where: str) -> Messages | None:
        """Messages of one record, or None when the set leaves it out.

        Raises:
            DataError: the record is not of this set's form; `where` names it.
        """
        try:
            if not isinstance(record, dict):
                raise TypeError(f"found {type(record).__name__}")
            return self.messages(record)
        except (KeyError, TypeError, IndexError) as err:
            why = f"it has no {err}" if isinstance(err, KeyError) else str(err)
            raise DataError(
                f"not a record of {self.name}", where=where, why=why, mend=f"each must be {self.shape}"
            ) from None

    def id_of(self, record: Record, number: int) -> str:
        """The prompt's id."""
        return next((str(record[name]) for name in self.id_fields if record.get(name) is not None), str(number))


def _text(record: Record, field: str) -> str:
    value = record[field]
    if not isinstance(value, str) or not value.strip():
        raise TypeError(f"{field} is not a text")
    return value


def _texts(record: Record, *fields: str) -> list[str]:
    name = next((field for field in fields if field in record), fields[0])
    value = record[name]
    if not isinstance(value, list) or not value or not all(isinstance(one, str) and one.strip() for one in value):
        raise TypeError(f"{name} is not a list of texts")
    return value


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _mtbench(record: Record) -> Messages:
    return [_user(_texts(record, "turns", "prompt")[0])]


def _mtbench_second(record: Record) -> Messages | None:
    turns = _texts(record, "turns", "prompt")
    if len(turns) < 2 or not record.get("reference"):
        return None
    answer = _texts(record, "reference")[0]
    return [_user(turns[0]), {"role": "assistant", "content": answer}, _user(turns[1])]


def _gsm8k(record: Record) -> Messages:
    ask = "Work it out step by step. Finish with a line that reads 'Answer:' followed by the number alone."
    return [_user(f"{_text(record, 'question').strip()}\n\n{ask}")]


def _humaneval(record: Record) -> Messages:
    ask = "Write the body of this Python function. Answer with the whole function in one code block."
    return [_user(f"{ask}\n\n```python\n{_text(record, 'prompt').strip()}\n```")]


def _math500(record: Record) -> Messages:
    ask = "Solve this step by step, and write the final result inside \\boxed{}."
    return [_user(f"{_text(record, 'problem').strip()}\n\n{ask}")]


_MT_SHAPE = '{"question_id": ..., "category": "...", "turns": ["...", "..."]}'
BENCHMARKS = {
    one.name: one
    for one in (
        Benchmark("mtbench", ("question_id", "prompt_id"), _MT_SHAPE, _mtbench, split="train"),
        Benchmark("mtbench2", ("question_id", "prompt_id"), _MT_SHAPE, _mtbench_second, split="train"),
        Benchmark("gsm8k", (), '{"question": "...", "answer": "..."}', _gsm8k, config="main"),
        Benchmark("humaneval", ("task_id",), '{"task_id": "...", "prompt": "..."}', _humaneval),
        Benchmark("math500", ("unique_id",), '{"problem": "...", "answer": "...", "unique_id": "..."}', _math500),
    )
}
