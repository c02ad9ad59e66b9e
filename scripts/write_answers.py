"""Let a target answer prompts itself, greedily: `python scripts/write_answers.py --target FOLDER --prompts P --out O`.

A draft must learn the target's own words, so training answers come from the target. Prompts and answers are JSON lines
of OpenAI messages. The run may be killed at any time: each finished batch is appended to `O.part` and fsynced, a rerun
does only the records that are missing, and `O` appears, in the order of the prompts, once all are there. Batches are
fixed by the prompts alone (sorted by length, cut every `--batch-size`), so a resumed run writes the same answers.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from eagle3.atomic import write_text
from eagle3.command_line import Parser, one_line_errors
from eagle3.errors import DataError


def read_prompts(path: Path) -> list[dict]:
    """Read `{"id", "messages"}` lines. Raises DataError naming file and line."""
    if not path.is_file():
        raise DataError("prompt file not found", where=str(path), mend="give an existing JSON lines file")
    prompts: list[dict] = []
    seen: set[str] = set()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as err:
        raise DataError("cannot read the prompts", where=str(path), why=str(err), mend="save it as UTF-8") from None
    for number, line in enumerate(lines, start=1):
        where = f"{path}, line {number}"
        try:
            prompt = json.loads(line)
        except (ValueError, RecursionError) as err:
            raise DataError("not a JSON line", where=where, why=str(err), mend="fix or remove the line") from None
        prompt = prompt if isinstance(prompt, dict) else {}
        good = isinstance(prompt.get("id"), str) and isinstance(prompt.get("messages"), list)
        turns = prompt["messages"] if good else []
        if not turns or not all(isinstance(one, dict) for one in turns) or turns[-1].get("role") == "assistant":
            mend = "give an id and messages that end with a user's turn"
            raise DataError("not a prompt", where=where, mend=mend)
        if prompt["id"] in seen:
            raise DataError("the same id twice", where=where, why=prompt["id"], mend="give each prompt its own id")
        seen.add(prompt["id"])
        prompts.append(prompt)
    return prompts


def read_part(path: Path) -> dict[str, dict]:
    """Answers of an earlier run by id; a torn last line (the run was killed in mid-write) is cut off the file."""
    if not path.exists():
        return {}
    raw = path.read_bytes()
    whole = raw[: raw.rfind(b"\n") + 1]
    if len(whole) < len(raw):
        with open(path, "r+b") as handle:
            handle.truncate(len(whole))
    records = [json.loads(line) for line in whole.decode("utf-8").splitlines()]
    return {record["id"]: record for record in records}


def append_lines(path: Path, records: list[dict]) -> None:
    """Append records as JSON lines and flush them to the disk."""
    with open(path, "a", encoding="utf-8") as handle:
        handle.write("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
        handle.flush()
        os.fsync(handle.fileno())


def plan_batches(lengths: list[int], size: int) -> Iterator[list[int]]:
    """Indices of the prompts, longest first, `size` at a time: little padding, and the memory peak comes first."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    for start in range(0, len(order), size):
        yield order[start : start + size]


class Answerer:
    """Greedy batched generation of one target (float32, left padding, stop at the end-of-turn token)."""

    def __init__(self, target: Path, max_new_tokens: int, device: str = "cpu") -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        if not (target / "config.json").is_file():
            raise DataError("target folder not found", where=str(target), mend="make it with scripts/make_target.py")
        self.torch = torch
        self.tokenizer: Any = AutoTokenizer.from_pretrained(target, local_files_only=True, trust_remote_code=False)
        self.tokenizer.padding_side = "left"
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, local_files_only=True)
        self.model: Any = model.to(torch.device(device)).eval()
        self.max_new_tokens = max_new_tokens
        stop = self.model.generation_config.eos_token_id
        listed = stop if isinstance(stop, list) else [stop]
        self.stop_ids = {i for i in [*listed, self.tokenizer.eos_token_id] if i is not None}

    def prompt_ids(self, messages: list[dict]) -> list[int]:
        """Token ids of the prompt, the generation prompt included."""
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def answer(self, prompts: list[list[int]]) -> list[tuple[str, int, str]]:
        """Answer a batch: (text, number of tokens with the end token, "stop" or "length") of each prompt."""
        batch = self.tokenizer.pad({"input_ids": prompts}, return_tensors="pt").to(self.model.device)
        with self.torch.inference_mode():
            out = self.model.generate(
                **batch,
                max_new_tokens=self.max_new_tokens,
                do_sample=False,
                num_beams=1,
                repetition_penalty=1.0,
                eos_token_id=sorted(self.stop_ids),
                pad_token_id=self.tokenizer.pad_token_id,
            )
        return [self._finish(row) for row in out[:, batch["input_ids"].shape[1] :].tolist()]

    def _finish(self, ids: list[int]) -> tuple[str, int, str]:
        end = next((i for i, token in enumerate(ids) if token in self.stop_ids), None)
        body = ids[: self.max_new_tokens] if end is None else ids[:end]
        text = self.tokenizer.decode(body, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        while text.endswith("\ufffd"):  # cut in the middle of a character
            body = body[:-1]
            text = self.tokenizer.decode(body, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text, len(body) + (end is not None), "length" if end is None else "stop"


def write_answers(prompts: list[dict], answerer: Any, out: Path, batch_size: int, say: Any = print) -> dict[str, int]:
    """Answer what `out` and `out.part` do not hold yet, then write `out`.

    Args:
        prompts: records with `id` and `messages`.
        answerer: has `prompt_ids(messages)` and `answer(list of ids)`, as Answerer.
        out: JSON lines of `{"id", "messages", "finish_reason", "answer_tokens"}`, in the order of the prompts.
        batch_size: prompts answered at once.
        say: takes one line of progress.

    Returns:
        Counts: records, answer_tokens, stopped (ended by the target itself), empty (left out: nothing was said).
    """
    part = out.with_name(out.name + ".part")
    done = read_part(part)
    ids = [answerer.prompt_ids(prompt["messages"]) for prompt in prompts]
    started, made = time.monotonic(), 0
    for batch in plan_batches([len(row) for row in ids], batch_size):
        missing = [i for i in batch if prompts[i]["id"] not in done]
        if not missing:
            continue
        answers = dict(zip(batch, answerer.answer([ids[i] for i in batch]), strict=True))
        records = [answered(prompts[i], *answers[i]) for i in missing]
        append_lines(part, records)
        done.update({record["id"]: record for record in records})
        made += sum(record["answer_tokens"] for record in records)
        rate = made / (time.monotonic() - started)
        say(f"{len(done)}/{len(prompts)} answers, {made} new tokens, {rate:.0f} tokens/s")
    records = [done[prompt["id"]] for prompt in prompts]
    kept = [record for record in records if record["messages"][-1]["content"].strip()]
    write_text(out, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in kept))
    part.unlink(missing_ok=True)
    return {
        "records": len(kept),
        "answer_tokens": sum(record["answer_tokens"] for record in kept),
        "stopped": sum(record["finish_reason"] == "stop" for record in kept),
        "empty": len(records) - len(kept),
    }


def answered(prompt: dict, text: str, tokens: int, finish: str) -> dict:
    """The prompt's record with the answer as its last message."""
    messages = [*prompt["messages"], {"role": "assistant", "content": text}]
    return {"id": prompt["id"], "messages": messages, "finish_reason": finish, "answer_tokens": tokens}


@one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry."""
    parser = Parser(
        prog="python scripts/write_answers.py",
        description="Answer prompts with a target, greedily. Killed at any time, the same command goes on.",
        examples="""
        python scripts/write_answers.py --target TARGET --prompts data/demo_prompts.jsonl --out answers.jsonl
        """,
    )
    parser.add_argument("--target", type=Path, required=True, help="Hugging Face folder of the target")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines with id and messages")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines with the answers")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="of one answer (128)")
    parser.add_argument("--batch-size", type=int, default=64, help="prompts answered together (64)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (cpu)")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 = torch's choice")
    args = parser.parse_args(argv)
    prompts = read_prompts(args.prompts)
    answerer = Answerer(args.target, args.max_new_tokens, args.device)
    if args.threads:
        answerer.torch.set_num_threads(args.threads)
    counts = write_answers(prompts, answerer, args.out, args.batch_size, lambda line: print(line, flush=True))
    print(f"{args.out}: {json.dumps(counts)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
