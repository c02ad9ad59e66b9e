"""Small tokenizers and chat templates of several families, written for these tests."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIALS = ["<|im_start|>", "<|im_end|>", "<|end|>", "<think>", "</think>"]
TEXT = ["user assistant system tool the cat sat on the mat and why is the sky blue because light scatters"] * 4

CHATML = (
    "{% for m in messages %}"
    "{% if loop.first and m['role'] != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Reasoning is shown, or an empty block put in, only after the last user turn; earlier turns lose both.
REWRITING = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.index0 > ns.last %}"
    "<think>\n{{ m.get('reasoning_content', '') }}\n</think>\n\n{% endif %}"
    "{{ m['content'] }}"
    "{% for c in m.get('tool_calls', []) %}<call>{{ c['function']['arguments'] | tojson }}</call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The generation prompt opens the think block itself; a turn without reasoning closes it at once, in history too.
PREFILLING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}<think>{{ m.get('reasoning_content', '') }}</think>{% endif %}"
    "{{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
)
# The generation prompt opens the think block, but a turn without reasoning is shown without any.
OPENING = CHATML.replace(
    "{% if add_generation_prompt %}<|im_start|>assistant\n",
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n",
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration %}<|im_end|>"
    "{% else %}{{ m['content'] }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DROPPING = CHATML.replace("{{ m['content'] }}", "{{ m['content'].split('</think>')[-1] }}")


class Spelling:
    """A slow tokenizer's face on a fast one: no offsets, token ids and decoding alone."""

    is_fast = False

    def __init__(self, inner: PreTrainedTokenizerFast) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __call__(self, text: str, **kwargs: Any) -> Any:
        assert "return_offsets_mapping" not in kwargs
        return self.inner(text, **kwargs)


def make_tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of about 350 tokens with the given chat template."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=350, special_tokens=SPECIALS, initial_alphabet=alphabet)
    bpe.train_from_iterator(TEXT, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", bos_token="<|im_start|>")
    if template:
        tokenizer.chat_template = template
    return tokenizer
