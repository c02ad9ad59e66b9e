"""The measure over a server: phases, batch sizes, speeds, what fails, what is kept, what is refused."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from eval_models import make_tokenizer, make_wiring
from fake_server import STEPS, FakeEngine, drafted
from rich.console import Console
from test_eval_report import page_text

from eagle3.errors import RedraftError
from eagle3.wiring import Wiring
from eval.config import EvalConfig
from eval.engines.base import Ask, Generation, ServerGone, Session
from eval.prompts import Prompt, PromptSet
from eval.report import write_report
from eval.results import AcceptResult
from eval.served import count_served, measure_served

TRAINED = make_wiring(0, 4, 2)  # served natively it is layers 2, 4, 5


def one_set(name: str, count: int) -> PromptSet:
    words = ["a", "b", "c", "d"]
    prompts = [Prompt(f"{name[0]}-{i:02}", [{"role": "user", "content": " ".join(words[: 1 + i % 4]) + " a" * i}])
               for i in range(count)]  # fmt: skip
    return PromptSet(name, prompts, f"key {name}")


SETS = [one_set("chat", 5), one_set("math", 3)]


def config(**changes: object) -> EvalConfig:
    settings = {"engine": "sglang", "prompt_sets": ["x"], "max_new_tokens": 24, "num_steps": STEPS, **changes}
    return EvalConfig(**settings)  # type: ignore[arg-type]


def measured(engine: FakeEngine, folder: Path, cfg: EvalConfig | None = None, **more: Any) -> AcceptResult:
    sets = more.pop("sets", SETS)
    given = {"tokenizer": make_tokenizer(), "trained": TRAINED, "folder": folder, **more}
    return measure_served(engine, sets, cfg or config(), **given)


def report(result: AcceptResult, folder: Path) -> tuple[str, str, str]:
    """What the terminal shows at 80 columns (with its colour codes taken off), the coloured text, and the page."""
    stream = io.StringIO()
    write_report(result, folder, Console(file=stream, width=80, force_terminal=True, color_system="standard"))
    plain = (folder / "table.txt").read_text()
    return plain, stream.getvalue(), page_text((folder / "report.html").read_text())


def test_every_phase_runs_every_batch_size_after_a_warm_up_that_is_thrown_away(tmp_path) -> None:
    engine, ticks = FakeEngine(), []
    cfg = config(batch_sizes=[1, 4], serve=["matched", "native"])
    result = measured(engine, tmp_path, cfg, advance=ticks.append)
    keys = ["none", "embedding", "layer_2"]
    assert [entry for entry in engine.log if entry[0] != "run"] == [
        (event, key) for key in keys for event in ("start", "stop")
    ]
    runs = [(key, batch, limit, len(ids)) for _, key, batch, limit, ids in (e for e in engine.log if e[0] == "run")]
    assert runs == [
        run
        for key in keys
        for run in ((key, 1, 8, 1), (key, 1, 24, 5), (key, 1, 24, 3), (key, 4, 8, 4), (key, 4, 24, 5), (key, 4, 24, 3))
    ]
    assert sum(ticks) == count_served(SETS, cfg, TRAINED) == 3 * 2 * 8
    assert [(s.mode, s.batch) for s in result.served] == [("matched", 1), ("matched", 4), ("native", 1), ("native", 4)]
    assert all(bool(s.differences) == (s.mode == "native") for s in result.served)
    assert not (tmp_path / "partial.json").exists()


def test_counts_and_speeds_are_of_the_batch(tmp_path) -> None:
    # 24 tokens in steps of 3 and 1: the verifies keep 2, 0, 2, 0, ...
    engine = FakeEngine(kept={"embedding": [2, 0]})
    served = measured(engine, tmp_path, config(batch_sizes=[2])).served[0]
    made = drafted(list(range(24)), [2, 0], 0.0)
    assert (made.verifies, made.correct) == (11, 12)
    chat = served.sets[0].summary
    assert (chat.verifies, chat.correct, chat.tau) == (55, 60, pytest.approx(1 + 12 / 11))
    assert chat.engine_tau == pytest.approx(24 / 11)
    assert chat.acceptance == [pytest.approx(6 / 11), pytest.approx(1.0)]
    assert chat.batch_seconds == pytest.approx(5 * 11 * 0.12 / 2)
    assert chat.batch_tokens_per_second == pytest.approx(5 * 24 / chat.batch_seconds)
    assert chat.baseline_batch_tokens_per_second == pytest.approx(5 * 24 / (5 * 2.4 / 2))
    assert chat.batch_speedup == pytest.approx(2.4 / 1.32)
    assert chat.tokens_per_second == pytest.approx(23 / 1.32)
    together = served.overall
    assert together.batch_tokens_per_second == pytest.approx(8 * 24 / (8 * 1.32 / 2))
    assert (together.prompts, together.same_tokens, together.gain) == (8, 8, together.batch_speedup)


def test_a_failed_prompt_is_named_and_the_others_count(tmp_path) -> None:
    why = "timeout after 600 s, 0 tokens came"
    engine = FakeEngine(failing={"embedding": {"m-01": why}, "none": {"c-02": "HTTP 500"}})
    result = measured(engine, tmp_path)
    served = result.served[0]
    assert served.failures == {"math/m-01": why}
    assert result.plain_failures == {"batch 1, chat/c-02": "HTTP 500"}
    math, chat = served.sets[1].summary, served.sets[0].summary
    assert (math.prompts, math.asked, math.measured) == (2, 3, "2/3")
    assert [p.id for p in served.sets[1].prompts] == ["m-00", "m-02"]
    assert (math.batch_tokens_per_second, math.gain) == (None, None)  # its clock ran for a prompt without tokens
    assert chat.batch_tokens_per_second is not None and chat.baseline_batch_tokens_per_second is None
    assert next(p for p in served.sets[0].prompts if p.id == "c-02").baseline is None
    assert served.overall.gain is None
    table, _, page = report(result, tmp_path)
    line = f"its own wiring: 7 of 8 prompts; math/m-01: {why}"
    assert line in " ".join(table.split()) and line in page
    assert "without a draft: batch 1, chat/c-02: HTTP 500" in " ".join(table.split())
    assert json.loads((tmp_path / "results.json").read_text())["served"][0]["failures"] == {"math/m-01": why}


def test_the_next_call_tries_only_the_batches_with_failures_again(tmp_path) -> None:
    measured(FakeEngine(failing={"embedding": {"m-01": "timeout"}}), tmp_path)
    again, ticks = FakeEngine(), []
    result = measured(again, tmp_path, advance=ticks.append)
    assert [entry[:2] for entry in again.log if entry[0] == "start"] == [("start", "embedding")]
    assert [entry[4] for entry in again.log if entry[0] == "run"][1:] == [["m-00", "m-01", "m-02"]]
    assert sum(ticks) == 16
    assert result.served[0].overall.prompts == 8 and not result.served[0].failures
    assert not (tmp_path / "partial.json").exists()


@pytest.mark.parametrize("how", ["dies", "interrupted"])
def test_a_crash_loses_nothing_that_was_finished(tmp_path, how) -> None:
    # Batches: warm-up, chat, math without a draft; warm-up, chat with it, and then the end.
    if how == "dies":
        engine = FakeEngine(dies_at=5)
        result = measured(engine, tmp_path)
        why = "not asked: the server is gone: killed"
        assert result.served[0].failures == {f"math/m-0{i}": why for i in range(3)}
        assert [one.summary.name for one in result.served[0].sets] == ["chat"]
        assert result.served[0].overall.measured == "5/8" and result.incomplete == "3 continuations failed"
        table, _, page = report(result, tmp_path)
        line = f"its own wiring: 5 of 8 prompts; math/m-00: {why}"
        assert line in " ".join(table.split()) and line in page
    else:
        engine = FakeEngine(interrupt_at=6)
        with pytest.raises(KeyboardInterrupt):
            measured(engine, tmp_path)
    assert engine.log[-1] == ("stop", "embedding")
    assert len(json.loads((tmp_path / "partial.json").read_text())["runs"]) == 3
    whole = measured(FakeEngine(), tmp_path / "other")
    again = FakeEngine()
    assert measured(again, tmp_path) == whole and whole.incomplete == ""
    assert [entry[4] for entry in again.log if entry[0] == "run"] == [["warm-up 0"], ["m-00", "m-01", "m-02"]]


def test_a_batch_size_that_a_dead_server_never_saw_is_named(tmp_path) -> None:
    # Without a draft: 2 x (warm-up, chat, math). With it: warm-up, chat, math at batch 1, then the end.
    result = measured(FakeEngine(dies_at=9), tmp_path, config(batch_sizes=[1, 4]))
    assert [one.batch for one in result.served] == [1] and result.served[0].failures == {}
    assert result.missing == {"matched, batch 4": "not asked: the server is gone: killed"}
    assert result.incomplete == "nothing of matched, batch 4"
    table, _, page = report(result, tmp_path)
    line = "not measured: matched, batch 4: not asked: the server is gone: killed"
    assert line in " ".join(table.split()) and line in page
    assert AcceptResult.load(tmp_path / "results.json") == result
    whole = measured(FakeEngine(), tmp_path, config(batch_sizes=[1, 4]))
    assert [one.batch for one in whole.served] == [1, 4] and whole.incomplete == ""


def test_a_server_that_was_never_there_is_an_error_and_nothing_else_is_measured(tmp_path) -> None:
    class Absent(FakeEngine):
        @contextlib.contextmanager
        def serve(self, wiring: Wiring | None) -> Iterator[Session]:
            if wiring is None:
                raise ServerGone("the server is gone", where="http://typo:1", why="no connection")
            with super().serve(wiring) as session:
                yield session

    engine = Absent()
    with pytest.raises(ServerGone, match="http://typo:1"):
        measured(engine, tmp_path)
    assert engine.log == []


def test_a_server_that_dies_before_it_told_anything_of_the_draft_is_an_error(tmp_path) -> None:
    with pytest.raises(RedraftError, match=r"the server is gone.*killed.*2 finished batches are kept"):
        measured(FakeEngine(dies_at=3), tmp_path)


def test_finished_batches_of_other_settings_tokens_or_servers_are_not_used(tmp_path) -> None:
    def leave(folder: Path) -> None:
        measured(FakeEngine(dies_at=5), folder, identity={"draft": "1"})

    def started(folder: Path, engine: FakeEngine, **more: Any) -> list[str]:
        measured(engine, folder, **{"identity": {"draft": "1"}, **more})
        return [entry[1] for entry in engine.log if entry[0] == "start"]

    def runs(engine: FakeEngine) -> int:
        return sum(entry[0] == "run" for entry in engine.log)

    leave(tmp_path / "same")
    assert started(tmp_path / "same", FakeEngine()) == ["embedding"]
    for name, more in {
        "settings": {"cfg": config(max_new_tokens=20)},
        "draft": {"identity": {"draft": "2"}},
        "tokens": {"sets": [replace(s, prompts=s.prompts[1:]) for s in SETS]},
    }.items():
        leave(tmp_path / name)
        assert started(tmp_path / name, FakeEngine(), **more) == ["none", "embedding"], name
    leave(tmp_path / "build")
    newer = FakeEngine(build={"embedding": "0.5.24"})
    assert started(tmp_path / "build", newer) == ["embedding"]
    assert runs(newer) == 3  # its warm-up and both sets
    leave(tmp_path / "fewer")
    fewer = FakeEngine()
    assert started(tmp_path / "fewer", fewer, sets=SETS[:1]) == []  # leaving a set out keeps what is finished
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "partial.json").write_text('{"settings": "x", "runs')
    assert started(tmp_path / "torn", FakeEngine()) == ["none", "embedding"]


def test_a_server_that_answers_nothing_is_an_error(tmp_path) -> None:
    hung = FakeEngine(failing={"embedding": {f"m-0{i}": "timeout after 600 s" for i in range(3)}})
    with pytest.raises(
        RedraftError, match=r"answered no prompt \[matched, batch 1, math\]: 3 of 3 failed; m-00: timeo"
    ):
        measured(hung, tmp_path)


def test_a_speculating_server_is_no_baseline(tmp_path) -> None:
    def speculating(key: str, _batch: int, _ask: Ask, made: Generation) -> Generation:
        return drafted(made.tokens, [1], 1.0) if key == "none" else made

    with pytest.raises(RedraftError, match=r"plain decoding speculates .*baseline_url"):
        measured(FakeEngine(change=speculating), tmp_path)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"correct": 99}, "more kept than 2 a verify"),
        ({"verifies": 0}, "ran without the draft"),
        ({"correct_histogram": [1, 0, 0]}, "another number of verifies"),
        ({"proposed": 1}, "more kept than proposed"),
        ({"tokens": [1, 2]}, "2 tokens where about"),
        ({"tokens": []}, "no tokens came back"),
    ],
)
def test_impossible_counts_are_not_pooled(tmp_path, wrong, words) -> None:
    def miscount(key: str, _batch: int, ask: Ask, made: Generation) -> Generation:
        return replace(made, **wrong) if key != "none" and ask.id == "c-03" else made

    served = measured(FakeEngine(change=miscount), tmp_path).served[0]
    assert words in served.failures["chat/c-03"]
    assert served.overall.prompts == 7


def test_the_end_of_a_text_does_not_make_its_counts_impossible(tmp_path) -> None:
    for length in range(1, 24):
        engine = FakeEngine(kept={"embedding": [2]})
        cfg = config(max_new_tokens=length, baseline=False)
        assert measured(engine, tmp_path / str(length), cfg).served[0].failures == {}


def test_lossless_at_batch_1_and_a_share_beyond(tmp_path) -> None:
    def changed(key: str, batch: int, ask: Ask, made: Generation) -> Generation:
        if key == "none" or ask.id not in ("c-01", "c-04"):
            return made
        return replace(made, tokens=[*made.tokens[:6], (made.tokens[6] + 1) % 7, *made.tokens[7:]])

    result = measured(FakeEngine(change=changed), tmp_path, config(batch_sizes=[1, 2]))
    assert [one.overall.same_tokens for one in result.served] == [6, 6]
    beside = result.served[0].sets[0].prompts[1].baseline
    assert beside is not None and beside.first_difference == 6
    table, _, page = report(result, tmp_path)
    assert "6/8" in table
    assert "batch 1: 2 of 8 texts differ from plain greedy decoding (c-01 from token 6 on)" in page
    assert "a draft must not change the text" in page
    assert "at batch 2 (6 are the same). Batches of other shapes round differently" in page
    sampled = measured(FakeEngine(change=changed), tmp_path / "hot", config(temperature=0.7))
    assert sampled.served[0].overall.same_tokens is None


def test_looping_text_is_flagged(tmp_path) -> None:
    def loop(_key: str, _batch: int, ask: Ask, made: Generation) -> Generation:
        return replace(made, tokens=[1, 2] * (len(made.tokens) // 2)) if ask.id == "c-00" else made

    result = measured(FakeEngine(change=loop), tmp_path)
    overall = result.served[0].overall
    assert overall.looping == ["c-00"] and overall.unique_bigrams is not None and overall.unique_bigrams < 1
    table, _, page = report(result, tmp_path)
    assert "1 of 8 texts repeat themselves (c-00)" in page
    assert "its own wiring: 1 of 8 texts go round (c-00); tau without them" in " ".join(table.split())


def test_an_alarm_where_served_parts_from_predicted(tmp_path) -> None:
    plan = {"embedding": [1, 1, 2, 1, 0], "layer_2": [0, 0, 0, 0, 1]}
    commands = [
        "python -m eval.probe live --url http://127.0.0.1:30000 --target targets/a --draft 'runs/a b/served'"
        + "/x" * 40
    ]
    result = measured(
        FakeEngine(kept=plan),
        tmp_path,
        config(serve=["matched", "native"]),
        predicted_acceptance=[0.7, 0.6],
        next_commands=commands,
    )
    assert result.predicted_tau == pytest.approx(2.12)
    (alarm,) = result.alarm
    assert (alarm.mode, alarm.batch) == ("native", 1)
    assert alarm.served == result.served[1].overall.tau < 1.3
    table, coloured, page = report(result, tmp_path)
    for text in (" ".join(table.replace("│", " ").split()), page.replace(" \\ ", " ")):  # the page folds commands
        assert f"served {alarm.served:.2f} tokens per verify" in text
        assert "predicted 2.12" in text
        assert "slot 0 was trained on the embedding" in text
        assert commands[0] in text
    assert f"  {commands[0]}" in table.splitlines()  # whole on one line, to be copied
    assert "ALARM" in table and "\x1b[1;37;41m ALARM" in coloured
    written = json.loads((tmp_path / "results.json").read_text())["alarm"]
    assert written[0]["commands"] == commands and written[0]["predicted"] == pytest.approx(2.12)
    assert AcceptResult.load(tmp_path / "results.json") == result


def test_80_columns_hold_the_table_of_a_server(tmp_path) -> None:
    sets = [one_set(name, 12) for name in ("mtbench", "gsm8k", "humaneval_like", "math500")]
    result = measured(FakeEngine(), tmp_path, config(batch_sizes=[1, 16], serve=["matched", "native"]), sets=sets)
    table, coloured, page = report(result, tmp_path)
    assert "…" not in table and "…" not in coloured
    for served in result.served:
        for one in [*(s.summary for s in served.sets), served.overall]:
            row = next(
                line for line in table.splitlines() if line.split()[:1] == [one.name] or line.split()[1:2] == [one.name]
            )
            assert f"{one.tau:.2f}" in row
    assert max(len(line) for line in table.splitlines()) <= 80
    assert "its own wiring, batch 16" in page
    assert "speculative_num_steps = 2" in page and "sglang-0.5.23" in page and "--note <b>&" in page


def test_names_with_brackets_stay_whole(tmp_path) -> None:
    result = measured(FakeEngine(), tmp_path, sets=[one_set("a[red]", 2)], title="t[b]")
    assert "a[red]" in report(result, tmp_path)[0]


def test_many_proposals_get_a_table_of_positions(tmp_path) -> None:
    result = measured(FakeEngine(), tmp_path, config(batch_sizes=[1, 2]))
    for served in result.served:
        for one in [*(s.summary for s in served.sets), served.overall]:
            one.acceptance = [0.91, 0.82, 0.73, 0.64, 0.55, None, None]
    table = report(replace(result, num_steps=7), tmp_path)[0]
    assert sum(line.split()[-7:] == ["91", "82", "73", "64", "55", "-", "-"] for line in table.splitlines()) == 6
    assert max(len(line) for line in table.splitlines()) <= 80


def test_servers_of_two_builds_are_not_compared_silently(tmp_path) -> None:
    result = measured(FakeEngine(build={"none": "0.5.9"}), tmp_path)
    assert "ran on build 0.5.23 of the server, plain decoding on 0.5.9" in report(result, tmp_path)[2]


def test_numbers_for_a_tracker(tmp_path) -> None:
    logged: list[dict[str, float]] = []
    result = measured(FakeEngine(), tmp_path, config(batch_sizes=[1, 2]), log=logged.append)
    assert logged[0]["eval/matched/batch_2/math/tau"] == result.served[1].sets[1].summary.tau
    assert logged[0]["eval/matched/batch_2/all/batch_speedup"] == result.served[1].overall.batch_speedup
    assert logged[0]["eval/alarms"] == 0
