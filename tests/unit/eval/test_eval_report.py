"""The page, the picture, the table, and runs side by side."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from eval_models import make_wiring
from rich.console import Console

from eagle3.wiring import Site, Wiring
from eval.checks import checks, probe_beside
from eval.compare import load_run, main, named_apart
from eval.curves import Line, line_chart, spread
from eval.matrix.cells import matrix
from eval.matrix.measure import Measured
from eval.matrix.page import matrix_page
from eval.page import folded
from eval.report import render_page, write_report
from eval.results import AcceptResult
from eval.series import series_of
from eval.statements import cautions
from eval.training import training_of
from eval.wiring_picture import wiring_svg, wiring_words

VOID = {"meta", "br", "path", "circle", "rect", "input", "img", "link"}


LOADING = {"src", "srcset", "href", "xlink:href", "action", "formaction", "poster", "data", "background", "ping"}
BLOCKS = {"div", "section", "p", "ul", "ol", "dl", "table", "pre", "h1", "h2", "h3", "details", "figure", "header"}


class Balance(HTMLParser):
    """Collects text; checks that tags close in order and nest as HTML allows, and that no attribute loads anything."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag, attrs) -> None:  # type: ignore[no-untyped-def]
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), (tag, names)
        assert not LOADING & set(names), (tag, names)
        assert not (tag in BLOCKS and "p" in self.open), f"<{tag}> within <p>"
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag) -> None:  # type: ignore[no-untyped-def]
        if tag not in VOID:
            assert self.open.pop() == tag
        if tag in ("td", "th"):
            self.text += " "

    def handle_data(self, data) -> None:  # type: ignore[no-untyped-def]
        self.text += data


def page_text(page: str) -> str:
    parser = Balance()
    parser.feed(page)
    assert parser.open == []
    return " ".join(parser.text.split())


def test_everything_is_written_and_self_contained(tmp_path, accept_result) -> None:
    console = Console(record=True, width=80, file=open("/dev/null", "w"))  # noqa: SIM115
    page = write_report(accept_result, tmp_path / "eval", console)
    files = {path.name for path in (tmp_path / "eval").iterdir()}
    assert files == {"results.json", "table.txt", "accept.png", "report.html"}
    assert (tmp_path / "eval" / "accept.png").read_bytes().startswith(b"\x89PNG")
    html = page.read_text()
    assert not re.search(r"(?:src|href)\s*=|url\(|@import|<script|<link|https?://", html)
    assert "default-src 'none'" in html  # a browser refuses what slips past this
    assert "prefers-color-scheme: dark" in html
    table = (tmp_path / "eval" / "table.txt").read_text()
    assert f"{accept_result.served[0].overall.tau:.3f}" in table
    assert max(len(line) for line in console.export_text().splitlines()) <= 80
    assert "…" not in table


def test_the_page_says_what_matters(accept_result) -> None:
    overall = accept_result.served[0].overall
    text = page_text(render_page([accept_result], accept_result.title))
    assert f"with {overall.tau:.2f} tokens per verify step, of at most 3" in text
    assert f"{accept_result.predicted_tau:.2f}" in text
    assert "fed other tensors than it was trained on" in text
    for line in accept_result.served[1].differences:
        assert line in text
    assert "python train/run.py conf=x a='<b>'" in text
    assert "Slot 1 is layer 4: what enters decoder layer 4" in text
    assert "slot 0 was trained on the embedding" in text


def test_texts_and_names_are_escaped(accept_result) -> None:
    hostile = replace(accept_result, title="<script>alert(1)</script>", draft='"><img src=x>')
    html = render_page([hostile], hostile.title)
    assert "<script" not in html
    assert "<img" not in html


def test_missing_figures_do_not_stop_the_page(accept_result) -> None:
    bare = replace(accept_result, predicted_acceptance=None, commands=[], served=accept_result.served[:1])
    for one in [bare.served[0].overall, *[s.summary for s in bare.served[0].sets]]:
        one.speedup = one.tokens_per_second = one.baseline_tokens_per_second = one.same_tokens = None
        one.acceptance = one.reach = [None, None]
    text = page_text(render_page([bare], "bare"))
    assert "no validation figures" in text
    assert "None" not in text


def test_cautions(accept_result) -> None:
    (one, _) = series_of([accept_result])
    assert "Only" in " ".join(cautions(one))
    prompt = one.served.sets[0].prompts[0]
    assert prompt.baseline is not None
    prompt.baseline.same_tokens, prompt.baseline.top_gap = False, 1e-6
    assert any("rounding decides" in line for line in cautions(one))
    prompt.baseline.top_gap = 3.0
    assert any("a draft must not change the text" in line for line in cautions(one))
    one.served.overall.looping = ["p7"]
    assert any("p7" in line and "repeat themselves" in line for line in cautions(one))


def test_wiring_picture_marks_what_differs() -> None:
    same = wiring_svg(make_wiring(0, 2, 4), make_wiring(0, 2, 4))
    assert "tap off" not in same
    assert same.count("<rect") == 8
    other = wiring_svg(make_wiring(0, 2, 4), make_wiring(0, 4, 5))
    assert other.count('circle class="tap off"') == other.count("differs from the other side") == 4
    assert other.count('circle class="tap"') == 2
    assert "teacher: final, after layer 7" in other
    words = wiring_words(make_wiring(0, 3))
    assert words[0].startswith("Slot 0 is the embedding")
    assert "layer 2 puts out (hidden_states[3])" in words[1]
    assert words[2] == "The teacher is what leaves layer 7, before the final norm."


def test_labels_do_not_overlap() -> None:
    placed = sorted(spread([100.0, 101.0, 99.0, 300.0], 0, 400, 26))
    assert all(b - a >= 26 for a, b in pairwise(placed))
    assert max(spread([398.0, 399.0], 0, 400, 26)) <= 400


def test_runs_side_by_side(tmp_path, accept_result, capsys) -> None:
    write_report(accept_result, tmp_path / "a" / "eval")
    write_report(replace(accept_result, title="other"), tmp_path / "b" / "eval")
    assert main([str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(tmp_path / "out")]) == 0
    text = page_text((tmp_path / "out" / "report.html").read_text())
    assert "tiny against other" in text
    for label in ("tiny, its own wiring", "other, the engine's default wiring"):
        assert label in text
    assert (tmp_path / "out" / "accept.png").exists()
    assert "report:" in capsys.readouterr().out


def test_runs_measured_differently_are_refused(tmp_path, accept_result, capsys) -> None:
    write_report(accept_result, tmp_path / "a" / "eval")
    write_report(replace(accept_result, title="other", num_steps=5), tmp_path / "b" / "eval")
    out = str(tmp_path / "out")
    assert main([str(tmp_path / "a"), str(tmp_path / "b"), "--out", out]) == 2
    assert "num_steps is 2 and 5" in capsys.readouterr().err
    path = tmp_path / "b" / "eval" / "results.json"
    other = AcceptResult.load(tmp_path / "a" / "eval" / "results.json")
    other.served[0].sets[0].key = "another"
    other.save(path)
    assert main([str(tmp_path / "a"), str(tmp_path / "b"), "--out", out]) == 2
    assert "different prompts" in capsys.readouterr().err
    assert main([str(tmp_path / "none"), "--out", out]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert "none" in lines[0]


def test_equal_titles_are_told_apart(tmp_path, accept_result) -> None:
    pair = named_apart([accept_result, accept_result], [tmp_path / "x", tmp_path / "y"])
    assert [one.title for one in pair] == ["tiny (x)", "tiny (y)"]


@pytest.mark.parametrize("sites", [(2, 4, 5), (0, 4, 2)])
def test_labels_say_when_own_is_native(accept_result, sites) -> None:
    own = replace(accept_result, trained=make_wiring(*sites).to_dict(), served=accept_result.served[:1])
    assert ("default" in series_of([own])[0].label) == (sites == (2, 4, 5))


def test_one_way_of_serving_has_its_sentence(accept_result) -> None:
    one = replace(accept_result, served=accept_result.served[:1])
    overall = one.served[0].overall
    assert f"The draft emits {overall.tau:.2f} tokens per verify step, of at most 3" in page_text(
        render_page([one], "one")
    )


def test_headings_go_down_one_level_at_a_time(accept_result) -> None:
    for results in ([accept_result], [replace(accept_result, served=accept_result.served[:1])]):
        levels = [int(level) for level in re.findall(r"<h([1-6])", render_page(results, "x"))]
        assert levels[0] == 1 and levels.count(1) == 1
        assert all(later <= earlier + 1 for earlier, later in pairwise(levels))


def test_results_of_an_earlier_release_still_make_a_page(tmp_path, accept_result) -> None:
    accept_result.save(tmp_path / "results.json")
    data = json.loads((tmp_path / "results.json").read_text())
    for later in ("allowed_gap", "training", "recipes", "probe"):
        del data[later]
    (tmp_path / "results.json").write_text(json.dumps(data))
    text = page_text(render_page([load_run(tmp_path)], "x"))
    assert "Draft vocabulary" not in text and "Loss" not in text
    assert "no alarm was raised" in text


def test_training_survives_the_file(tmp_path, accept_result, trained) -> None:
    accept_result.training = trained
    accept_result.save(tmp_path / "results.json")
    assert AcceptResult.load(tmp_path / "results.json").training == trained


def test_the_page_shows_how_it_was_trained(accept_result, trained) -> None:
    page = render_page([replace(accept_result, training=trained)], "x")
    text = page_text(page)
    assert page.count('<svg class="chart"') == 2
    assert "Draft vocabulary: 640 of 1,280 tokens" in text
    assert "domain code 16 534" in text and "below the bound" in text
    assert "training 147 12,079 5,672" in text


def test_points_are_means_weighted_by_what_they_rest_on() -> None:
    rows = [
        {
            "kind": "train",
            "step": k + 1,
            "losses": [float(k)],
            "acc": [k / 10, 1.0 - k / 10],
            "supervised": 10 * (k + 1),
        }
        for k in range(8)
    ]
    made = training_of([*rows, {"kind": "val", "step": 8, "losses": [3.0], "acc": [0.5, 0.25]}, {"kind": "eval"}])
    assert made.train.rows == 4 and made.train.steps == [4, 8]
    assert made.train.loss == [[2.0, round((4 * 50 + 5 * 60 + 6 * 70 + 7 * 80) / 260, 5)]]
    tried = [k / 10 * 10 * (k + 1) for k in range(4)]  # rows that were right at the first position
    assert made.train.accuracy[1][0] == round(sum((1 - k / 10) * n for k, n in enumerate(tried)) / sum(tried), 5)
    assert (made.validation.steps, made.validation.accuracy) == ([8], [[0.5], [0.25]])


def test_what_was_never_tried_leaves_a_gap() -> None:
    rows = [{"kind": "train", "step": 1, "losses": [2.0, 0.0], "acc": [0.0, 0.0], "supervised": 5}]
    assert training_of(rows).train.accuracy == [[0.0], [None]]
    assert training_of([]).train.steps == []


def test_a_chart_draws_gaps_names_and_values() -> None:
    svg = line_chart([Line("a<b", [1, 2, 3, 4], [0.1, None, 0.3, 0.4], [(4, 0.5)])], "words", "step", "share", True)
    path = re.search(r'class="line l0" d="([^"]+)"', svg)
    assert path is not None and path.group(1).count("M") == 2 and path.group(1).count("L") == 1
    assert "a&lt;b" in svg and "a<b" not in svg
    assert "step 2; a&lt;b: not known" in svg and "step 3; a&lt;b: 30.0%" in svg
    assert svg.count('class="ring') == 1
    assert line_chart([Line("a", [1], [None])], "", "", "") == ""
    assert "step 5; a: 2.000" in line_chart([Line("a", [5], [2.0])], "", "step", "")


def verdicts(result: AcceptResult) -> list[dict[str, str]]:
    return [{check.question: check.verdict for check in checks(one)} for one in series_of([result])]


def test_the_verdicts_tell_agreement_from_difference(accept_result) -> None:
    own, native = verdicts(replace(accept_result, allowed_gap=0.3))
    assert own == {
        "Tensors fed to the draft": "agrees", "Accept length": "agrees", "Texts, against plain decoding": "agrees",
    }  # fmt: skip
    assert native["Tensors fed to the draft"] == "differs"
    accept_result.served[0].overall.same_tokens = 1
    assert verdicts(accept_result)[0]["Texts, against plain decoding"] == "differs"
    assert verdicts(replace(accept_result, predicted_acceptance=None))[0]["Accept length"] == "not known"


def test_a_servers_answers_stand_beside_what_was_asked(accept_result) -> None:
    facts = {
        "ids": [0, 3, 1], "convention": "sglang-0.5.23", "convention_from": "its source",
        "resolved": {"speculative_num_steps": 2, "speculative_algorithm": "EAGLE"},
    }  # fmt: skip
    served = replace(accept_result.served[0], facts=facts)
    found = verdicts(replace(accept_result, served=[served]))[0]
    assert found["Layer ids"] == "agrees" and found["Proposals a verify step"] == "agrees"
    assert found["Speculative algorithm"] == "differs"
    assert found["Tensors as measured by the probe"] == "not known"
    text = page_text(render_page([replace(accept_result, served=[served])], "x"))
    assert "layer ids [0, 3, 1]" in text and "by the convention sglang-0.5.23, from its source" in text


@pytest.mark.parametrize(
    ("said", "word"), [("agrees", "agrees"), ("disagrees", "differs"), ("cannot tell", "not known")]
)
def test_a_probe_beside_the_results_is_shown(tmp_path, accept_result, said, word) -> None:
    accept_result.served[0].facts = {"ids": [0, 3, 1]}
    (tmp_path / "probe.json").write_text(json.dumps({"verdict": said, "what": "it feeds these", "reasons": ["why so"]}))
    accept_result.probe = probe_beside(tmp_path / "results.json")
    accept_result.save(tmp_path / "results.json")
    loaded = AcceptResult.load(tmp_path / "results.json")
    assert f"it feeds these why so {word}" in page_text(render_page([loaded], "x"))
    (tmp_path / "probe.json").write_text("")
    assert probe_beside(tmp_path / "results.json") == {}


def test_a_long_command_is_folded_and_still_the_same_command() -> None:
    command = "python -m sglang.launch_server --model-path '/a b'/c --port 30000 --flag=x 'stages=[a,b]' " * 3
    command = command.strip()
    lines = folded(command).splitlines()
    assert len(lines) > 2 and max(map(len, lines)) <= 92
    assert all(line.endswith(" \\") for line in lines[:-1])
    assert shlex.split(folded(command).replace("\\\n", " ")) == shlex.split(command)
    assert "'/a b'/c" in folded(command)  # quotes stay as they were written
    assert not any(line.rstrip(" \\").endswith(("--port", "--model-path")) for line in lines)
    assert folded("say 'it " * 30) == "say 'it " * 30


def test_the_matrix_has_a_page() -> None:
    wiring = Wiring((Site(3), Site(31), Site(59)), "final", "deepseek_v3", 61, 64)
    cells = matrix({"native": wiring})
    right = next(cell for cell in cells if cell.verdict == "right")
    measured = {right.key: Measured(right.key, 1.5, 1.4, 1.6, 40, ((1, 2),), 1)}
    text = page_text(matrix_page(cells, measured, ["a <line>"], ["a contradiction"], ["python -m eval.matrix x"]))
    assert "1.500 (1.40-1.60)" in text and "a <line>" in text and "1 contradictions were found" in text
    assert text.count("wrong") >= sum(cell.verdict == "wrong" for cell in cells)
    assert "No server was started" in page_text(matrix_page(cells, {}, [], []))
