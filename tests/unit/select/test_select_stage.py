"""The whole selection on synthetic sources: quotas, order, provenance, errors, what is held in memory."""

from __future__ import annotations

import hashlib
import io
import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console
from select_sources import ask, config, read_selected, sentence, source, texts, write_lines

from data_prep.select import sources as sources_module
from data_prep.select.config import SelectConfig, SourceConfig
from data_prep.select.stage import select
from data_prep.select.table import show_selection
from eagle3.atomic import sha256_json
from eagle3.errors import ConfigError, DataError

DOMAINS = {"chat": 300, "code": 120, "math": 60}
LANGUAGES = {"en": 0.6, "zh": 0.3, "de": 0.1}


def labelled(path: Path, seed: int = 0) -> SourceConfig:
    """480 records with their own labels, some short and some long."""
    rng = random.Random(seed)
    records = []
    for domain, count in DOMAINS.items():
        for i in range(count):
            language = rng.choices(list(LANGUAGES), list(LANGUAGES.values()))[0]
            text = sentence(rng, rng.choice([6, 12, 40]))
            records.append(ask(text, "an answer", id=f"{domain}-{i}", topic=domain, lang=language))
    return source(write_lines(path, records), "mixed", domain_key="topic", language_key="lang")


def test_quotas_are_met_exactly(tmp_path: Path) -> None:
    cfg = config(
        labelled(tmp_path / "a.jsonl"), total=100, shortfall="refuse",
        quotas_domain={"chat": 0.4, "code": 0.3, "math": 0.3}, quotas_language={"en": 50, "zh": 35, "de": 15},
        length_buckets={20: 0.3, 50: 0.2, 1000: 0.5},
    )  # fmt: skip
    report = select(cfg, tmp_path / "out", None)
    records = read_selected(tmp_path / "out")
    assert Counter(one["domain"] for one in records) == {"chat": 40, "code": 30, "math": 30}
    assert Counter(one["language"] for one in records) == {"en": 50, "zh": 35, "de": 15}
    lengths = [one["provenance"]["prompt_tokens"] for one in records]
    assert [sum(a < n <= b for n in lengths) for a, b in ((0, 20), (20, 50), (50, 1000))] == [30, 20, 50]
    assert report["selected"] == 100 and report["shortfalls"] == [] and report["moved_between_quotas"] == 0
    assert len({one["id"] for one in records}) == 100
    written = json.loads((tmp_path / "out" / "report.json").read_text())
    assert written == json.loads(json.dumps(report))
    data = (tmp_path / "out" / "selected.jsonl").read_bytes()
    assert written["selected_sha256"] == hashlib.sha256(data).hexdigest()
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["report.json", "selected.jsonl"]


def test_a_rerun_gives_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    cfg = config(labelled(tmp_path / "a.jsonl"), total=50, quotas_domain={"chat": 0.5, "code": 0.5})
    outs = [tmp_path / name for name in ("one", "two", "three")]
    for out, seed in zip(outs, (0, 0, 1), strict=True):
        select(replace(cfg, seed=seed), out, None)
    one, two, three = ((out / "selected.jsonl").read_bytes() for out in outs)
    assert one == two != three
    assert (outs[0] / "report.json").read_bytes() == (outs[1] / "report.json").read_bytes()


PIECES = [sentence(random.Random(i), 12) for i in range(10)]
POOL = PIECES + [text + " again" for text in PIECES] + [text.upper() for text in PIECES[:4]]


@given(
    st.lists(st.lists(st.sampled_from(POOL), max_size=8), min_size=2, max_size=4).filter(any), st.randoms(),
    st.sampled_from(["exact", "near", "none"]),
)  # fmt: skip
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_order_of_sources_files_and_lines_does_not_matter(
    tmp_path: Path, contents: list[list[str]], rng: random.Random, dedupe: str
) -> None:
    def run(name: str, shuffle: bool) -> list[tuple[str, str, str]]:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        entries = []
        for number, lines in enumerate(contents):
            own = list(lines)
            if shuffle:
                rng.shuffle(own)
            path = write_lines(folder / f"{number}.jsonl", [ask(text) for text in own])
            entries.append(source(path, f"s{number}"))
        if shuffle:
            rng.shuffle(entries)
        select(config(*entries, dedupe=dedupe, total=7, quotas_domain={"s0": 3, "*": 4}), folder / "out", None)
        return [
            (one["messages"][0]["content"], one["domain"], one["provenance"]["sha256"])
            for one in read_selected(folder / "out")
        ]

    assert run("straight", False) == run("mixed", True)


def test_exact_duplicates_leave_one_across_sources_and_are_counted_where_they_stood(tmp_path: Path) -> None:
    first = write_lines(tmp_path / "a.jsonl", [ask("How do  I bake BREAD?"), ask("Why is the sky blue?")])
    second = write_lines(
        tmp_path / "b.jsonl", [ask("how do i bake bread?", "like so"), ask("What is 2 + 3?"), ask("What is 2 * 3?")]
    )
    report = select(config(source(first, "a"), source(second, "b"), dedupe="exact"), tmp_path / "out", None)
    records = read_selected(tmp_path / "out")
    assert len(records) == 4 and report["duplicates"] == {"exact": 1, "near": 0}
    assert sum(own["exact duplicates"] for own in report["sources"].values()) == 1
    bread = next(one for one in records if "bread" in one["messages"][0]["content"].lower())
    kept = bread["provenance"]["source"]
    other = {"a": ["b", str(second), 1], "b": ["a", str(first), 1]}[kept]
    assert bread["provenance"]["stands_for"] == {"exact": 1, "near": 0, "members": [other]}


def test_near_duplicates_leave_one_and_say_for_whom_it_stands(tmp_path: Path) -> None:
    rng = random.Random(5)
    bases = [sentence(rng, 30) for _ in range(30)]
    first = write_lines(tmp_path / "a.jsonl", [ask(text) for text in bases])
    second = write_lines(tmp_path / "b.jsonl", [ask(text + " please") for text in bases[:10]])
    entries = (source(first, "a"), source(second, "b"))
    report = select(config(*entries), tmp_path / "out", None)
    records = read_selected(tmp_path / "out")
    assert report["duplicates"] == {"exact": 0, "near": 10} and len(records) == 30
    assert {text.removesuffix(" please") for text in texts(records)} == set(bases)
    assert sum(one["provenance"]["stands_for"]["near"] for one in records) == 10
    assert report["sources"]["a"]["near duplicates"] + report["sources"]["b"]["near duplicates"] == 10
    assert len(read_selected_after(config(*entries, dedupe="exact"), tmp_path)) == 40


def read_selected_after(cfg: SelectConfig, folder: Path) -> list[dict[str, Any]]:
    select(cfg, folder / "again", None)
    return read_selected(folder / "again")


def test_a_shared_system_prompt_makes_no_duplicates(tmp_path: Path) -> None:
    system = {"role": "system", "content": sentence(random.Random(1), 300)}
    records = [{"messages": [system, {"role": "user", "content": sentence(random.Random(i), 8)}]} for i in range(5)]
    path = write_lines(tmp_path / "a.jsonl", records)
    assert len(read_selected_after(config(source(path, "a")), tmp_path)) == 5


def test_provenance_names_the_record_that_it_came_from(tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    folder.mkdir()
    ours = ask("What is a fjord, and where are there some?", "A narrow inlet.", id="q7", license="CC0-1.0", more=[1])
    write_lines(folder / "part-0.jsonl", [ask("something quite different, about birds")])
    write_lines(folder / "part-1.jsonl", ["", ask("an unrelated question on the price of tea"), "", ours])
    select(config(SourceConfig(path=str(folder), name="web")), tmp_path / "out", None)
    one = next(r for r in read_selected(tmp_path / "out") if r["id"] == "web/q7")
    provenance = one["provenance"]
    wanted = {"source": "web", "file": str(folder / "part-1.jsonl"), "record": 2, "sha256": sha256_json(ours)}
    assert {key: provenance[key] for key in wanted} == wanted
    assert provenance["license"] == "CC0-1.0" and provenance["id"] == "q7" and len(provenance["cluster"]) == 32
    assert one["language"] == "en" and provenance["language_found"].startswith("detected ")
    assert one["messages"] == ours["messages"][:1] and one["domain"] == "web"


def test_languages_are_detected_stated_or_undetermined(tmp_path: Path) -> None:
    lines = [
        ask("请用简单的话解释什么是通货膨胀，并举一个例子。"),
        ask("Was ist der Unterschied zwischen Wetter und Klima?"),
        ask("Explain what a coral atoll is and how it forms."), ask("12 + 30 = ?"), ask("whatever it says", lang="xx"),
    ]  # fmt: skip
    path = write_lines(tmp_path / "a.jsonl", lines)
    records = read_selected_after(config(SourceConfig(path=str(path), name="a", language_key="lang")), tmp_path)
    found = {one["provenance"]["record"]: (one["language"], one["provenance"]["language_found"][:3]) for one in records}
    assert found == {1: ("zh", "det"), 2: ("de", "det"), 3: ("en", "det"), 4: ("und", "det"), 5: ("xx", "rec")}
    with pytest.raises(ConfigError, match="detect_languages"):
        select(config(SourceConfig(path=str(path), name="a"), detect_languages=["klingon"]), tmp_path / "no", None)


def test_answers_are_stripped_to_the_last_question_or_kept(tmp_path: Path) -> None:
    def turns(*roles: str) -> dict[str, Any]:
        return {
            "messages": [{"role": role, "content": f"{role} says thing number {i}"} for i, role in enumerate(roles)]
        }

    lines = [
        turns("system", "user", "assistant", "user", "assistant"), turns("user", "assistant", "tool"),
        turns("user", "assistant", "user", "user"), turns("system", "assistant"), turns("assistant", "tool"),
    ]  # fmt: skip
    cfg = config(source(write_lines(tmp_path / "a.jsonl", lines), "a"), dedupe="none")
    stripped = {
        one["provenance"]["record"]: [m["role"] for m in one["messages"]] for one in read_selected_after(cfg, tmp_path)
    }
    assert stripped == {
        1: ["system", "user", "assistant", "user"],
        2: ["user", "assistant", "tool"],
        3: ["user", "assistant", "user", "user"],
    }
    kept = read_selected_after(replace(cfg, answers="keep"), tmp_path)
    assert [[m["role"] for m in one["messages"]] for one in kept] == [
        ["system", "user", "assistant", "user", "assistant"]
    ]
    report = select(replace(cfg, answers="keep"), tmp_path / "x", None)
    assert report["sources"]["a"]["no answer at its end"] == 2 and report["sources"]["a"]["no user turn"] == 2


def test_tools_travel_with_the_conversation(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    path = write_lines(tmp_path / "a.jsonl", [ask("Look it up for me, please", tools=[tool])])
    assert read_selected_after(config(source(path, "a")), tmp_path)[0]["tools"] == [tool]


def test_weights_and_limits(tmp_path: Path) -> None:
    rng = random.Random(0)
    paths = [write_lines(tmp_path / f"{n}.jsonl", [ask(sentence(rng)) for _ in range(400)]) for n in "abc"]
    entries = [source(path, path.stem, domain="d") for path in paths]
    entries[0].weight, entries[2].limit = 4.0, 30
    report = select(config(*entries, total=200), tmp_path / "out", None)
    got = {name: own["selected"] for name, own in report["sources"].items()}
    assert sum(got.values()) == 200 and got["a"] > 2.5 * got["b"] > 0 and 0 < got["c"] <= 30
    assert report["sources"]["c"]["over the source's limit"] == 370


def test_shortfalls_are_refused_in_one_line_and_nothing_is_written(tmp_path: Path) -> None:
    entry = labelled(tmp_path / "a.jsonl")
    cfg = config(entry, total=200, quotas_domain={"math": 150, "code": 50}, shortfall="refuse")
    with pytest.raises(DataError) as caught:
        select(cfg, tmp_path / "out", None)
    line = str(caught.value)
    assert "domain math: 60 of 150 (the sources hold 60)" in line and "select.shortfall=report" in line
    assert "\n" not in line and list((tmp_path / "out").iterdir()) == []
    report = select(replace(cfg, shortfall="report"), tmp_path / "out", None)
    quotas = {one["name"]: (one["wanted"], one["got"]) for one in report["quotas"]["domain"]}
    assert report["selected"] == 180 and quotas == {"math": (150, 60), "code": (50, 120)}
    assert [one["kind"] for one in report["shortfalls"]] == ["total", "domain"]


def test_quotas_that_block_each_other_say_so(tmp_path: Path) -> None:
    rng = random.Random(9)
    lines = [
        ask(sentence(rng), topic=t, lang=g)
        for t, g, n in (("a", "en", 50), ("b", "en", 50), ("b", "zh", 5))
        for _ in range(n)
    ]
    entry = source(write_lines(tmp_path / "a.jsonl", lines), "s", domain_key="topic", language_key="lang")
    cfg = config(entry, total=40, quotas_domain={"a": 20, "b": 20}, quotas_language={"en": 20, "zh": 20})
    report = select(cfg, tmp_path / "out", None)
    short = {one["name"]: one["why"] for one in report["shortfalls"]}
    assert short == {"zh": "the sources hold 5"} and report["selected"] == 40
    assert report["moved_between_quotas"] == 15


def test_what_has_no_quota_or_does_not_fit_is_counted(tmp_path: Path) -> None:
    rng = random.Random(3)
    lines = [ask(sentence(rng), topic="wanted"), ask(sentence(rng), topic="other"), ask("ab", topic="wanted")]
    lines += [ask(sentence(rng, 400), topic="wanted"), ask("   ", topic="wanted")]
    entry = source(write_lines(tmp_path / "a.jsonl", lines), "s", domain_key="topic")
    report = select(config(entry, quotas_domain={"wanted": 1.0}, max_tokens=200), tmp_path / "out", None)
    own = report["sources"]["s"]
    assert (own["domain without a quota"], own["shorter than min_chars"], own["too long"], own["selected"]) == (
        1,
        2,
        1,
        1,
    )
    assert own["read"] == 5


BAD = {
    "not json": ("{bad", "not a JSON line"),
    "list": ("[1, 2]", "record is not an object"),
    "no messages": ('{"text": "x"}', "record without messages"),
    "role": ('{"messages": [{"role": "wizard", "content": "x"}]}', "unknown role"),
    "image": ('{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "content is not text"),
    "unicode": ('{"messages": [{"role": "user", "content": "half \\ud800 a pair"}]}', "surrogates not allowed"),
    "label": ('{"messages": [{"role": "user", "content": "some text"}], "topic": 3}', "`topic` is no text"),
}


@pytest.mark.parametrize(("line", "what"), BAD.values(), ids=BAD.keys())
def test_bad_records_are_named_and_counted_or_refused(tmp_path: Path, line: str, what: str) -> None:
    path = write_lines(tmp_path / "a.jsonl", [ask("one good question"), "", line, ask("another good question")])
    cfg = config(source(path, "a", domain_key="topic"), dedupe="exact")
    report = select(cfg, tmp_path / "out", None)
    assert report["selected"] == 2 and report["sources"]["a"]["bad"] == 1
    assert len(report["bad_records"]) == 1
    assert what in report["bad_records"][0] and f"{path}, record 2" in report["bad_records"][0]
    with pytest.raises(DataError, match=what) as caught:
        select(replace(cfg, on_bad_record="refuse"), tmp_path / "refused", None)
    assert "record 2" in str(caught.value) and not list((tmp_path / "refused").iterdir())


class Template:
    """A tokenizer whose template refuses a word; one token a blank."""

    def apply_chat_template(self, messages: list[dict], add_generation_prompt: bool, **_: Any) -> str:
        if any("forbidden" in m["content"] for m in messages):
            raise ValueError("no such word")
        return " ".join(m["content"] for m in messages) + (" answer:" if add_generation_prompt else "")

    def __call__(self, batch: list[str], **_: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [list(range(len(text.split()))) for text in batch]}


def test_lengths_are_those_of_the_tokenizer_and_its_template(tmp_path: Path) -> None:
    lines = [ask("three words here", "and an answer"), ask("a forbidden word"), ask("five words are too many")]
    cfg = config(source(write_lines(tmp_path / "a.jsonl", lines), "a"), length_buckets={4: 0.5, 5: 0.5}, total=2)
    report = select(cfg, tmp_path / "out", Template())
    assert [one["provenance"]["prompt_tokens"] for one in read_selected(tmp_path / "out")] == [4]
    assert report["lengths_in"] == "tokens" and report["sources"]["a"]["too long"] == 1
    assert "the chat template refuses" in report["bad_records"][0] and "record 2" in report["bad_records"][0]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sources": []}, "select.sources"),
        ({"total": 0}, "select.total"),
        ({"quotas_domain": {"a": 0.5, "b": 0.4}}, "select.quotas_domain"),
        ({"quotas_language": {"a": -1, "b": 2}}, "select.quotas_language"),
        ({"length_buckets": {0: 0.5, 8: 0.5}}, "select.length_buckets"),
        ({"shortfall": "maybe"}, "select.shortfall"),
        ({"dedupe": "fuzzy"}, "select.dedupe"),
        ({"answers": "some"}, "select.answers"),
        ({"on_bad_record": "cry"}, "select.on_bad_record"),
        ({"near_threshold": 1.5}, "select.near_threshold"),
        ({"exclude_threshold": 0.0}, "select.exclude_threshold"),
        ({"shingle": 0}, "select.shingle"),
        ({"permutations": 4}, "select.permutations"),
        ({"min_coverage": 2.0}, "select.min_coverage"),
        ({"sources": [SourceConfig(path="x", name="a/b")]}, r"select.sources\[0\].name"),
        ({"sources": [SourceConfig(path="x", name="a", weight=0)]}, r"select.sources\[0\].weight"),
        ({"sources": [SourceConfig(name="a")]}, r"select.sources\[0\].path"),
        ({"sources": [SourceConfig(path="x", name="a"), SourceConfig(path="y", name="a")]}, "select.sources"),
    ],
)
def test_wrong_settings_name_their_field(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    cfg = replace(config(SourceConfig(path="x", name="a")), **settings)
    with pytest.raises(ConfigError, match=words):
        select(cfg, tmp_path / "out", None)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "what"), [("none.jsonl", "not found"), ("a.csv", "unknown kind"), ("empty", "no conv")]
)
def test_sources_that_cannot_be_read(tmp_path: Path, name: str, what: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(DataError, match=what):
        select(config(source(tmp_path / name, "a")), tmp_path / "out", None)


def test_nothing_left_to_choose_says_why(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", ["{bad", ask("x")])
    with pytest.raises(DataError, match=r"nothing to choose from.*2 records read.*not a JSON line"):
        select(config(source(path, "a")), tmp_path / "out", None)


def test_json_lists_sharegpt_and_saved_datasets(tmp_path: Path) -> None:
    from datasets import Dataset

    rng = random.Random(11)
    said = [sentence(rng) for _ in range(6)]
    (tmp_path / "a.json").write_text(json.dumps([{"conversations": [{"from": "human", "value": t}]} for t in said[:2]]))
    Dataset.from_list([ask(t, "yes") for t in said[2:]]).save_to_disk(str(tmp_path / "saved"))
    entries = (source(tmp_path / "a.json", "list"), source(tmp_path / "saved", "hf"))
    records = read_selected_after(config(*entries), tmp_path)
    assert sorted(texts(records)) == sorted(said)
    assert {
        (r["provenance"]["file"], r["provenance"]["record"]) for r in records if r["provenance"]["source"] == "hf"
    } == {(str(tmp_path / "saved"), n) for n in (1, 2, 3, 4)}


def test_ids_stay_different_when_sources_repeat_them(tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    folder.mkdir()
    for part in range(3):
        write_lines(folder / f"{part}.jsonl", [ask(sentence(random.Random(part)), id=7)])
    write_lines(folder / "3.jsonl", [ask(sentence(random.Random(2)), id=7)])  # the very record of part 2
    records = read_selected_after(config(source(folder, "s"), dedupe="none"), tmp_path)
    ids = [one["id"] for one in records]
    assert len(set(ids)) == 4 and ids[0] == "s/7" and all(name.startswith("s/7") for name in ids)


class Stop(Exception):
    pass


def test_a_killed_run_leaves_the_old_files_and_a_rerun_gives_the_same_bytes(tmp_path: Path) -> None:
    cfg, out = config(labelled(tmp_path / "a.jsonl"), total=50), tmp_path / "out"
    select(cfg, out, None)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    for stop_at in (3, 479, 490, 529):  # in the first pass, and in the second
        seen = 0

        def advance(count: int, stop: int = stop_at) -> None:
            nonlocal seen
            seen += count
            if seen >= stop:
                raise Stop

        with pytest.raises(Stop):
            select(replace(cfg, seed=9), out, None, advance)
        assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    left = out / ".work.tmp"
    left.mkdir()
    (left / "signatures").write_bytes(b"half")  # of a run that was killed outright
    select(cfg, out, None)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_a_source_that_changes_between_the_passes_is_refused(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [ask(sentence(random.Random(i))) for i in range(4)])

    def advance(count: int) -> None:
        nonlocal read
        read += count
        if read == 4:
            write_lines(path, [ask(sentence(random.Random(90 + i))) for i in range(4)])

    read = 0
    with pytest.raises(DataError, match=r"a source changed while it was read.*the record differs"):
        select(config(source(path, "a")), tmp_path / "out", None, advance)
    assert not list((tmp_path / "out").iterdir())


def test_records_are_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 3000 records read, no more than one batch is alive at a time, and only the chosen are decoded again."""
    rng = random.Random(0)
    path = write_lines(tmp_path / "a.jsonl", [ask(sentence(rng)) for _ in range(3000)])
    alive = peak = made = 0

    class Counted(sources_module.Raw):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            nonlocal alive, peak, made
            super().__init__(*args, **kwargs)
            alive, made = alive + 1, made + 1
            peak = max(peak, alive)

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    monkeypatch.setattr(sources_module, "Raw", Counted)
    select(config(source(path, "a"), total=40, dedupe="exact"), tmp_path / "out", None)
    assert made == 3000 + 40 and peak <= 256 + 2


def test_the_table_names_what_was_wanted_got_and_left_out(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "bad.jsonl", ["{bad [x]"] * 5)
    cfg = config(
        labelled(tmp_path / "a.jsonl"), source(path, "bad"), total=200, quotas_domain={"math": 0.75, "chat": 0.25},
        length_buckets={100: 0.5, 1000: 0.5},
    )  # fmt: skip
    report = select(cfg, tmp_path / "out", None)
    buffer = io.StringIO()
    show_selection(report, Console(file=buffer, width=100))
    shown = buffer.getvalue()
    assert "selected 200 of 200" in shown and "60 of 150" in shown and "short: domain math" in shown
    assert "stand in for quotas" in shown and shown.count("bad record:") == 3 and "2 more bad records" in shown
    assert "domain without a quota 120" in shown and "101-1000" in shown
