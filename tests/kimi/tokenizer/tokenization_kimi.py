"""Slow tokenizer over tiktoken ranks, in the shape of the class that Kimi-K2.5 ships; loaded by `trust_remote_code`."""

import json
import os
import shutil
from typing import ClassVar

import tiktoken
from tiktoken.load import load_tiktoken_bpe
from transformers import PreTrainedTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

RESERVED = 256  # ids after the base vocabulary, named by added_tokens_decoder or left in reserve
LONGEST_TEXT = 400_000  # characters that tiktoken takes at once
LONGEST_RUN = 25_000  # characters without a change between space and non-space that it takes at once
CASED = r"\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]"
SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{CASED}]*[\p{{Ll}}{CASED}]+{SUFFIX}",
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{CASED}]+[\p{{Ll}}{CASED}]*{SUFFIX}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


class TikTokenTokenizer(PreTrainedTokenizer):
    """Byte-pair ranks of `tiktoken.model`, and a block of reserved ids behind them."""

    vocab_files_names: ClassVar = {"vocab_file": "tiktoken.model"}
    model_input_names: ClassVar = ["input_ids", "attention_mask"]

    def __init__(
        self,
        vocab_file,
        bos_token="[BOS]",
        eos_token="[EOS]",
        unk_token="[UNK]",
        pad_token="[PAD]",
        additional_special_tokens=None,
        added_tokens_decoder=None,
        **kwargs,
    ):
        self.vocab_file = vocab_file
        ranks = load_tiktoken_bpe(vocab_file)
        named = {index: str(getattr(token, "content", token)) for index, token in (added_tokens_decoder or {}).items()}
        first = len(ranks)
        self.special_tokens = {
            named.get(index, f"<|reserved_token_{index}|>"): index for index in range(first, first + RESERVED)
        }
        self.model = tiktoken.Encoding(
            os.path.basename(vocab_file), pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=self.special_tokens
        )
        self.bos_id = self.special_tokens[str(bos_token)]
        self.eos_id = self.special_tokens[str(eos_token)]
        self.unk_id = self.special_tokens[str(unk_token)]
        self.pad_id = self.special_tokens[str(pad_token)]
        letters = bytes_to_unicode()
        self.byte_decoder = {letter: byte for byte, letter in letters.items()}
        self.decoder = {
            index: "".join(letters[byte] for byte in self.model.decode_single_token_bytes(index))
            for index in range(self.model.n_vocab)
        }
        self.encoder = {token: index for index, token in self.decoder.items()}
        super().__init__(
            bos_token=bos_token,
            eos_token=eos_token,
            unk_token=unk_token,
            pad_token=pad_token,
            additional_special_tokens=additional_special_tokens,
            added_tokens_decoder=added_tokens_decoder,
            **kwargs,
        )
        self.all_special_ids_set = set(self.all_special_ids)

    def encode(self, text, allow_special_tokens=True, **kwargs):
        """Ids of a text; the names of special tokens in it become these tokens unless `allow_special_tokens` is off."""
        if kwargs:
            return super().encode(text, **kwargs)
        choice = {"allowed_special": "all"} if allow_special_tokens else {"disallowed_special": ()}
        ids = []
        for start in range(0, len(text), LONGEST_TEXT):
            for piece in _short_runs(text[start : start + LONGEST_TEXT]):
                ids += self.model.encode(piece, **choice)
        return ids

    def decode(self, token_ids, **kwargs):
        """Text of one id or of a list of ids."""
        if kwargs:
            return super().decode(token_ids, **kwargs)
        return self.model.decode([token_ids] if isinstance(token_ids, int) else list(token_ids))

    @property
    def vocab_size(self):
        """Tokens in all, the reserved block included."""
        return self.model.n_vocab

    def get_vocab(self):
        """Tokens, spelt in byte letters, to ids."""
        return self.encoder

    def _tokenize(self, text, **kwargs):
        return [self.decoder[index] for index in self.encode(text)]

    def _convert_token_to_id(self, token):
        return self.encoder.get(token, self.unk_id)

    def _convert_id_to_token(self, index):
        return self.decoder.get(index)

    @staticmethod
    def clean_up_tokenization(out_string):
        """Leave decoded text as it is."""
        return out_string

    def convert_tokens_to_string(self, tokens):
        """Text of tokens spelt in byte letters."""
        return bytes(self.byte_decoder[letter] for letter in "".join(tokens)).decode("utf-8", "replace")

    def save_vocabulary(self, save_directory, filename_prefix=None):
        """Copy the ranks file."""
        name = (f"{filename_prefix}-" if filename_prefix else "") + self.vocab_files_names["vocab_file"]
        target = os.path.join(save_directory, name)
        if os.path.abspath(self.vocab_file) != os.path.abspath(target):
            shutil.copyfile(self.vocab_file, target)
        return (target,)

    def apply_chat_template(
        self, conversation, tools=None, tokenize=False, add_generation_prompt=True, thinking=True, **kwargs
    ):
        """As the base class, but for other defaults and for tools, which the template gets as TypeScript-like text."""
        if tools:
            tools = json.loads(json.dumps(tools, sort_keys=True))
            kwargs.setdefault("tools_ts_str", _declare(tools))
        return super().apply_chat_template(
            conversation,
            tools=tools,
            tokenize=tokenize,
            add_generation_prompt=add_generation_prompt,
            thinking=thinking,
            **kwargs,
        )


def _short_runs(text):
    """Cut a text so that no piece holds more than LONGEST_RUN characters between two changes of space and non-space."""
    start = run = 0
    space = text[:1].isspace()
    for place, letter in enumerate(text):
        if letter.isspace() != space:
            run, space = 1, not space
            continue
        run += 1
        if run > LONGEST_RUN:
            yield text[start:place]
            start, run = place, 1
    yield text[start:]


def _declare(tools):
    """Tool schemas as one TypeScript-like namespace of functions."""
    lines = ["# Tools", "", "## functions", "namespace functions {"]
    for function in (tool["function"] for tool in tools if tool.get("type", "function") == "function"):
        lines += [f"// {line}" for line in (function.get("description") or "").splitlines()]
        schema = function.get("parameters") or {}
        needed = set(schema.get("required") or [])
        fields = []
        for name, field in sorted((schema.get("properties") or {}).items(), key=lambda item: item[0] not in needed):
            fields += [f"  // {line}" for line in (field.get("description") or "").splitlines()]
            fields.append(f"  {name}{'' if name in needed else '?'}: {field.get('type', 'any')},")
        inner = ["{", *fields, "}"] if fields else ["{}"]
        inner = "\n".join(inner)
        lines.append(f"type {function['name']} = (_: {inner}) => any;")
    return "\n".join([*lines, "}", ""])
