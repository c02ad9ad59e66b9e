"""A tokenizer shaped as Kimi-K2.5's, small: slow Python class, tiktoken ranks, reserved block, chat template.

What makes the real one awkward is kept: it loads through `trust_remote_code`, has no offset mapping, knows its special
tokens only from `added_tokens_decoder` in tokenizer_config.json, and holds 256 reserved ids after the base vocabulary,
named or not. The names and their places in that block are the real ones (`<|im_end|>` is the block's third token and
so on); the words of the base vocabulary are learnt from the corpus that ships with the tiny targets.
"""

from __future__ import annotations

import base64
import json
from functools import cache
from pathlib import Path
from shutil import copyfile
from typing import Any

from data_prep.targets.corpus import read_corpus

BASE_TOKENS = 1024
RESERVED_TOKENS = 256  # after the base vocabulary
TEMPLATE = Path(__file__).with_name("chat_template.jinja")
PYTHON = Path(__file__).with_name("tokenization_kimi.py")

# name -> (place in the reserved block, special: left out when decoding with skip_special_tokens)
NAMED = {
    "[BOS]": (0, True),
    "[EOS]": (1, True),
    "<|im_end|>": (2, True),
    "<|im_user|>": (3, True),
    "<|im_assistant|>": (4, True),
    "<|start_header_id|>": (6, True),
    "<|end_header_id|>": (7, True),
    "[EOT]": (9, True),
    "<|im_system|>": (10, True),
    "<|tool_calls_section_begin|>": (11, False),
    "<|tool_calls_section_end|>": (12, False),
    "<|tool_call_begin|>": (13, False),
    "<|tool_call_argument_begin|>": (14, False),
    "<|tool_call_end|>": (15, False),
    "<|im_middle|>": (17, True),
    "<|media_begin|>": (18, True),
    "<|media_content|>": (19, True),
    "<|media_end|>": (20, True),
    "<|media_pad|>": (21, True),
    "<think>": (22, False),
    "</think>": (23, False),
    "[UNK]": (254, True),
    "[PAD]": (255, True),
}
FURTHER_SPECIAL = (
    "<|im_end|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "[EOT]",
    "<|im_system|>",
    "<|im_middle|>",
)


def vocab_size() -> int:
    """Tokens in all, the reserved block included: the rows of the model's embedding."""
    return BASE_TOKENS + RESERVED_TOKENS


def token_id(name: str) -> int:
    """Id of a named token of the reserved block, for the model's config: `token_id("<|im_end|>")` ends a turn."""
    return BASE_TOKENS + NAMED[name][0]


def write_tokenizer(folder: Path) -> None:
    """Write tiktoken.model, tokenizer_config.json, tokenization_kimi.py and chat_template.jinja into `folder`.

    The same call writes the same bytes. Load it with
    `AutoTokenizer.from_pretrained(folder, trust_remote_code=True)`.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(_ranks()))
    (folder / "tiktoken.model").write_text("".join(lines), encoding="ascii")
    (folder / "tokenizer_config.json").write_text(json.dumps(_config(), indent=2) + "\n", encoding="utf-8")
    copyfile(PYTHON, folder / PYTHON.name)
    copyfile(TEMPLATE, folder / TEMPLATE.name)


def _config() -> dict[str, Any]:
    plain = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    added = {
        str(BASE_TOKENS + place): {"content": name, **plain, "special": special}
        for name, (place, special) in NAMED.items()
    }
    return {
        "added_tokens_decoder": added,
        "additional_special_tokens": list(FURTHER_SPECIAL),
        "bos_token": "[BOS]",
        "clean_up_tokenization_spaces": False,
        "eos_token": "[EOS]",
        "extra_special_tokens": {},
        "model_max_length": 1000000000000000019884624838656,
        "pad_token": "[PAD]",
        "tokenizer_class": "TikTokenTokenizer",
        "unk_token": "[UNK]",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
    }


@cache
def _ranks() -> tuple[bytes, ...]:
    """The base vocabulary in order of rank: the 256 bytes, then what the merges give."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=BASE_TOKENS + 64,  # some to spare: two merges may give one token
        show_progress=False,
        special_tokens=[],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    texts = [message["content"] for conversation in read_corpus() for message in conversation]
    bpe.train_from_iterator([*texts, "user assistant system tool"], trainer=trainer)
    to_byte = {letter: byte for byte, letter in bytes_to_unicode().items()}
    ranks = {bytes([byte]): None for byte in range(256)}
    for left, right in json.loads(bpe.to_str())["model"]["merges"]:
        ranks.setdefault(bytes(to_byte[letter] for letter in left + right), None)
    assert len(ranks) >= BASE_TOKENS
    return tuple(ranks)[:BASE_TOKENS]
