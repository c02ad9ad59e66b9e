"""Servers that answer something else: error pages, half answers, impossible counts; each a real one on loopback."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from bad_bench import entered, shared
from bad_data import SOUND
from planted_bench import UNIT, Bench, Fault

sys.path.append(str(UNIT / "regenerate"))
from fake_chat import HALF, RESET, FakeChat, completion, serving

from data_prep.regenerate.__main__ import main as regenerate
from eval.probe.__main__ import main as probe

ANSWERS, PROBED = "`data_prep.regenerate`", "`eval.probe live`"
PATIENCE = ("--retries", 1, "--backoff-s", 0.01, "--outage-s", 0.1, "--timeout-s", 5)
SAMPLING = ("--temperature", 0, "--repetition-penalty", 1)
PAGE = b"<html><body><h1>It works!</h1></body></html>"
Answer = Callable[[dict[str, Any]], Any]


def _answered(answer: Answer) -> Callable[[Bench, bool], str]:
    """The regeneration, from a server whose chat answers are these."""

    def line(bench: Bench, script: Answer) -> str:
        with serving(FakeChat(script=lambda body, _nth: script(body))) as fake:
            source, out = SOUND(bench.folder("data")), bench.folder("answers")
            told = entered(regenerate, "--url", fake.url, "--source", source, "--out", out, *PATIENCE, *SAMPLING)
        if told and (out / "answers.jsonl").exists():
            raise AssertionError("answers were written nevertheless")
        return told

    return shared("answers", lambda bench: line(bench, answer), lambda bench: line(bench, completion))


def _listed(models: list[Any]) -> Callable[[Bench, bool], str]:
    """The regeneration, from a server that lists these models."""

    def bad(bench: Bench) -> str:
        with serving(FakeChat(models=models)) as fake:
            source = SOUND(bench.folder("data"))
            arguments = ("--source", source, "--out", bench.folder("answers"), *PATIENCE, *SAMPLING)
            return entered(regenerate, "--url", fake.url, *arguments)

    return shared("answers", bad, lambda bench: _answered(completion)(bench, False))


def _probed(info: Any, answer: Any = None) -> Callable[[Bench, bool], str]:
    """`eval.probe live` on a server that says this of itself."""

    class Other(FakeChat):
        def get(self, path: str) -> tuple[int, Any]:
            return (200, info) if path.endswith("server_info") and info is not None else (404, {"detail": "Not Found"})

    def bad(bench: Bench) -> str:
        with serving(Other()) as fake:
            return entered(probe, "live", "--url", fake.url, "--target", bench.target, "--prompts", 1, "--timeout", 5)

    return shared("no probe", bad, lambda _bench: "")


def changed(**parts: Any) -> Answer:
    """A sound answer with other parts; a dotted name leads inside."""

    def answer(body: dict[str, Any]) -> Any:
        whole: dict[str, Any] = completion(body)
        for name, value in parts.items():
            where: Any = whole
            *outer, last = name.split("__")
            for key in outer:
                where = where[int(key) if key.isdigit() else key]
            where[last] = value
        return whole

    return answer


ANSWERED: list[tuple[str, Answer, tuple[str, ...]]] = [
    ("a page of a web server", lambda _: (200, PAGE, {"Content-Type": "text/html"}), ("text/html", "another program")),
    ("a redirect to another host", lambda _: (302, {}, {"Location": "http://127.0.0.1:9/"}), ("302",)),
    ("a refusal", lambda _: (400, {"error": {"message": "prompt too long"}}, {}), ("prompt too long",)),
    ("nothing but errors", lambda _: (500, {"error": {"message": "CUDA error"}}, {}), ("CUDA error",)),
    ("half an answer", lambda _: HALF, ("JSON",)),
    ("a connection that breaks", lambda _: RESET, ("3",)),
    ("a list for an answer", lambda _: [], ("list, not an object",)),
    ("an answer without choices", changed(choices=[]), ("no choices",)),
    (
        "a picture for an answer",
        changed(choices__0__message__content=[{"type": "image"}]),
        ("content is list, not text",),
    ),
    ("an end that is none", changed(choices__0__finish_reason="abort"), ("finish_reason 'abort'",)),
    ("no token counts", changed(usage={}), ("no token counts",)),
    ("a negative count", changed(usage__completion_tokens=-4), ("no token counts",)),
    ("a count in words", changed(usage__completion_tokens="nine"), ("no token counts",)),
    ("a tool call without a name", changed(choices__0__message__tool_calls=[{}]), ("a tool call without a function",)),
]
FAULTS = [
    *(Fault(name, ANSWERS, _answered(answer), words) for name, answer, words in ANSWERED),
    Fault("a server of no model", ANSWERS, _listed([]), ("lists no model",)),
    Fault("a server of two models", ANSWERS, _listed([{"id": "a"}, {"id": "b"}]), ("which model?", "a, b")),
    Fault("a model list of numbers", ANSWERS, _listed([1, 2]), ("lists no model",)),
    Fault("a server that is no SGLang", PROBED, _probed(None), ("not an SGLang server",)),
    Fault("a server that says nothing of its flags", PROBED, _probed({"version": 1}), ("not an SGLang server",)),
    Fault("a server whose flags are a page", PROBED, _probed(PAGE), ("JSON",)),
]
