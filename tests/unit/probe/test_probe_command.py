"""The command line: help with an example for each probe, bad input in one line, and what `static` is asked."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import eval.probe.commands as commands
from eagle3.wiring import Wiring
from eval.probe.__main__ import main
from eval.probe.verdict import Verdict, cannot_tell, show

PROBES = ("static", "live", "draft", "store", "ranks")


@pytest.mark.parametrize("name", PROBES)
def test_help_shows_an_example_that_parses(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    example = text.split("examples:\n")[1].replace("\\\n", " ").splitlines()[0]
    assert main([*example.split()[3:], "--json"]) == 2  # its files are not here: refused for that, not by the parser
    assert json.loads(capsys.readouterr().out)["verdict"] == "cannot tell"


def test_no_probe_and_unknown_probe_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["unknown"], ["live", "--url", "http://x", "--target", "t", "--prompts", "0"]):
        assert main(words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and all(line.startswith("error: bad command line") for line in lines)
    assert "not a positive number" in lines[2]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["store", "nowhere", "--target", "nowhere"], "file not found"),
        (["live", "--url", "http://x", "--target", "nowhere"], "target folder not found"),
        (["ranks", "--dump", "a", "--dump", "b", "--url", "c"], "not a dump"),
        (["ranks", "--url", "http://x", "--url", "http://y"], "add --target FOLDER"),
        (["static", "tree"], "no model type is known"),
        (["static", "tree", "--model-type", "llama", "--wiring", "native"], "the target's depth is not known"),
        (["static", "tree", "--draft", "d", "--wiring", "native"], "two expectations"),
    ],
)
def test_bad_input_is_one_line(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    streams = capsys.readouterr()
    assert line in streams.err and streams.err.count("\n") == 1 and not streams.out


@pytest.fixture
def static(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the static probe is asked."""
    asked: list[Any] = []

    def probe(tree: Path, model_type: str, architecture: str, wiring: Wiring | None, cuda_graphs: bool) -> Verdict:
        asked.append((tree, model_type, architecture, wiring, cuda_graphs))
        return Verdict(True, "fine", [], "")

    monkeypatch.setattr(commands, "probe_static", probe)
    return asked


def test_static_takes_the_wiring_from_words_target_or_draft(
    static: list[Any], target: Path, fitted: Callable[..., Path], wire: Callable[..., Wiring]
) -> None:
    folder = fitted(wire(2, 4, 6))
    kimi = ["--model-type", "kimi_k25", "--num-layers", "61", "--wiring", "native", "--disable-cuda-graph"]
    assert main(["static", "tree", *kimi]) == 0
    assert main(["static", "tree", "--target", str(target), "--wiring", "layer_1,layer_2,layer_3"]) == 0
    assert main(["static", "tree", "--draft", str(folder), "--architecture", "Own"]) == 0
    assert main(["static", "tree", "--model-type", "llama"]) == 0
    by_words, by_target, by_draft, without = static
    assert by_words[1] == "kimi_k25" and by_words[3].names == ["layer_2", "layer_30", "layer_58"]
    assert by_words[4] is False and by_target[4] is True
    assert by_target[1] == "llama" and by_target[3] == wire(1, 2, 3)
    assert by_draft[1:4] == ("llama", "Own", wire(2, 4, 6))
    assert without[3] is None


@pytest.mark.parametrize(
    ("verdict", "code", "word"),
    [
        (Verdict(True, "a", [], ""), 0, "AGREES: a"),
        (Verdict(False, "b", ["why"], "do this"), 1, "DISAGREES: b\n  - why\n  To mend: do this"),
        (cannot_tell("c", [], "more"), 2, "CANNOT TELL: c\n  To mend: more"),
    ],
)
def test_verdicts_are_printed_with_their_codes(
    verdict: Verdict, code: int, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert show(verdict, as_json=False) == code
    assert word in capsys.readouterr().out
    assert show(verdict, as_json=True) == code
    assert json.loads(capsys.readouterr().out)["exit_code"] == code


def test_long_reasons_are_not_broken_in_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    reason = "word " * 80
    show(Verdict(False, "a", [reason], "", rows=[{"slot": 0, "error": 0.25, "note": None}]), as_json=False)
    out = capsys.readouterr().out
    assert reason.strip() in out and "0.2500" in out and "  -" in out
