"""Tiny random models shared by the eval tests: real Llama targets and real drafts."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from eagle3.draft import DraftShape, Eagle3Draft
from eagle3.wiring import Site, Wiring

HIDDEN, LAYERS = 16, 8


def scramble(model: torch.nn.Module) -> None:
    """Weights wide enough that the text wanders instead of repeating one token."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.5)


def make_target(vocab: int, eos: int | None = None, layers: int = LAYERS) -> LlamaForCausalLM:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=HIDDEN,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=None,
    )
    target = LlamaForCausalLM(config).double().eval()  # float64: no token hangs on rounding
    scramble(target)
    return target


def make_shape(vocab: int, draft_vocab: int) -> DraftShape:
    rope = {"rope_theta": 10000.0, "rope_scaling": None}
    return DraftShape(HIDDEN, 32, 4, 2, 4, vocab, draft_vocab, 3, 1e-6, rope, 256)


def fill(draft: Eagle3Draft, target: LlamaForCausalLM, ids: list[int] | None = None) -> Eagle3Draft:
    torch.manual_seed(2)
    scramble(draft)
    draft.embed_tokens.weight.data.copy_(target.get_input_embeddings().weight)
    if ids is not None:
        draft.d2t.copy_(torch.tensor(ids) - torch.arange(len(ids)))
    return draft.double().eval()


def make_wiring(*sites: int, layers: int = LAYERS) -> Wiring:
    return Wiring(tuple(Site(k) for k in sites), "final", "llama", layers, HIDDEN)


class ToldDraft(Eagle3Draft):
    """A draft that knows the text x, except at the places in `wrong`, where it proposes another token."""

    text: list[int]
    wrong: frozenset[int]
    _place = 0

    def serve_step(self, hidden, token_ids, positions, cache):  # type: ignore[no-untyped-def]
        self._place = int(positions[-1]) + 2  # row t predicts x[t + 2]
        return super().serve_step(hidden, token_ids, positions, cache)

    def logits(self, g):  # type: ignore[no-untyped-def]
        vocab = self.shape.vocab_size
        token = self.text[self._place] if self._place < len(self.text) else 0
        token = (token + 1) % vocab if self._place in self.wrong else token
        return torch.nn.functional.one_hot(torch.tensor([token]), vocab).double()


TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no systems here') }}{% endif %}"
    "<{{ m.role }}> {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if thinking is defined and thinking %} <think>{% endif %}{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Seven words, one token each, under a chat template: the vocabulary of `make_target(7)`."""
    words = ["<user>", "<assistant>", "<think>", "a", "b", "c", "d"]
    core = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="d"))
    core.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    tokenizer.chat_template = TEMPLATE
    return tokenizer
