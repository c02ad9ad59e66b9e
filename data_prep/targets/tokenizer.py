"""A small byte-level BPE tokenizer with a Kimi-like chat template, trained on the shipped corpus.

The template follows Kimi-K2.5's shape (`<|im_user|>user<|im_middle|>...<|im_end|>`): the answer opens with a thinking
block, `thinking=false` prefills it empty, thoughts of earlier turns are emptied up to the last assistant message that
calls no tool, and tool calls and results have sections of their own.
"""

from __future__ import annotations

from typing import Any

from data_prep.targets.corpus import read_corpus

SPECIAL = (
    "[BOS]",
    "[EOS]",
    "[PAD]",
    "<|im_end|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_system|>",
    "<|im_middle|>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
THINKING = ("<think>", "</think>")  # ordinary added tokens: decoding keeps them

CHAT_TEMPLATE = """\
{%- macro text(content) -%}
{%- if content is string -%}{{ content }}
{%- elif content is not none -%}{%- for part in content -%}{{ part['text'] }}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}
{%- if m['role'] == 'assistant' and not m.get('tool_calls') -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- if tools -%}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{%- endif -%}
{%- for m in messages -%}
{%- if m['role'] == 'user' -%}
<|im_user|>user<|im_middle|>{{ text(m['content']) }}<|im_end|>
{%- elif m['role'] == 'system' -%}
<|im_system|>system<|im_middle|>{{ text(m['content']) }}<|im_end|>
{%- elif m['role'] == 'tool' -%}
<|im_system|>tool<|im_middle|>## Return of {{ m['tool_call_id'] }}
{{ text(m['content']) }}<|im_end|>
{%- elif m['role'] == 'assistant' -%}
<|im_assistant|>assistant<|im_middle|><think>
{%- if loop.index0 > ns.last and thinking is not false -%}{{ m.get('reasoning_content') or '' }}{%- endif -%}
</think>{{ text(m.get('content')) }}
{%- if m.get('tool_calls') -%}
<|tool_calls_section_begin|>
{%- for call in m['tool_calls'] -%}
<|tool_call_begin|>{{ call['id'] }}<|tool_call_argument_begin|>
{%- set arguments = call['function']['arguments'] -%}
{%- if arguments is string -%}{{ arguments }}{%- else -%}{{ arguments | tojson }}{%- endif -%}
<|tool_call_end|>
{%- endfor -%}
<|tool_calls_section_end|>
{%- endif -%}
<|im_end|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_assistant|>assistant<|im_middle|><think>
{%- if thinking is defined and thinking is false -%}</think>{%- endif -%}
{%- endif -%}"""


def build_tokenizer(vocab_size: int, model_max_length: int) -> Any:
    """Train the tokenizer; the same `vocab_size` gives the same tokenizer, byte for byte.

    Args:
        vocab_size: tokens in all, at least 256 bytes + 15 special ones.
        model_max_length: longest sequence of the model it is for, in tokens.

    Returns:
        A `PreTrainedTokenizerFast`; ids 0.. are the special tokens, its end of turn is `<|im_end|>`.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        special_tokens=[*(AddedToken(t, special=True) for t in SPECIAL), *(AddedToken(t) for t in THINKING)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    texts = [message["content"] for conversation in read_corpus() for message in conversation]
    bpe.train_from_iterator([*texts, "user assistant system tool"], trainer=trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="[BOS]",
        eos_token="<|im_end|>",
        pad_token="[PAD]",
        model_max_length=model_max_length,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
