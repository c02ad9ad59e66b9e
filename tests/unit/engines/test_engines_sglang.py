"""The SGLang adapter against a stand-in server: flags, ids, read-back, retries, counts, partial results."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_fakes import STEPS, TRAINED, running, wiring_of
from fake_sglang import answer

from eagle3.checkpoint import load_served
from eagle3.conventions import convention
from eagle3.errors import ConfigError, DataError, RedraftError, WiringError
from eagle3.wiring import Wiring
from eval.engines.as_served import as_served
from eval.engines.base import Ask, BatchRun, ServerGone, Session
from eval.engines.sglang import SGLangEngine
from eval.engines.sglang_build import Choice, check_feeds
from eval.engines.sglang_counts import generation_from

NATIVE = Wiring.native("llama", 8, 16)
Make = Callable[..., SGLangEngine]


def asks(count: int, first: int = 5) -> list[Ask]:
    return [Ask(f"p{k}", [first, k], k) for k in range(count)]


def run(session: Session, prompts: list[Ask], most: int = 12, concurrency: int = 1, **more: Any) -> BatchRun:
    return session.run(prompts, max_new_tokens=most, temperature=0.0, concurrency=concurrency, **more)


def seen(session: Session) -> dict[str, Any]:
    return httpx.get(session.facts["url"] + "/seen").json()


def test_flags_say_the_wiring_and_the_numbers(make_engine: Make) -> None:
    with make_engine(tp=2, dtype="bfloat16", extra_args=["--delay", "0"]).serve(TRAINED) as session:
        flags = session.facts["command"]
        resolved = session.facts["resolved"]
    pairs = dict(itertools.pairwise(flags))
    assert pairs["--speculative-algorithm"] == "EAGLE3"
    assert (pairs["--speculative-num-steps"], pairs["--speculative-num-draft-tokens"]) == ("3", "4")
    assert (pairs["--tp-size"], pairs["--dtype"], pairs["--host"]) == ("2", "bfloat16", "127.0.0.1")
    assert flags[-2:] == ["--delay", "0"] and "--disable-radix-cache" in flags
    assert resolved["speculative_num_draft_tokens"] == 4 and resolved["version"] == "0.5.23"
    assert session.facts["ids"] == [0, 3, 5] and session.facts["convention"] == "sglang-0.5.23"
    assert session.facts["build"] == "0.5.9"  # what the interpreter has installed, read without importing it


def test_the_target_alone_is_started_without_a_draft(make_engine: Make) -> None:
    with make_engine().serve(None) as session:
        made = run(session, asks(2)).generations
        assert not [flag for flag in session.facts["command"] if "speculative" in flag]
    assert [one.verifies for one in made if one] == [0, 0]
    assert made[0] is not None and made[0].tokens == list(range(10, 22))


def test_the_folder_as_served_means_the_wiring_asked_for(served: Path, tmp_path: Path) -> None:
    before = (served / "config.json").read_bytes()
    for wiring, name in ((TRAINED, "sglang-0.5.9"), (NATIVE, "sglang-0.5.23"), (NATIVE, "vllm")):
        with as_served(served, wiring, name, tmp_path) as (folder, ids):
            config = json.loads((folder / "config.json").read_text())
            assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == ids
            assert convention(name).parse_like(ids, wiring) == wiring
            assert config["eagle_aux_hidden_state_layer_ids"] == convention("vllm").render(wiring)
            assert load_served(folder, embedding_of(served))[1] == wiring
            assert ("trained_on" in config["redraft"]) == (wiring != TRAINED)
        assert not folder.exists()
    assert (served / "config.json").read_bytes() == before


def embedding_of(served: Path) -> Any:
    import torch

    config = json.loads((served / "config.json").read_text())
    return torch.zeros(config["vocab_size"], config["hidden_size"])


def test_counts_become_a_generation(make_engine: Make) -> None:
    with make_engine().serve(TRAINED) as session:
        batch = run(session, asks(1), most=1 + 1 + 2 + 3 + 4)  # the verifies keep 0, 1, 2, 3
    (made,) = batch.generations
    assert made is not None and batch.failures == {}
    assert (made.verifies, made.correct, made.proposed) == (4, 6, 12)
    assert made.correct_histogram == [1, 1, 1, 1]
    assert (made.tried, made.right) == ([4, 3, 2], [3, 2, 1])
    assert made.tau == 1 + 6 / 4 and made.engine_tau == 11 / 4
    assert not made.ended and made.seconds > 0


@pytest.mark.parametrize("style", ["new", "old"])
def test_an_end_token_inside_a_chain_ends_the_count(style: str) -> None:
    """10 | 11 | 12 13 | 14 15 16 | EOS . . . : the fourth verify kept 3 by the server's count, and 1 before the end."""
    made = generation_from(answer([7, 0], 64, STEPS, style), 0.1, STEPS, STEPS + 1)
    assert made.ended and made.tokens == [10, 11, 12, 13, 14, 15, 16, 2]
    assert (made.verifies, made.correct) == (4, 4)
    assert made.correct_histogram == [1, 2, 1, 0]


def test_the_length_limit_inside_a_chain_does_not() -> None:
    made = generation_from(answer([5, 0], 9, STEPS), 0.1, STEPS, STEPS + 1)
    assert len(made.tokens) == 9 and (made.verifies, made.correct) == (4, 6)


def test_one_token_needs_no_verify() -> None:
    made = generation_from(answer([5, 0], 1, STEPS), 0.1, STEPS, STEPS + 1)
    assert (made.tokens, made.verifies, made.tried, made.correct_histogram) == ([10], 0, [0, 0, 0], [0, 0, 0, 0])


def test_a_build_without_histogram_is_read_only_where_the_counts_say_all() -> None:
    def without(steps: int, most: int) -> dict[str, Any]:
        made = answer([5, 0], most, steps, "old")
        del made["meta_info"]["spec_accept_histogram"]
        return made

    assert generation_from(without(1, 8), 0.1, 1, 2).correct_histogram == [3, 2]
    assert generation_from(without(3, 2), 0.1, 3, 4).correct_histogram == [1, 0, 0, 0]
    with pytest.raises(DataError, match=r"no acceptance histogram.*0.5.9 or newer"):
        generation_from(without(3, 8), 0.1, 3, 4)


def changed(**meta: Any) -> dict[str, Any]:
    made = answer([5, 0], 11, STEPS)
    made["meta_info"] |= meta
    return made


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (changed(spec_num_correct_drafts=7), "the histogram holds 6 kept proposals, the count is 7"),
        (changed(spec_verify_ct=5), "the histogram holds 4 verifies"),
        (changed(spec_num_proposed_drafts=4), "4 proposals in 4 verifies, expected 3 each"),
        (changed(spec_correct_drafts_histogram=[1, 1, 1, 0, 1]), "impossible acceptance histogram"),
        (changed(completion_tokens=12), "11 ids came, completion_tokens is 12"),
        (changed(finish_reason={"type": "abort", "message": "out of memory"}), "did not finish.*out of memory"),
        ({**changed(), "output_ids": [10, 11]}, "miscounts"),
        ({"text": "hello"}, "found .'text'., expected output_ids"),
        ([], "found list, expected output_ids"),
        ({**changed(completion_tokens=0), "output_ids": []}, "no tokens"),
    ],
)
def test_impossible_answers_are_named(broken: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        generation_from(broken, 0.1, STEPS, STEPS + 1)


def test_tokens_that_no_verify_accounts_for_are_named() -> None:
    made = changed(completion_tokens=14)
    made["output_ids"] = list(range(14))
    with pytest.raises(DataError, match="14 tokens came; the prefill, 4 verifies and 6 kept proposals make 11"):
        generation_from(made, 0.1, STEPS, STEPS + 1)


def test_many_at_a_time_but_no_more_than_asked(make_engine: Make) -> None:
    counted: list[int] = []
    with make_engine("--delay", "0.1").serve(TRAINED) as session:
        batch = run(session, asks(9), concurrency=3, done=counted.append)
        assert seen(session)["most_in_flight"] == 3
        assert sorted(body["input_ids"][1] for body in seen(session)["bodies"]) == list(range(9))
        with pytest.raises(ConfigError, match="runs 4"):
            run(session, asks(9), concurrency=5)
    assert counted == [1] * 9 and batch.failures == {}
    assert all(one is not None and len(one.tokens) == 12 for one in batch.generations)


def test_sampling_goes_through(make_engine: Make) -> None:
    with make_engine().serve(TRAINED) as session:
        session.run([Ask("a", [5], 77)], max_new_tokens=4, temperature=0.7, concurrency=1)
        session.run([Ask("a", [5], 77)], max_new_tokens=4, temperature=0.0, concurrency=1)
        first, second = (body["sampling_params"] for body in seen(session)["bodies"])
    assert first == {"max_new_tokens": 4, "temperature": 0.7, "sampling_seed": 77}
    assert second == {"max_new_tokens": 4, "temperature": 0.0}


def test_passing_trouble_is_tried_again_and_lasting_trouble_is_not(make_engine: Make) -> None:
    with make_engine("--fault", "error_twice", retries=2).serve(TRAINED) as session:
        assert run(session, asks(2)).failures == {}
        assert seen(session)["asked"] == 4
    with make_engine("--fault", "error_twice", retries=1).serve(TRAINED) as session:
        failures = run(session, asks(2)).failures
        assert list(failures) == ["p0"] and "answered 500" in failures["p0"]
        assert "the scheduler is asleep, 2 tries" in failures["p0"]
    with make_engine("--fault", "refuses").serve(TRAINED) as session:
        failures = run(session, asks(1)).failures
        assert seen(session)["asked"] == 1
        assert "refused the request (400)" in failures["p0"] and "longer than 8" in failures["p0"]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("hangs", "no answer in time.*0.4 s passed"),
        ("half_json", "no whole JSON.*2 tries"),
        ("wrong_counts", "counters that contradict"),
        ("no_counts", "no acceptance counters.*is a draft loaded"),
    ],
)
def test_each_fault_is_one_line_of_one_prompt(make_engine: Make, fault: str, words: str) -> None:
    engine = make_engine("--fault", fault, retries=1, request_timeout_s=0.4 if fault == "hangs" else 30.0)
    with engine.serve(TRAINED) as session:
        batch = run(session, asks(2), concurrency=2)
    assert batch.generations == [None, None] and sorted(batch.failures) == ["p0", "p1"]
    for line in batch.failures.values():
        assert "\n" not in line
        with pytest.raises(RedraftError, match=words):
            raise RedraftError(line)


def test_a_server_that_dies_in_the_middle_costs_the_rest_only(make_engine: Make) -> None:
    with make_engine("--fault", "dies_in_the_middle", retries=3).serve(TRAINED) as session:
        batch = run(session, asks(6))
        assert "code 9" in session.gone()  # as a regeneration over such a server is told, too
        with pytest.raises(ServerGone, match="the device fell off the bus"):
            run(session, asks(1))
    assert [one is not None for one in batch.generations] == [True] * 3 + [False] * 3
    assert sorted(batch.failures) == ["p3", "p4", "p5"]
    assert "code 9" in batch.failures["p5"] and "RuntimeError: the device fell off the bus" in batch.failures["p5"]


def test_values_other_than_asked_stop_the_measure(make_engine: Make) -> None:
    engine = make_engine("--fault", "other_values")
    with (
        pytest.raises(RedraftError, match=r"other values than asked.*num_draft_tokens is 2, asked 4"),
        engine.serve(TRAINED),
    ):
        pass


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"draft_tokens": 16}, r"draft_tokens.*found 16.*draft_tokens 4 \(eval.num_steps \+ 1\)"),
        ({"topk": 2, "draft_tokens": 0}, "draft_tokens 4 to 11"),
        ({"topk": 2, "draft_tokens": 12}, "draft_tokens 4 to 11"),
        ({"topk": 8, "draft_tokens": 3}, "at least a whole chain"),
        ({"extra_args": ["--tp", "4"]}, "said twice.*--tp is decided by eval.server.tp"),
        ({"extra_args": ["--speculative-num-draft=9"]}, "decided by eval.server.draft_tokens"),
        ({"extra_args": ["--model_path=/x"]}, "decided by target.path"),
        ({"url": "localhost:30000"}, "eval.server.url.*http://host:port"),
    ],
)
def test_contradictions_are_refused_before_anything_starts(
    make_engine: Make, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        make_engine(**settings)


def test_a_tree_may_be_asked_for(make_engine: Make) -> None:
    engine = make_engine(topk=2, draft_tokens=8)
    assert engine.draft_tokens == 8
    with engine.serve(TRAINED) as session:
        assert session.facts["resolved"]["speculative_eagle_topk"] == 2


def test_a_wiring_that_the_build_cannot_feed_or_the_draft_cannot_take(make_engine: Make) -> None:
    with (
        pytest.raises(WiringError, match="cannot feed the embedding"),
        make_engine(convention="sglang-0.5.9").serve(wiring_of(0, 4, 6)),
    ):
        pass
    with pytest.raises(WiringError, match="does not fit the draft"), make_engine().serve(wiring_of(1, 4)):
        pass


def test_an_interpreter_without_sglang(make_engine: Make, tmp_path: Path) -> None:
    with (
        pytest.raises(RedraftError, match=r"sglang is not installed there.*eval.server.url"),
        make_engine(env={}).serve(None),
    ):
        pass
    with (
        pytest.raises(RedraftError, match=r"cannot ask the interpreter.*no_python"),
        make_engine(python=str(tmp_path / "no_python")).serve(None),
    ):
        pass


# A server that runs already


def spoken(target: Path, draft: Path | str, *more: str) -> list[str]:
    flags = ["--model-path", f"/elsewhere/{target.name}", "--speculative-algorithm", "EAGLE3"]
    flags += ["--speculative-draft-model-path", str(draft), "--speculative-num-steps", "3"]
    return [*flags, "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4", *more]


def test_connecting_reads_the_ids_where_the_folder_is_ours_too(
    make_engine: Make, target: Path, served: Path, tmp_path: Path
) -> None:
    with running(spoken(target, served), tmp_path) as url:
        engine = make_engine(url=url, convention="auto")
        with engine.serve(TRAINED) as session:
            assert session.facts["mode"] == "connected" and "log" not in session.facts
            assert session.facts["ids"] == [0, 3, 5] and "config.json" in session.facts["ids_seen"]
            assert session.facts["convention_from"] == "the version the server gives, 0.5.23"
            assert "prefix_cache" in session.facts
            assert run(session, asks(2)).failures == {}
        assert httpx.get(url + "/health").status_code == 200  # left running
        with pytest.raises(WiringError, match=r"slot 0 holds layer 1; expected layer 2"), engine.serve(NATIVE):
            pass


def test_connecting_to_a_build_that_reads_the_ids_otherwise(
    make_engine: Make, target: Path, served: Path, tmp_path: Path
) -> None:
    with running(spoken(target, served, "--info-path", "/get_server_info"), tmp_path) as url:
        engine = make_engine(url=url, convention="vllm")
        with pytest.raises(WiringError, match="slot 1 holds layer 3; expected layer 4"), engine.serve(TRAINED):
            pass


def test_connecting_says_what_it_cannot_see(make_engine: Make, target: Path, tmp_path: Path) -> None:
    with running(spoken(target, "/elsewhere/served"), tmp_path) as url:
        engine = make_engine(url=url)
        with engine.serve(TRAINED) as session:
            assert session.facts["ids"] is None
            assert "unverified" in session.facts["ids_seen"] and "eval.probe live" in session.facts["ids_seen"]
        with pytest.raises(WiringError, match="cannot be seen from here"), engine.serve(NATIVE):
            pass
        with pytest.raises(ConfigError, match="baseline_url"), engine.serve(None):
            pass


def test_connecting_to_the_wrong_server(make_engine: Make, target: Path, tmp_path: Path) -> None:
    with running(spoken(target, "/elsewhere/other"), tmp_path) as url:
        with (
            pytest.raises(RedraftError, match="the draft of that server has another name"),
            make_engine(url=url).serve(TRAINED),
        ):
            pass
        with (
            pytest.raises(RedraftError, match=r"num_steps is 3, asked 2.*asked 3"),
            make_engine(url=url, num_steps=2).serve(TRAINED),
        ):
            pass
        with (
            pytest.raises(RedraftError, match="speculative_algorithm is 'EAGLE3', asked None"),
            make_engine(baseline_url=url).serve(None),
        ):
            pass
    with (
        pytest.raises(RedraftError, match=r"no connection: .*, 2 tries"),
        make_engine(url=url, retries=1).serve(TRAINED),
    ):
        pass


def test_a_build_whose_graphs_forget_the_ids_is_not_started() -> None:
    late = Choice("sglang-0.5.9", "the source", late_graphs=True)
    with pytest.raises(WiringError, match=r"would feed the default layers.*--disable-cuda-graph"):
        check_feeds(late, TRAINED, [])
    check_feeds(late, TRAINED, ["--disable-cuda-graph"])
    check_feeds(late, NATIVE, [])  # the default layers are what is asked for
    check_feeds(Choice("sglang-0.5.23", "the source"), TRAINED, [])
    with pytest.raises(WiringError, match=r"cannot serve a draft.*no setter"):
        check_feeds(Choice("sglang-0.5.9", "the source", stops="no setter"), NATIVE, [])
