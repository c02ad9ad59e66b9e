"""A regeneration over real HTTP against a server that behaves well, badly, or not at all."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_chat import HALF, RESET, FakeChat, completion, serving, text_for
from regenerate_case import read_lines

from data_prep.regenerate.client import ServerGone
from data_prep.regenerate.config import RegenerateConfig
from data_prep.regenerate.run import regenerate
from eagle3.errors import ConfigError, DataError, RedraftError

Quick = Callable[..., RegenerateConfig]


def question(body: dict[str, Any]) -> int:
    return int(body["messages"][-1]["content"].split()[-1])


def test_answers_are_the_servers_in_the_sources_order(tmp_path: Path, source: Path, quick: Quick) -> None:
    def later_ones_first(body: dict[str, Any], _nth: int) -> Any:
        time.sleep(0.02 * (3 - question(body) % 4))
        return completion(body)

    fake, done = FakeChat(later_ones_first), []
    with serving(fake):
        report = regenerate(quick(), source, tmp_path / "out", fake.url + "/v1/", done.append)
    answers = read_lines(tmp_path / "out" / "answers.jsonl")
    assert [one["id"] for one in answers] == [f"r{i:02d}" for i in range(24)]
    assert all("somebody" not in json.dumps(body) for body in fake.requests)
    by_question = {question(body): text_for(body) for body in fake.requests}
    for i, one in enumerate(answers):
        assert one["messages"] == [
            {"role": "user", "content": f"question {i}"}, {"role": "assistant", "content": by_question[i]},
        ]  # fmt: skip
        assert (one["finish_reason"], one["truncated"], one["answer_tokens"]) == ("stop", False, 11)
        assert one["provenance"] == {"record": i} and one["generation"]["temperature"] == 0.7
        assert one["generation"]["seed"] == next(b["seed"] for b in fake.requests if question(b) == i)
    assert len({one["generation"]["seed"] for one in answers}) == 24
    assert report["answers"] == report["records"] == 24 and report["failed"] == 0 and sum(done) == 24
    assert report["domain"] == {"math": 16, "chat": 8} and report["finish_reason"] == {"stop": 24}
    assert fake.most_at_once == 4 and len(fake.peers) <= 4  # bounded, and connections used again
    assert not (tmp_path / "out" / "answers.part.jsonl").exists()
    assert json.loads((tmp_path / "out" / "report.json").read_text())["answer_tokens"] == 24 * 11


def test_concurrency_does_not_change_a_byte(tmp_path: Path, source: Path, quick: Quick) -> None:
    with serving(FakeChat()) as fake:
        for count in (1, 8):
            regenerate(quick(concurrency=count), source, tmp_path / str(count), fake.url)
    one, eight = ((tmp_path / name / "answers.jsonl").read_bytes() for name in ("1", "8"))
    assert one == eight and one.count(b"\n") == 24


@pytest.mark.parametrize(
    "bad",
    [
        (500, {"error": {"message": "oops"}}, {}),
        (429, {"message": "slow down"}, {}),
        (503, "busy", {}),
        RESET,
        HALF,
        {"object": "chat.completion", "choices": []},
        {"choices": [{"finish_reason": "stop"}], "usage": {}},
        {"choices": [{"finish_reason": "stop", "message": {"content": 3}}], "usage": {}},
        {"choices": [{"finish_reason": "stop", "message": {"content": "no usage"}}]},
        {"choices": [{"finish_reason": "abort", "message": {"content": "half"}}], "usage": {"completion_tokens": 1}},
        ["not", "an", "object"],
    ],
    ids=["500", "429", "503", "reset", "half", "no-choice", "no-message", "not-text", "no-usage", "abort", "list"],
)
def test_passing_trouble_is_passed_over(tmp_path: Path, source: Path, quick: Quick, bad: Any) -> None:
    fake = FakeChat(lambda body, nth: bad if nth < 2 and question(body) % 5 == 0 else completion(body))
    with serving(fake):
        report = regenerate(quick(), source, tmp_path / "out", fake.url)
    assert report["answers"] == 24 and report["failed"] == 0
    assert max(fake.seen.values()) == 3


def test_retry_after_is_waited_for(tmp_path: Path, source: Path, quick: Quick) -> None:
    times: list[float] = []

    def once(body: dict[str, Any], nth: int) -> Any:
        if question(body) == 3:
            times.append(time.monotonic())
        return (429, "later", {"Retry-After": "1"}) if question(body) == 3 and nth == 0 else completion(body)

    with serving(FakeChat(once)) as fake:
        regenerate(quick(), source, tmp_path / "out", fake.url)
    assert len(times) == 2 and times[1] - times[0] >= 1.0


def test_hanging_request_is_given_up_and_named(tmp_path: Path, source: Path, quick: Quick) -> None:
    release = threading.Event()

    def hang(body: dict[str, Any], _nth: int) -> Any:
        if question(body) == 7:
            release.wait(20)
        return completion(body)

    with serving(FakeChat(hang)) as fake:
        cfg = quick(timeout_s=0.3, retries=1, max_failures=0.1)
        report = regenerate(cfg, source, tmp_path / "out", fake.url)
        release.set()
    assert report["failed"] == 1 and report["failed_ids"] == ["r07"] and report["answers"] == 23
    assert read_lines(tmp_path / "out" / "failed.jsonl") == [{"id": "r07", "why": "no answer in 0.3 s (2 tries)"}]


def test_bad_request_is_not_repeated_and_only_it_is_asked_again(tmp_path: Path, source: Path, quick: Quick) -> None:
    line = "The prompt is longer than the model's context length of 8."
    fake = FakeChat(
        lambda body, _nth: (400, {"error": {"message": line}}, {}) if question(body) in (2, 9) else completion(body)
    )
    out = tmp_path / "out"
    with serving(fake):
        report = regenerate(quick(max_failures=0.1), source, out, fake.url)
        assert max(fake.seen.values()) == 1
        why = f"the server answered 400: {line}"
        assert read_lines(out / "failed.jsonl") == [{"id": "r02", "why": why}, {"id": "r09", "why": why}]
        assert report["failed_reasons"] == {why.replace("of 8", "of N"): 2}
        fake.script, before = (lambda body, _nth: completion(body)), len(fake.requests)
        report = regenerate(quick(max_failures=0.1), source, out, fake.url)
    assert sorted(question(body) for body in fake.requests[before:]) == [2, 9]
    assert report["answers"] == 24 and report["failed"] == 0
    assert [one["id"] for one in read_lines(out / "answers.jsonl")] == [f"r{i:02d}" for i in range(24)]
    assert not (out / "failed.jsonl").exists() and not (out / "answers.part.jsonl").exists()


def test_too_many_failures_end_the_stage_in_one_line(tmp_path: Path, source: Path, quick: Quick) -> None:
    fake = FakeChat(lambda body, _nth: (422, {"detail": "no"}, {}) if question(body) % 2 else completion(body))
    with serving(fake), pytest.raises(RedraftError, match=r"too many records failed .*3 of 24; 3 x .*422") as caught:
        regenerate(quick(max_failures=0.1, concurrency=1), source, tmp_path / "out", fake.url)
    assert "\n" not in str(caught.value) and not (tmp_path / "out" / "answers.jsonl").exists()


def test_server_that_only_errs_is_given_up(tmp_path: Path, source: Path, quick: Quick) -> None:
    fake = FakeChat(lambda _body, _nth: (500, "out of memory", {}))
    with (
        serving(fake),
        pytest.raises(ServerGone, match=r"nothing but errors .*8 records failed in a row.*out of memory"),
    ):
        regenerate(quick(max_failures=1.0, retries=0), source, tmp_path / "out", fake.url)
    assert len(fake.requests) < 24


def test_server_that_dies_and_comes_back_costs_nothing(tmp_path: Path, source: Path, quick: Quick) -> None:
    """It goes away in the middle, every connection with it, and listens at the same port again later."""
    asked = threading.Event()

    answered = itertools.count()

    def script(body: dict[str, Any], _nth: int) -> Any:
        if next(answered) >= 9:
            asked.set()
            return RESET
        return completion(body)

    fake, result = FakeChat(script), {}

    def work(url: str) -> None:
        result.update(regenerate(quick(outage_s=20.0, retries=50), source, tmp_path / "out", url))

    with serving(fake):
        port = int(fake.url.rsplit(":", 1)[1])
        thread = threading.Thread(target=work, args=(fake.url,))
        thread.start()
        assert asked.wait(10)
    time.sleep(0.3)  # nobody listens
    again = FakeChat()
    with serving(again, port):
        thread.join(20)
    assert result["answers"] == 24 and result["failed"] == 0
    assert 24 - 9 <= len(again.requests) <= 24 - 9 + 4


def test_server_gone_for_good_ends_the_stage_and_keeps_the_answers(tmp_path: Path, source: Path, quick: Quick) -> None:
    fake, out, asked = FakeChat(), tmp_path / "out", threading.Event()

    answered = itertools.count()

    def script(body: dict[str, Any], _nth: int) -> Any:
        if next(answered) >= 9:
            asked.set()
            return RESET
        return completion(body)

    fake.script, caught = script, []

    def work() -> None:
        try:
            regenerate(quick(retries=50, outage_s=0.4), source, out, fake.url)
        except RedraftError as err:
            caught.append(err)

    with serving(fake):
        thread = threading.Thread(target=work)
        thread.start()
        assert asked.wait(10)
    thread.join(20)
    assert isinstance(caught[0], ServerGone) and "cannot be reached" in str(caught[0]) and "\n" not in str(caught[0])
    kept = {one["id"] for one in read_lines(out / "answers.part.jsonl")[1:]}
    assert len(kept) == 9
    with serving(FakeChat()) as fresh:
        regenerate(quick(), source, out, fresh.url)
    assert len(fresh.requests) == 15 and len(read_lines(out / "answers.jsonl")) == 24


def test_nobody_at_the_address(tmp_path: Path, source: Path, quick: Quick, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_prep.regenerate.facts.START_PATIENCE_S", 0.2)
    with serving(FakeChat()) as fake:
        url = fake.url
    with pytest.raises(ServerGone, match="cannot be reached"):
        regenerate(quick(), source, tmp_path / "out", url)


def test_empty_answers_are_left_out_and_counted(tmp_path: Path, source: Path, quick: Quick) -> None:
    fake = FakeChat(lambda body, _nth: completion(body, " \n" if question(body) < 3 else None))
    with serving(fake):
        report = regenerate(quick(), source, tmp_path / "out", fake.url)
        assert (report["answers"], report["empty"]) == (21, 3)
        kept = regenerate(quick(keep_empty=True), source, tmp_path / "kept", fake.url)
    assert (kept["answers"], kept["empty"]) == (24, 3)
    assert len(read_lines(tmp_path / "out" / "answers.jsonl")) == 21


def test_cut_off_and_circling_answers_are_flagged(tmp_path: Path, source: Path, quick: Quick) -> None:
    def script(body: dict[str, Any], _nth: int) -> Any:
        number = question(body)
        if number == 0:
            return completion(body, finish="length")
        if number == 1:
            return completion(body, "and so on " * 30)
        return completion(body, "天地玄黄" * 20, ids=[5, 6] * 20) if number == 2 else completion(body)

    with serving(FakeChat(script)) as fake:
        report = regenerate(quick(), source, tmp_path / "out", fake.url)
    answers = {one["id"]: one for one in read_lines(tmp_path / "out" / "answers.jsonl")}
    assert [i for i, one in answers.items() if one["truncated"]] == ["r00"]
    assert [i for i, one in answers.items() if one["looping"]] == ["r01", "r02"]
    assert answers["r02"]["token_ids"] == {"prompt": [1, 2, 3], "answer": [5, 6] * 20}
    assert report["truncated_share"] == 1 / 24 and report["looping_share"] == 2 / 24 and report["with_token_ids"] == 1


def test_key_is_sent_and_never_written(
    tmp_path: Path, source: Path, quick: Quick, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    key = "sk-very-secret-9"
    monkeypatch.setenv("THE_KEY", key)
    fake = FakeChat(key=key)
    with serving(fake):
        regenerate(quick(api_key_env="THE_KEY"), source, tmp_path / "out", fake.url)
        monkeypatch.setenv("THE_KEY", key + "x")
        with pytest.raises(ConfigError, match=r"refuses every request .*api_key_env") as caught:
            regenerate(quick(api_key_env="THE_KEY", seed=1), source, tmp_path / "wrong", fake.url)
        monkeypatch.delenv("THE_KEY")
        with pytest.raises(ConfigError, match="no variable THE_KEY"):
            regenerate(quick(api_key_env="THE_KEY"), source, tmp_path / "none", fake.url)
    assert "***" in str(caught.value) and key not in str(caught.value)
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) > 3 and all(key.encode() not in path.read_bytes() for path in written)
    assert key not in caplog.text


def test_login_in_the_address_is_not_written(tmp_path: Path, source: Path, quick: Quick) -> None:
    with serving(FakeChat()) as fake:
        report = regenerate(quick(), source, tmp_path / "out", fake.url.replace("//", "//user:pass-word@"))
    assert report["served"]["url"] == fake.url
    assert all(b"pass-word" not in path.read_bytes() for path in (tmp_path / "out").iterdir())


def test_source_that_cannot_be_answered_stops_before_anything_is_asked(tmp_path: Path, quick: Quick) -> None:
    good = {"id": "a", "messages": [{"role": "user", "content": "x"}]}
    cases = {"the same id twice": [good, good], "record without messages": [{"id": "b"}], "no conversations": []}
    with serving(FakeChat()) as fake:
        for match, records in cases.items():
            path = tmp_path / "bad.jsonl"
            path.write_text("".join(json.dumps(one) + "\n" for one in records))
            with pytest.raises(DataError, match=match):
                regenerate(quick(), path, tmp_path / "out", fake.url)
        with pytest.raises(DataError, match="not found"):
            regenerate(quick(), tmp_path / "missing.jsonl", tmp_path / "out", fake.url)
    assert fake.requests == []


def test_surrogate_halves_do_not_break_the_file(tmp_path: Path, source: Path, quick: Quick) -> None:
    """A server may escape half an emoji; no reader of UTF-8 could take it, nor could a tokenizer."""
    with serving(FakeChat(lambda body, _nth: completion(body, "x \ud83d y \u2028 z"))) as fake:
        regenerate(quick(), source, tmp_path / "out", fake.url)
    content = read_lines(tmp_path / "out" / "answers.jsonl")[0]["messages"][-1]["content"]
    assert content.startswith("x \ufffd") and content.endswith(" y \u2028 z")
