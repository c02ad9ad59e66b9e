"""Rendering: what is learnt, under chat templates of several families."""

from __future__ import annotations

from typing import Any

import pytest
from data_tokenizers import CHATML, DROPPING, MARKED, OPENING, PREFILLING, REWRITING, Spelling, make_tokenizer

from data_prep.conversations import Conversation
from data_prep.render import NothingToLearnError, Rendered, Renderer
from eagle3.errors import DataError

TWO_TURNS = [
    {"role": "user", "content": "why"},
    {"role": "assistant", "content": "because the sky"},
    {"role": "user", "content": "because the sky"},
    {"role": "assistant", "content": "blue"},
]
REASONED = [
    {"role": "user", "content": "why"},
    {"role": "assistant", "content": "blue", "reasoning_content": "light scatters"},
]
CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "mat"}}}
TOOL_TURNS = [
    {"role": "user", "content": "why"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "the cat"},
    {"role": "assistant", "content": "the cat sat"},
]


def render(template: str, messages: list[dict], slow: bool = False, **settings: Any) -> tuple[Any, Rendered]:
    tokenizer: Any = make_tokenizer(template)
    tokenizer = Spelling(tokenizer) if slow else tokenizer
    return tokenizer, Renderer(tokenizer, **settings).render(Conversation("r", messages, "s"))


def learnt(template: str, messages: list[dict], **settings: Any) -> list[str]:
    """The learnt stretches as text, one for each run of ones in the mask."""
    tokenizer, out = render(template, messages, **settings)
    assert len(out.input_ids) == len(out.loss_mask)
    runs: list[list[int]] = []
    for t, (token, on) in enumerate(zip(out.input_ids, out.loss_mask, strict=True)):
        if on:
            if t == 0 or not out.loss_mask[t - 1]:
                runs.append([])
            runs[-1].append(token)
    return [tokenizer.decode(run, skip_special_tokens=False) for run in runs]


@pytest.mark.parametrize("slow", [False, True])
def test_chatml_learns_answers_and_their_end_alone(slow: bool) -> None:
    assert learnt(CHATML, TWO_TURNS, slow=slow) == ["because the sky<|im_end|>", "blue<|im_end|>"]


def test_ids_are_those_of_the_chat_template() -> None:
    tokenizer, out = render(CHATML, TWO_TURNS)
    assert out.input_ids == tokenizer.apply_chat_template(TWO_TURNS, return_dict=False)


def test_last_turn_only() -> None:
    assert learnt(CHATML, TWO_TURNS, turns="last") == ["blue<|im_end|>"]


def test_turns_after_the_last_answer_are_left_off() -> None:
    _, whole = render(CHATML, TWO_TURNS)
    _, longer = render(CHATML, [*TWO_TURNS, {"role": "user", "content": "mat"}])
    assert longer == whole


@pytest.mark.parametrize("slow", [False, True])
def test_text_beyond_ascii(slow: bool) -> None:
    messages = [{"role": "user", "content": "日本 🙂"}, {"role": "assistant", "content": "naïve 🙂🙂 日本語"}]
    assert learnt(CHATML, messages, slow=slow) == ["naïve 🙂🙂 日本語<|im_end|>"]


def test_answer_that_merges_with_the_prompt_is_learnt_from_its_own_first_token() -> None:
    messages = [{"role": "user", "content": "why"}, {"role": "assistant", "content": "\n\nblue \n"}]
    assert learnt(CHATML, messages) == ["\n\nblue \n<|im_end|>"]


def test_empty_think_block_of_the_template_is_not_learnt() -> None:
    assert learnt(REWRITING, TWO_TURNS[:2]) == ["because the sky<|im_end|>"]
    assert learnt(PREFILLING, TWO_TURNS[:2]) == ["because the sky<|im_end|>"]


def test_reasoning_of_the_sample_is_learnt() -> None:
    assert learnt(REWRITING, REASONED) == ["<think>\nlight scatters\n</think>\n\nblue<|im_end|>"]


def test_reasoning_after_a_prompt_that_opens_the_block() -> None:
    assert learnt(PREFILLING, REASONED) == ["light scatters</think>blue<|im_end|>"]


@pytest.mark.parametrize("answer", ["blue", "<b> blue", "<think> is a tag"])
def test_answer_that_begins_like_the_prompt_goes_on(answer: str) -> None:
    messages = [{"role": "user", "content": "why"}, {"role": "assistant", "content": answer}]
    assert learnt(OPENING, messages)[0].endswith(answer.removeprefix("<think>") + "<|im_end|>")
    assert len(learnt(OPENING, messages)) == 1


def test_reasoning_inside_the_content_is_learnt() -> None:
    messages = [{"role": "user", "content": "why"}, {"role": "assistant", "content": "<think>light</think>\n\nblue"}]
    assert learnt(CHATML, messages) == ["<think>light</think>\n\nblue<|im_end|>"]
    assert learnt(CHATML, messages, thinking=False) == ["blue<|im_end|>"]


@pytest.mark.parametrize("template", [REWRITING, PREFILLING])
def test_reasoning_stays_as_context_when_not_wanted(template: str) -> None:
    tokenizer, out = render(template, REASONED, thinking=False)
    assert "light scatters" in tokenizer.decode(out.input_ids)
    assert learnt(template, REASONED, thinking=False) == ["blue<|im_end|>"]


@pytest.mark.parametrize("first", [TWO_TURNS[:2], REASONED])
def test_history_that_is_shown_otherwise_is_refused_in_one_text(first: list[dict]) -> None:
    messages = [*first, *TWO_TURNS[2:]]
    with pytest.raises(DataError, match=r"otherwise than it was served.*turn 1 of the assistant") as caught:
        learnt(REWRITING, messages, turns="all")
    assert not isinstance(caught.value, NothingToLearnError)
    assert "data.turns=served" in str(caught.value) and "\n" not in str(caught.value)
    assert learnt(REWRITING, messages, turns="last") == ["blue<|im_end|>"]


def test_history_that_is_shown_otherwise_gives_a_record_for_each_turn() -> None:
    messages = [*REASONED, *TWO_TURNS[2:]]
    tokenizer = make_tokenizer(REWRITING)
    first, second = Renderer(tokenizer).records(Conversation("r", messages, "s"))
    assert isinstance(first, Rendered) and isinstance(second, Rendered)
    assert (first.record_id, second.record_id) == ("r#1", "r#2")
    assert first.input_ids == tokenizer.apply_chat_template(messages[:2], return_dict=False)
    assert second.input_ids == tokenizer.apply_chat_template(messages, return_dict=False)


def test_template_that_drops_the_reasoning_of_the_turn_itself_is_refused() -> None:
    messages = [{"role": "user", "content": "why"}, {"role": "assistant", "content": "<think>light</think>blue"}]
    with pytest.raises(DataError, match=r"drops the reasoning of this turn.*data\.thinking=false"):
        learnt(DROPPING, messages)
    assert learnt(DROPPING, messages, thinking=False) == ["blue<|im_end|>"]


@pytest.mark.parametrize("slow", [False, True])
def test_generation_marks_are_used_and_the_end_token_is_added(slow: bool) -> None:
    assert learnt(MARKED, TWO_TURNS, slow=slow) == ["because the sky<|im_end|>", "blue<|im_end|>"]
    assert learnt(MARKED, TWO_TURNS, turns="last", slow=slow) == ["blue<|im_end|>"]


def test_tool_turns_by_setting() -> None:
    assert learnt(REWRITING, TOOL_TURNS) == ['<call>{"at": "mat"}</call><|im_end|>', "the cat sat<|im_end|>"]
    assert learnt(REWRITING, TOOL_TURNS, tools=False) == ["the cat sat<|im_end|>"]
    with pytest.raises(NothingToLearnError, match="tool calls"):
        learnt(REWRITING, TOOL_TURNS[:2], tools=False)


def test_cut_before_the_answer_is_nothing_to_learn() -> None:
    _, whole = render(CHATML, TWO_TURNS[:2])
    first = whole.loss_mask.index(1)
    _, kept = render(CHATML, TWO_TURNS[:2], max_length=first + 1)
    assert sum(kept.loss_mask) == 1 and len(kept.input_ids) == first + 1
    with pytest.raises(NothingToLearnError, match=f"no answer within {first} tokens"):
        render(CHATML, TWO_TURNS[:2], max_length=first)


def test_only_positions_from_two_on_count_as_learnable() -> None:
    bare = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    silent = {"role": "user", "content": ""}
    with pytest.raises(NothingToLearnError):
        render(bare, [silent, {"role": "assistant", "content": "é"}])  # two byte tokens
    _, out = render(bare, [silent, {"role": "assistant", "content": "日"}])  # three
    assert out.loss_mask == [1, 1, 1]


def test_greeting_before_any_user_turn_is_context_only() -> None:
    greeting = {"role": "assistant", "content": "the cat"}
    assert learnt(CHATML, [greeting, *TWO_TURNS]) == ["because the sky<|im_end|>", "blue<|im_end|>"]
    with pytest.raises(NothingToLearnError, match="answers no user"):
        learnt(CHATML, [greeting])


def test_no_assistant_turn_is_nothing_to_learn() -> None:
    with pytest.raises(NothingToLearnError, match="no assistant turn"):
        render(CHATML, TWO_TURNS[:1])


def test_template_refusal_names_the_record() -> None:
    refusing = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match=r"s, record r.*roles must alternate"):
        render(refusing, TWO_TURNS)


def test_tokenizer_without_template_is_refused() -> None:
    with pytest.raises(DataError, match="no chat template"):
        Renderer(make_tokenizer(None))


def test_tokens_that_do_not_spell_the_text_are_refused() -> None:
    slow = Spelling(make_tokenizer("{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"))
    slow.decode = lambda ids, **kwargs: "x" * len(ids)  # type: ignore[attr-defined]
    with pytest.raises(DataError, match="cannot be placed"):
        Renderer(slow).render(Conversation("r", TWO_TURNS, "s"))


def test_hashes_move_with_what_they_cover_alone() -> None:
    plain, other = make_tokenizer(CHATML), make_tokenizer(MARKED)
    one, two = Renderer(plain), Renderer(other)
    assert one.tokenizer_hash == two.tokenizer_hash and one.template_hash != two.template_hash
    assert Renderer(plain, template_kwargs={"thinking": False}).template_hash != one.template_hash
    before = one.tokenizer_hash
    plain.backend_tokenizer.enable_padding(length=8)
    assert one.tokenizer_hash == before
    plain.add_tokens(["<new>"])
    assert one.tokenizer_hash != before
