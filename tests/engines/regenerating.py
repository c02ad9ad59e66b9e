"""A tiny target that talks as Kimi-K2.5 does, and what every server of it must give the regeneration."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from kimi.tokenizer import token_id, vocab_size, write_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from data_prep.conversations import read_conversations
from data_prep.regenerate.config import RegenerateConfig
from data_prep.regenerate.run import regenerate
from data_prep.render import Renderer
from data_prep.targets.portable import make_portable
from eagle3.atomic import read_json, write_json

TOKENS, RECORDS = 20, 6
ROUNDING = 1e-3  # two logits this close may swap places between two implementations
PARSERS = ["--reasoning-parser=kimi_k2", "--tool-call-parser=kimi_k2"]
TOOL = {
    "type": "function",
    "function": {
        "name": "tide",
        "description": "Height of the tide.",
        "parameters": {"type": "object", "properties": {"hour": {"type": "integer"}}, "required": ["hour"]},
    },
}


def make_target(path: Path) -> Path:
    """Write a random Llama in float32 behind Kimi's kind of tokenizer and template; some of its greedy answers end."""
    config = LlamaConfig(
        vocab_size=vocab_size(), hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=1024, initializer_range=0.08, bos_token_id=None,
        eos_token_id=token_id("<|im_end|>"), tie_word_embeddings=False,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).float()
        head = model.lm_head.weight
        with torch.no_grad():  # now and then a turn ends, and thoughts end where another word would have come
            head[token_id("<|im_end|>")] *= 1.6
            head[token_id("</think>")] = 1.05 * head[527]
    model.save_pretrained(path)
    write_tokenizer(path)
    make_portable(path)
    served = {"eos_token_id": token_id("<|im_end|>"), "temperature": 0.6, "top_p": 0.95}
    write_json(path / "generation_config.json", served)
    return path


def write_source(path: Path) -> Path:
    """Conversations that hold somebody else's answers; the last offers a tool."""
    with open(path, "w", encoding="utf-8") as lines:
        for i in range(RECORDS):
            messages = [
                {"role": "user", "content": f"Tell me of boats and tea, {i} times, 茶."},
                {"role": "assistant", "content": "No."},
            ]
            record = {"id": f"r{i}", "messages": messages, "domain": "chat", "language": "en"}
            lines.write(json.dumps(record | ({"tools": [TOOL]} if i == RECORDS - 1 else {})) + "\n")
    return path


@dataclass
class Reference:
    """The same target in this process."""

    target: Path

    def __post_init__(self) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(self.target, trust_remote_code=True, local_files_only=True)
        self.model: Any = AutoModelForCausalLM.from_pretrained(self.target, dtype=torch.float32, local_files_only=True)

    def prompt(self, record: dict[str, Any], **kwargs: Any) -> list[int]:
        """Tokens before the last answer."""
        text = self.tokenizer.apply_chat_template(
            record["messages"][:-1], tools=record.get("tools"), tokenize=False, add_generation_prompt=True, **kwargs
        )
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    @torch.inference_mode()
    def greedy(self, prompt: list[int]) -> list[int]:
        """The likeliest continuation, to the end of the turn or the token limit."""
        ids = list(prompt)
        while len(ids) < len(prompt) + TOKENS and ids[-1] != token_id("<|im_end|>"):
            ids.append(int(self.model(torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(prompt) :]

    @torch.inference_mode()
    def tie_at(self, prompt: list[int], made: list[int], expected: list[int]) -> bool:
        """Whether two continuations part where the first two logits tie."""
        place = next((k for k, (a, b) in enumerate(zip(made, expected, strict=False)) if a != b), None)
        if place is None:
            return False
        first = self.model(torch.tensor([[*prompt, *expected[:place]]])).logits[0, -1].topk(2).values
        return bool(first[0] - first[1] < ROUNDING)


def read_answers(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "answers.jsonl").read_bytes().splitlines()]


def check_greedy(url: str, reference: Reference, work: Path, tags_dropped: bool = False) -> dict[str, Any]:
    """With reasoning, greedily: the answers are the target's own token for token, and `prepare` learns them."""
    cfg = RegenerateConfig(concurrency=4, max_tokens=TOKENS, temperature=0.0, thinking=True)
    report = regenerate(cfg, write_source(work / "s.jsonl"), work / "greedy", url, tokenizer=reference.tokenizer)
    answers = read_answers(work / "greedy")
    assert [one["id"] for one in answers] == [f"r{i}" for i in range(RECORDS)]
    for one in answers:
        ids = one["token_ids"]
        assert ids["prompt"] == reference.prompt(one, thinking=True)
        expected = reference.greedy(ids["prompt"])
        assert ids["answer"] == expected or reference.tie_at(ids["prompt"], ids["answer"], expected)
        assert one["answer_tokens"] == len(ids["answer"]) and one["prompt_tokens"] == len(ids["prompt"])
        check_text(one, reference, tags_dropped)
    assert {one["finish_reason"] for one in answers} == {"stop", "length"}  # else half of this was not shown
    renderer = Renderer(reference.tokenizer, turns="last", max_length=4096)
    for conversation, one in zip(read_conversations([str(work / "greedy" / "answers.jsonl")]), answers, strict=True):
        rendered = renderer.render(conversation)
        prompt, answer = one["token_ids"]["prompt"], one["token_ids"]["answer"]
        assert rendered.input_ids[: len(prompt) + len(answer)] == prompt + answer
        assert rendered.loss_mask[: len(prompt)] == [0] * len(prompt)
        assert rendered.loss_mask[len(prompt) : len(prompt) + len(answer)] == [1] * len(answer)
    return report


def check_text(one: dict[str, Any], reference: Reference, tags_dropped: bool) -> None:
    """Reasoning and answer together are what the tokens spell, nothing lost and nothing doubled (white space aside).

    `tags_dropped`: the server's parser takes every further `</think>` out of the answer, as vLLM 0.32's does.
    """
    ids = [i for i in one["token_ids"]["answer"] if i != token_id("<|im_end|>")]
    text = reference.tokenizer.decode(ids, skip_special_tokens=False)
    last = one["messages"][-1]
    thoughts, _, rest = text.partition("</think>")
    assert squeezed(last.get("reasoning_content") or "") == squeezed(thoughts)
    rest = rest.replace("</think>", "") if tags_dropped else rest
    assert squeezed(last["content"]) == squeezed(rest)


def squeezed(text: str) -> str:
    """A text without white space, and without the half characters that engines hold back or show as one sign."""
    return "".join(text.split()).replace("\ufffd", "")


def check_sampled(url: str, reference: Reference, work: Path) -> None:
    """Without reasoning, sampled as served: the model's own settings are sent, and the text is an answer."""
    cfg = RegenerateConfig(concurrency=4, max_tokens=TOKENS, thinking=False)
    report = regenerate(cfg, write_source(work / "s.jsonl"), work / "sampled", url)
    used = {"temperature": 0.6, "top_p": 0.95, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    assert report["sampling"] == used and report["sampling_from"]["temperature"] == "generation_config.json"
    for one in read_answers(work / "sampled"):
        assert one["token_ids"]["prompt"] == reference.prompt(one, thinking=False)
        assert "reasoning_content" not in one["messages"][-1]
        assert {name: one["generation"][name] for name in used} == used and "seed" in one["generation"]
    assert read_json(work / "sampled" / "report.json")["answers"] == report["answers"]
