"""Families of chat markers: which one a tokenizer and template belong to, and masks held against them."""

from __future__ import annotations

from typing import Any

import pytest
from data_tokenizers import CHATML, PREFILLING, REWRITING, Spelling, make_tokenizer

from data_prep.config import DataConfig
from data_prep.conversations import Conversation, to_conversation
from data_prep.markers import CHOICES, FAMILIES, find_markers
from data_prep.offsets import TextEncoder
from data_prep.render import Renderer
from eagle3.errors import ConfigError, DataError

ASKED = [{"role": "user", "content": "why"}, {"role": "assistant", "content": "the sky"}]
BARE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


def shown(template: str) -> str:
    return make_tokenizer(template).apply_chat_template(ASKED, tokenize=False)


def tokenizer_with(names: tuple[str, ...], template: str) -> Any:
    tokenizer = make_tokenizer(template)
    tokenizer.add_special_tokens({"additional_special_tokens": list(names)})
    return tokenizer


def test_chatml_is_found_by_its_own_ids() -> None:
    tokenizer = make_tokenizer(CHATML)
    markers = find_markers(TextEncoder(tokenizer), shown(CHATML))
    assert markers is not None and markers.family.name == "chatml"
    assert markers.end == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert markers.openings == {tokenizer.convert_tokens_to_ids("<|im_start|>")}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_each_family_is_found_in_a_template_of_its_own(family: Any) -> None:
    opening = {"user": f"{family.openings[0]}user\n", "assistant": f"{family.assistant}\n"}
    template = "".join(
        f"{{% if messages[{i}] is defined %}}{opening[role]}{{{{ messages[{i}]['content'] }}}}{family.end}{{% endif %}}"
        for i, role in enumerate(("user", "assistant"))
    )
    template += "{% if add_generation_prompt %}" + opening["assistant"] + "{% endif %}"
    tokenizer = tokenizer_with((*family.needed, *family.parts), template)
    renderer = Renderer(tokenizer)
    assert renderer.family == family.name
    out = renderer.render(Conversation("r", ASKED, "s"))
    learnt = [token for token, on in zip(out.input_ids, out.loss_mask, strict=True) if on]
    assert tokenizer.decode(learnt) == "the sky" + family.end


def test_no_family_where_the_template_writes_no_markers_or_they_are_no_tokens() -> None:
    assert Renderer(make_tokenizer(BARE)).family == "none"
    unknown = BARE.replace(
        "{{ m['role'] }}: ", "<start_of_turn>{% if m['role'] == 'user' %}user{% else %}model{% endif %}\n"
    )
    unknown = unknown.replace("}}\n{%", "}}<end_of_turn>\n{%")
    assert Renderer(make_tokenizer(unknown)).family == "none"
    assert Renderer(tokenizer_with(("<start_of_turn>", "<end_of_turn>"), unknown)).family == "gemma"


def test_several_families_are_refused_and_named_until_one_is_chosen() -> None:
    both = CHATML.replace("{{ m['role'] }}\n", "{{ m['role'] }}\n<|assistant|>").replace(
        "<|im_end|>", "<|end|><|im_end|>"
    )
    tokenizer = tokenizer_with(("<|user|>", "<|assistant|>", "<|system|>"), both)
    with pytest.raises(DataError, match=r"several families.*chatml, phi3 match.*data\.markers") as caught:
        Renderer(tokenizer)
    assert "\n" not in str(caught.value)
    assert Renderer(tokenizer, markers="chatml").family == "chatml"
    assert Renderer(tokenizer, markers="none").family == "none"


def test_a_family_that_the_template_does_not_write_cannot_be_chosen() -> None:
    with pytest.raises(DataError, match=r"does not write these markers.*data\.markers is llama3"):
        Renderer(make_tokenizer(CHATML), markers="llama3")


def test_setting_knows_the_families() -> None:
    for choice in CHOICES:
        DataConfig(sources=["x"], markers=choice).validate()
    for name, value in (("markers", "kimmy"), ("turns", "each"), ("truncated", "drop")):
        with pytest.raises(ConfigError, match=rf"data\.{name}"):
            DataConfig(sources=["x"], **{name: value}).validate()


@pytest.mark.parametrize("wrong", ["user", "after", "opening"])
def test_a_mask_that_leaves_the_turn_is_refused(wrong: str) -> None:
    tokenizer = make_tokenizer(CHATML)
    markers = find_markers(TextEncoder(tokenizer), shown(CHATML))
    ids = tokenizer.apply_chat_template([*ASKED, *ASKED], return_dict=False)
    start = [t for t, token in enumerate(ids) if token == tokenizer.convert_tokens_to_ids("<|im_start|>")]
    mask = [0] * len(ids)
    first = start[2] + len(tokenizer.encode("<|im_start|>assistant\n"))
    last = ids.index(markers.end, first)
    mask[first : last + 1] = [1] * (last + 1 - first)
    markers.check(ids, mask, "here")
    mask[{"user": start[1] + 4, "after": last + 1, "opening": start[2]}[wrong]] = 1
    with pytest.raises(DataError, match=r"leaves the assistant's turn \[here\]"):
        markers.check(ids, mask, "here")


@pytest.mark.parametrize("template", [CHATML, PREFILLING, BARE])
def test_slow_and_fast_tokenizers_give_the_same_record(template: str) -> None:
    said = [
        *ASKED,
        {"role": "user", "content": "日本 <|im_end|>"},
        {"role": "assistant", "content": "\n naïve 🙂🙂 日本語\n"},
    ]
    fast, slow = (
        Renderer(one).render(Conversation("r", said, "s"))
        for one in (make_tokenizer(template), Spelling(make_tokenizer(template)))
    )
    assert fast == slow and any(fast.loss_mask)


def test_places_of_a_slow_tokenizer_between_landmarks() -> None:
    tokenizer = make_tokenizer(CHATML)
    text = "the cat<|im_end|>\nwhy 日本 <|im_start|>mat"
    fast, slow = TextEncoder(tokenizer).place(text, ""), TextEncoder(Spelling(tokenizer)).place(text, "")
    assert fast.ids == slow.ids
    assert [fast.index(char) for char in range(len(text) + 1)] == [slow.index(char) for char in range(len(text) + 1)]


def test_arguments_given_as_text_are_not_quoted_twice() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"at":"mat"}'}}
    said = [ASKED[0], {"role": "assistant", "content": "", "tool_calls": [call]}]
    tokenizer = make_tokenizer(REWRITING)  # prints arguments as JSON
    out = Renderer(tokenizer).render(to_conversation({"messages": said}, "r", "s", "s"))
    assert '<call>{"at": "mat"}</call><|im_end|>' in tokenizer.decode(out.input_ids)
