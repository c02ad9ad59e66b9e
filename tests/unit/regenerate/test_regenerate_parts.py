"""Sampling as served, reasoning told apart, turns in order, tools, names: what is sent and what is kept of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_chat import FakeChat, completion, serving
from regenerate_case import SET, read_lines

from data_prep.regenerate.__main__ import build_parser, config_from
from data_prep.regenerate.config import RegenerateConfig
from data_prep.regenerate.run import regenerate
from data_prep.regenerate.sampling import seed_of
from data_prep.regenerate.source import asking_lengths
from data_prep.regenerate.thinking import Prefill, prefill_of, split_text
from eagle3.errors import ConfigError
from eagle3.patience import retry_after
from eagle3.repetition import TAIL_TOKENS, is_looping, words

Quick = Callable[..., RegenerateConfig]
OPEN, CLOSED, NONE, UNKNOWN = Prefill.OPEN, Prefill.CLOSED, Prefill.NONE, Prefill.UNKNOWN
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str, **further: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **further}


def write_source(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps({"id": f"r{i}", **one}) + "\n" for i, one in enumerate(records)))
    return path


# --- reasoning ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "prefill", "expected"),
    [
        ("<think>why</think>\n\nso", NONE, ("why", "\n\nso")),
        ("\n<think>\nwhy\n</think>so", UNKNOWN, ("\nwhy\n", "so")),
        ("why</think>so", OPEN, ("why", "so")),
        ("why</think>so </think> it goes", OPEN, ("why", "so </think> it goes")),
        ("why</think>so", UNKNOWN, ("why", "so")),
        ("</think>so", OPEN, ("", "so")),
        ("<think>why</think>so", OPEN, ("why", "so")),
        ("still thinking", OPEN, ("still thinking", "")),
        ("<think>still thinking", NONE, ("still thinking", "")),
        ("so", CLOSED, ("", "so")),
        ("write </think> to end it", CLOSED, ("", "write </think> to end it")),
        ("write </think> to end it", NONE, ("", "write </think> to end it")),
        ("say <think>x</think>", UNKNOWN, ("", "say <think>x</think>")),
        ("[THINK]why[/THINK]so", NONE, ("why", "so")),
        ("", OPEN, ("", "")),
    ],
)
def test_reasoning_is_neither_lost_nor_doubled(text: str, prefill: Prefill, expected: tuple[str, str]) -> None:
    assert split_text(text, prefill) == expected


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("<|im_middle|><think>", OPEN), ("assistant\n<think>\n", OPEN), ("x<think></think>", CLOSED),
     ("<think>\n\n</think>\n\n", CLOSED), ("<|im_middle|>", NONE)],
)  # fmt: skip
def test_end_of_a_prompt_is_read(prompt: str, expected: Prefill) -> None:
    assert prefill_of(prompt) is expected


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
def test_servers_own_split_is_kept(tmp_path: Path, source: Path, quick: Quick, key: str) -> None:
    with serving(FakeChat(lambda body, _nth: completion(body, "a </think> b", **{key: "why"}))) as fake:
        regenerate(quick(), source, tmp_path / "out", fake.url)
    last = read_lines(tmp_path / "out" / "answers.jsonl")[0]["messages"][-1]
    assert last == said("a </think> b", reasoning_content="why")


def test_prompts_end_tells_an_unclosed_text(tmp_path: Path, source: Path, quick: Quick) -> None:
    """Without a parser, a text cut off while reasoning holds no tag at all; the prompt's tokens tell what it is."""
    fake = FakeChat(
        lambda body, _nth: completion(body, "still at it", "length", ids=[7, 8]), info={"internal_states": 1}
    )
    for prompt, expected in {
        "<think>": said("", reasoning_content="still at it"), "<think></think>": said("still at it"),
    }.items():  # fmt: skip
        fake.prompt_text = lambda _ids, text=prompt: text
        with serving(fake):
            regenerate(quick(), source, tmp_path / f"{len(prompt)}", fake.url)
        assert read_lines(tmp_path / f"{len(prompt)}" / "answers.jsonl")[3]["messages"][-1] == expected


def test_parser_that_found_no_reasoning_is_believed(tmp_path: Path, source: Path, quick: Quick) -> None:
    """A text without a tag after an open prompt is an answer where the emitted tokens hold the tag."""
    fake = FakeChat(lambda body, _nth: completion(body, "so", ids=[7, 8]))
    for emitted, expected in {"</think>so": said("so"), "so": said("", reasoning_content="so")}.items():
        fake.prompt_text = lambda ids, text=emitted: text if ids == [7, 8] else "user<think>"
        with serving(fake):
            regenerate(quick(), source, tmp_path / str(len(emitted)), fake.url)
        answers = read_lines(tmp_path / str(len(emitted)) / "answers.jsonl")
        assert len(answers) == 24 and all(one["messages"][-1] == expected for one in answers)


# --- sampling -----------------------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20, "eos_token_id": 3}')
    return folder


def sglang(model: Path, **further: Any) -> dict[str, Any]:
    return {"version": "0.5.23", "model_path": str(model), "tokenizer_path": str(model), **further}


def test_sampling_is_as_served_and_sent_in_full(tmp_path: Path, source: Path, model: Path) -> None:
    with serving(FakeChat(info=sglang(model))) as fake:
        report = regenerate(RegenerateConfig(top_p=0.8), source, tmp_path / "out", fake.url)
    used = {"temperature": 0.6, "top_p": 0.8, "top_k": 20, "min_p": 0.0, "repetition_penalty": 1.0}
    assert all({name: body[name] for name in used} == used for body in fake.requests) and report["sampling"] == used
    origin = report["sampling_from"]
    assert (origin["top_k"], origin["top_p"], origin["min_p"]) == ("generation_config.json", "configuration", "neutral")
    generation = read_lines(tmp_path / "out" / "answers.jsonl")[0]["generation"]
    assert generation["engine"] == "sglang 0.5.23" and {name: generation[name] for name in used} == used


def test_server_that_ignores_the_models_defaults_is_followed(tmp_path: Path, source: Path, model: Path) -> None:
    with serving(FakeChat(info=sglang(model, sampling_defaults="openai"))) as fake:
        report = regenerate(RegenerateConfig(), source, tmp_path / "out", fake.url)
    assert report["sampling"]["temperature"] == 1.0 and report["sampling"]["top_k"] == -1


def test_sampling_that_cannot_be_known_is_not_guessed(tmp_path: Path, source: Path, model: Path) -> None:
    with serving(FakeChat()) as fake:
        with pytest.raises(ConfigError, match=r"regenerate.temperature.*cannot be read here"):
            regenerate(RegenerateConfig(), source, tmp_path / "out", fake.url)
        with pytest.raises(ConfigError, match=r"regenerate.repetition_penalty"):
            regenerate(RegenerateConfig(temperature=0.0), source, tmp_path / "out", fake.url)
        assert fake.requests == []
        cfg = RegenerateConfig(generation_config=str(model), temperature=0.0)
        report = regenerate(cfg, source, tmp_path / "out", fake.url)
    assert report["sampling"] == {**SET, "temperature": 0.0, "top_p": 1.0}
    assert not any("seed" in body for body in fake.requests)  # greedy


def test_each_answer_has_a_seed_of_its_own() -> None:
    seeds = {seed_of(seed, record, turn) for seed in (0, 1) for record in ("a", "b") for turn in (0, 1)}
    assert len(seeds) == 8 and all(0 <= one < 2**31 for one in seeds) and seed_of(0, "a", 0) == seed_of(0, "a", 0)


# --- turns, tools, names ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("roles", "last", "every"),
    [("u", [1], [1]), ("uaua", [3], [1, 3]), ("suau", [4], [2, 4]), ("ua", [1], [1]), ("aua", [2], [2]),
     ("uaaua", [4], [1, 4]), ("s", [], []), ("sa", [], []), ("uatau", [5], [1, 3, 5]), ("uuau", [4], [2, 4])],
)  # fmt: skip
def test_when_the_target_is_asked(roles: str, last: list[int], every: list[int]) -> None:
    names = {"u": "user", "a": "assistant", "s": "system", "t": "tool"}
    messages = [{"role": names[role], "content": "x"} for role in roles]
    assert asking_lengths(messages, "last") == last and asking_lengths(messages, "all") == every


def test_every_turn_is_answered_after_the_targets_own_words(tmp_path: Path, quick: Quick) -> None:
    talk = [
        {"role": "system", "content": "be brief"},
        user("1"),
        said("theirs 1"),
        user("2"),
        said("theirs 2"),
        user("3"),
    ]
    path = write_source(tmp_path / "s.jsonl", {"messages": talk})
    fake = FakeChat(lambda body, _nth: completion(body, f"own {body['messages'][-1]['content']}"))
    with serving(fake):
        regenerate(quick(turns="all"), path, tmp_path / "out", fake.url)
    own = [talk[0], user("1"), said("own 1"), user("2"), said("own 2"), user("3"), said("own 3")]
    assert [body["messages"] for body in fake.requests] == [own[:2], own[:4], own[:6]]
    record = read_lines(tmp_path / "out" / "answers.jsonl")[0]
    assert record["messages"] == own and "ended_early" not in record
    assert [turn["message"] for turn in record["turns"]] == [2, 4, 6] and record["answer_tokens"] == 9
    assert len({body["seed"] for body in fake.requests}) == 3


def test_conversation_ends_where_the_source_no_longer_fits(tmp_path: Path, quick: Quick) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    with_tool = [
        user("1"),
        said("", tool_calls=[call]),
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        said("x"),
    ]
    plain = [user("cut"), said("x"), user("2")]
    path = write_source(tmp_path / "s.jsonl", {"messages": with_tool, "tools": [TOOL]}, {"messages": plain})

    def script(body: dict[str, Any], _nth: int) -> Any:
        return completion(body, "words", "length" if body["messages"][-1]["content"] == "cut" else "stop")

    with serving(FakeChat(script)) as fake:
        report = regenerate(quick(turns="all"), path, tmp_path / "out", fake.url)
        answers = read_lines(tmp_path / "out" / "answers.jsonl")
        assert [len(one["messages"]) for one in answers] == [2, 2]
        assert "call that the target did not make" in answers[0]["ended_early"]
        assert answers[1]["ended_early"] == "the answer was cut off at the token limit" and answers[1]["truncated"]
        assert sum(report["ended_early"].values()) == 2
        fake.requests.clear()
        regenerate(quick(), path, tmp_path / "last", fake.url)
    asked = next(body for body in fake.requests if body.get("tools"))
    assert asked["tools"] == [TOOL] and asked["tool_choice"] == "auto"
    assert asked["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'


def test_tool_calls_are_kept_and_a_server_that_cannot_tell_them_is_refused(
    tmp_path: Path, quick: Quick, model: Path
) -> None:
    path = write_source(tmp_path / "s.jsonl", {"messages": [user("add")], "tools": [TOOL]})
    call = {"id": "functions.add:0", "type": "function", "index": 0, "function": {"name": "add", "arguments": "{}"}}
    fake = FakeChat(lambda body, _nth: completion(body, None, "tool_calls", tool_calls=[call]), info=sglang(model))
    fake.script = lambda body, _nth: completion(body, "", "tool_calls", tool_calls=[call])
    with serving(fake):
        with pytest.raises(ConfigError, match=r"1 records offer tools.*--tool-call-parser"):
            regenerate(quick(), path, tmp_path / "out", fake.url)
        fake.info = sglang(model, tool_call_parser="kimi_k2")
        report = regenerate(quick(), path, tmp_path / "out", fake.url)
    call.pop("index")
    assert read_lines(tmp_path / "out" / "answers.jsonl")[0]["messages"][-1] == said("", tool_calls=[call])
    assert report["with_tool_calls"] == 1 and report["finish_reason"] == {"tool_calls": 1} and report["empty"] == 0


def test_thinking_and_template_arguments_are_sent_and_kept(tmp_path: Path, source: Path, quick: Quick) -> None:
    with serving(FakeChat()) as fake:
        regenerate(quick(thinking=False, template_kwargs={"lang": "en"}), source, tmp_path / "out", fake.url)
    expected = {"thinking": False, "enable_thinking": False, "lang": "en"}
    assert all(body["chat_template_kwargs"] == expected for body in fake.requests)
    assert read_lines(tmp_path / "out" / "answers.jsonl")[0]["generation"]["template_kwargs"] == expected


def test_model_is_asked_for_or_checked(tmp_path: Path, source: Path, quick: Quick) -> None:
    with serving(FakeChat(models=[{"id": "a"}, {"id": "b"}])) as fake:
        with pytest.raises(ConfigError, match=r"which model\?.*a, b"):
            regenerate(quick(), source, tmp_path / "out", fake.url)
        with pytest.raises(ConfigError, match="no such model"):
            regenerate(quick(model="c"), source, tmp_path / "out", fake.url)
        report = regenerate(quick(model="b"), source, tmp_path / "out", fake.url)
    assert {body["model"] for body in fake.requests} == {"b"} and report["served"]["model"] == "b"


@pytest.mark.parametrize(
    ("change", "field"),
    [({"turns": "first"}, "turns"), ({"concurrency": 0}, "concurrency"), ({"temperature": -1.0}, "temperature"),
     ({"top_k": 0}, "top_k"), ({"url": "gpu7:30000"}, "url"), ({"api_key_env": "sk-123"}, "api_key_env"),
     ({"max_failures": 1.5}, "max_failures"), ({"thinking": True, "template_kwargs": {"thinking": False}}, "thinking")],
)  # fmt: skip
def test_bad_settings_name_their_field(quick: Quick, change: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=f"regenerate.*{field}") as caught:
        quick(**change).validate()
    assert "sk-123" not in str(caught.value)


def test_flags_give_the_same_configuration() -> None:
    words_ = ["--url", "http://h:1", "--source", "s", "--out", "o", "--temperature", "0", "--thinking", "true",
              "--keep-empty", "--template-kwarg", "depth=3", "--max-tokens", "9"]  # fmt: skip
    assert config_from(build_parser().parse_args(words_)) == RegenerateConfig(
        source="s", url="http://h:1", temperature=0.0, thinking=True, keep_empty=True, template_kwargs={"depth": 3},
        max_tokens=9,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("header", "low", "high"),
    [("7", 7, 7), ("", 0, 0), ("soon", 0, 0), ("Wed, 21 Oct 2015 07:28:00 GMT", 0, 0), ("in 90 s", 80, 91)],
)
def test_retry_after_is_a_number_or_a_date(header: str, low: float, high: float) -> None:
    if header == "in 90 s":
        header = format_datetime(datetime.now(UTC) + timedelta(seconds=90), usegmt=True)
    assert low <= retry_after(httpx.Response(429, headers={"Retry-After": header})) <= high


# --- circles ------------------------------------------------------------------------------------------------------


def test_circles_are_seen_at_the_end_of_a_long_text() -> None:
    prose = list(range(5 * TAIL_TOKENS))
    assert not is_looping(prose) and is_looping(prose + [1, 2, 3] * TAIL_TOKENS)
    assert not is_looping([1, 2] * 7) and is_looping([1, 2] * 8)
    assert words("So, 天地! ok") == ["So", ",", "天", "地", "!", "ok"]
