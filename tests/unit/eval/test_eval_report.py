"""The page, the picture, the table, and runs side by side."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from eval_models import make_wiring
from rich.console import Console

from eval.compare import main, named_apart
from eval.report import cautions, render_page, write_report
from eval.results import AcceptResult
from eval.series import series_of
from eval.wiring_picture import _spread, wiring_svg, wiring_words

VOID = {"meta", "br", "path", "circle", "rect", "input", "img", "link"}


class Balance(HTMLParser):
    """Collects text and checks that tags close in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag, attrs) -> None:  # type: ignore[no-untyped-def]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag) -> None:  # type: ignore[no-untyped-def]
        if tag not in VOID:
            assert self.open.pop() == tag

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
    assert "prefers-color-scheme: dark" in html
    table = (tmp_path / "eval" / "table.txt").read_text()
    assert f"{accept_result.served[0].overall.tau:.3f}" in table
    assert max(len(line) for line in console.export_text().splitlines()) <= 80
    assert "…" not in table


def test_the_page_says_what_matters(accept_result) -> None:
    overall = accept_result.served[0].overall
    text = page_text(render_page([accept_result], accept_result.title))
    assert f"emits {overall.tau:.2f} tokens per verify step, of at most 3" in text
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
    assert other.count('circle class="tap off"') == 4
    assert other.count('circle class="tap"') == 2
    words = wiring_words(make_wiring(0, 3))
    assert words[0].startswith("Slot 0 is the embedding")
    assert "layer 2 puts out (hidden_states[3])" in words[1]
    assert words[2] == "The teacher is what leaves layer 7, before the final norm."


def test_labels_do_not_overlap() -> None:
    placed = sorted(_spread([100.0, 101.0, 99.0, 300.0], 0, 400))
    assert all(b - a >= 26 for a, b in pairwise(placed))
    assert max(_spread([398.0, 399.0], 0, 400)) <= 400


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
