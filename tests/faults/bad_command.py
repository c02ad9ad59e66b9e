"""Bad command lines of everything but the front door, and the files they are given."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from bad_bench import entered, shared, the_line
from planted_bench import ROOT, Bench, Fault

from eval.engines.base import Generation, chain_counts
from eval.results import AcceptResult, Baseline, Served, SetResult, prompt_result, summarize

COMMAND, RESULTS = "the command line", "`eval.compare`, `eval.agreement`"


def _main(module: str) -> Any:
    return importlib.import_module(module).main


def command(module: str, *arguments: str) -> Callable[[Bench, bool], str]:
    """A command line that is refused before anything is read; ROOT stands for an empty folder."""

    def bad(bench: Bench) -> str:
        folder = bench.folder("empty")
        folder.mkdir(parents=True)
        return entered(_main(module), *[one.replace("ROOT", str(folder)) for one in arguments])

    return shared("no command", bad, lambda _bench: "")


def results(bench: Bench) -> dict[str, Any]:
    """Results as `eval` writes them, of invented counts."""
    histogram = [1, 2, 1]
    tried, right = chain_counts(histogram)
    one = Generation([5] * 9, 4, 4, 8, histogram, tried, right, 1.0, ended=False)
    rows = [prompt_result("p", one, Baseline(9, 2.0, True), "text")]
    wiring = bench.wiring.to_dict()
    served = Served("matched", wiring, [], [SetResult(summarize("chat", rows), "key", rows)], summarize("all", rows))
    whole = AcceptResult("tiny", "local", 2, 0.0, 12, 0, wiring, {}, [0.6, 0.4], [served])
    told: dict[str, Any] = json.loads(json.dumps(asdict(whole)))
    return told


def _compared(change: Callable[[dict[str, Any]], Any], module: str) -> Callable[[Bench, bool], str]:
    """Two results, one of them changed."""

    def line(bench: Bench, edit: Callable[[dict[str, Any]], Any]) -> str:
        runs = [bench.folder("run"), bench.folder("run")]
        for folder, change in zip(runs, (lambda _: None, edit), strict=True):
            told = results(bench)
            made = change(told)
            folder.mkdir(parents=True)
            text = made if isinstance(made, str) else json.dumps(told)
            (folder / "results.json").write_text(text, encoding="utf-8")
        out = ("--out", bench.folder("page")) if module == "eval.compare" else ()
        return entered(_main(module), *runs, *out)

    return shared(module, lambda bench: line(bench, change), lambda bench: line(bench, lambda _: None))


def _set(path: tuple[Any, ...], value: Any) -> Callable[[dict[str, Any]], Any]:
    def change(data: Any) -> None:
        for key in path[:-1]:
            data = data[key]
        data[path[-1]] = value

    return change


def _hostfile(content: str | None) -> Callable[[Bench, bool], str]:
    """`scripts/launch/hostfile.sh`, whose launcher is `true`."""

    def line(bench: Bench, text: str | None) -> str:
        path = bench.folder("hosts")
        path.parent.mkdir(parents=True)
        if text is not None:
            path.write_text(text, encoding="utf-8")
        script = ROOT / "scripts" / "launch" / "hostfile.sh"
        env = {**os.environ, "PYTHON": "true"}
        done = subprocess.run(["bash", script, path, "node1", "conf=x"], env=env, capture_output=True, text=True)
        return the_line(done.returncode, done.stderr)

    return shared("hostfile", lambda bench: line(bench, content), lambda bench: line(bench, "node1 slots=8\n"))


def _nothing_there(bench: Bench, planted: bool) -> str:
    if not planted:
        return ""
    return entered(_main("eval.compare"), bench.folder("run"), bench.folder("run"), "--out", bench.folder("page"))


COMMANDS: list[tuple[str, str, tuple[str, ...], tuple[str, ...]]] = [
    ("a probe that is none", "eval.probe.__main__", ("weights",), ("eval.probe", "'weights'", "--help")),
    ("a probe without its folder", "eval.probe.__main__", ("store",), ("required", "--help")),
    ("no prompts to probe", "eval.probe.__main__", ("ranks", "--prompts", "0"), ("--prompts", "positive")),
    ("a tree that is no SGLang", "scripts.sglang_patch", ("status", "ROOT"), ("not an SGLang tree",)),
    ("a command that is none", "scripts.sglang_patch", ("undo", "ROOT"), ("'undo'", "revert")),
    ("a target that nobody makes", "scripts.make_target", ("gpt5", "ROOT"), ("'gpt5'", "smollm2")),
    ("no sample file", "data_prep.legacy.__main__", ("diagnose", "ROOT", "--target", "ROOT"), ("no ",)),
    ("a share for a count", "data_prep.legacy.__main__", ("diagnose", "ROOT", "--samples", "0.5"), ("--samples",)),
    ("a run without a served draft", "eval.matrix.__main__", ("ROOT", "--only-computed"), ("served", "export stage")),
    (
        "an argument of the template without a value",
        "data_prep.regenerate.__main__",
        ("--url", "http://x", "--source", "x", "--out", "ROOT", "--template-kwarg", "tools"),
        ("--template-kwarg", "NAME=VALUE"),
    ),
    (
        "half an IPv6 address",
        "data_prep.regenerate.__main__",
        ("--url", "http://[::1", "--source", "x", "--out", "ROOT"),
        ("http://[::1", "http://host:port"),
    ),
    ("a share above 1", "data_prep.regenerate.__main__",
     ("--url", "http://x", "--source", "x", "--out", "ROOT", "--max-failures", "2"), ("max_failures", "[0, 1]")),
    ("a benchmark's flag that is none", "benchmarks.step", ("--length", "8", "--speed"), ("--speed", "--help")),
    ("a benchmark of no rounds", "benchmarks.step", ("--rounds", "0"), ("--rounds", "positive")),
    ("a benchmark on no device", "benchmarks.extract", ("--device", "tpu9"), ("--device", "tpu9", "cpu")),
]  # fmt: skip
FAULTS = [
    *(Fault(name, COMMAND, command(module, *given), words) for name, module, given, words in COMMANDS),
    Fault("runs that were never measured", "`eval.compare`", _nothing_there, ("results.json", "eval stage")),
    Fault(
        "half a file of results", RESULTS, _compared(lambda _: '{"title": ', "eval.compare"), ("not a readable JSON",)
    ),
    Fault("a list for results", RESULTS, _compared(lambda _: "[]", "eval.compare"), ("not an object", "eval stage")),
    Fault("results of a later format", RESULTS, _compared(_set(("format",), 9), "eval.compare"), ("another format",)),
    Fault("words for counts", RESULTS, _compared(_set(("num_steps",), "two"), "eval.compare"), ("num_steps",)),
    Fault(
        "a summary with a word for tau",
        RESULTS,
        _compared(_set(("served", 0, "overall", "tau"), "high"), "eval.compare"),
        ("overall.tau", "eval stage"),
    ),
    Fault(
        "results of other settings",
        RESULTS,
        _compared(_set(("temperature",), 0.7), "eval.agreement"),
        ("temperature is 0.0 and 0.7", "same settings"),
    ),
    Fault("no hostfile", "`scripts/launch/hostfile.sh`", _hostfile(None), ("no such hostfile", "slots=N")),
    Fault("hosts without slots", "`scripts/launch/hostfile.sh`", _hostfile("node1\nnode2\n"), ("hosts", "slots=N")),
    Fault(
        "hosts of different slots",
        "`scripts/launch/hostfile.sh`",
        _hostfile("node1 slots=8\nnode2 slots=4\n"),
        ("one and the same N",),
    ),
]
