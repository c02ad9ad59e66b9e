"""Everything in the product that asks a server, behind one face: so many records asked, what came of each."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from misbehaving import AUX, HIDDEN, STEPS

from data_prep.capture.sglang_http import HTTPPlan, SGLangHTTPCapture
from data_prep.config import SGLangCaptureConfig
from data_prep.regenerate.config import RegenerateConfig
from data_prep.regenerate.run import regenerate
from eagle3.conventions import convention
from eagle3.errors import RedraftError
from eagle3.wiring import Site, Wiring
from eval.engines.base import Ask
from eval.engines.client import JsonServer
from eval.engines.sglang import SGLangSession
from eval.engines.vllm import VLLMSession
from eval.probe.server import ProbeServer, ServerFacts, check_rows

LONG_S, SHORT_S = 60.0, 2.0  # an answer's time; the short one where a test must wait for its end
WIRING = Wiring((Site(2), Site(3), Site(5)), "final_normed", "llama", 7, HIDDEN)
SAMPLING = {"temperature": 0.7, "top_p": 0.9, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


@dataclass
class Outcome:
    """What came of asking for records r0, r1, ...: how many were answered, why others were not, and how it ended."""

    answered: int = 0
    failures: dict[str, str] = field(default_factory=dict)
    error: str = ""


Consumer = Callable[..., Outcome]  # (address, records, a folder that lives on, an answer's time) -> Outcome


def _measured(session: SGLangSession | VLLMSession, count: int) -> Outcome:
    asks = [Ask(f"r{k}", [5, k]) for k in range(count)]
    try:
        run = session.run(asks, max_new_tokens=11, temperature=0.0, concurrency=1)
    except RedraftError as err:
        return Outcome(error=str(err))
    return Outcome(sum(made is not None for made in run.generations), run.failures)


def sglang(url: str, count: int, _folder: Path, timeout_s: float = LONG_S) -> Outcome:
    """The measure in SGLang."""
    return _measured(SGLangSession(JsonServer(url, timeout_s, 2, outage_s=30.0), {}, STEPS, STEPS + 1), count)


def vllm(url: str, count: int, _folder: Path, timeout_s: float = LONG_S) -> Outcome:
    """The measure in vLLM."""
    return _measured(VLLMSession(JsonServer(url, timeout_s, 2, outage_s=30.0), {}, STEPS, {"model": "tiny"}), count)


def answers(
    url: str, count: int, folder: Path, timeout_s: float = LONG_S, gone: Callable[[], str] | None = None
) -> Outcome:
    """The regeneration; its folder keeps what was answered."""
    source, out = folder / "source.jsonl", folder / "answers"
    lines = [{"id": f"r{k}", "messages": [{"role": "user", "content": f"question {k}"}]} for k in range(count)]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    cfg = RegenerateConfig(
        **SAMPLING, concurrency=1, max_tokens=50, retries=2, backoff_s=1.0, timeout_s=timeout_s, outage_s=30.0,
        max_failures=0.5,
    )  # fmt: skip
    try:
        regenerate(cfg, source, out, url, gone=gone)
    except RedraftError as err:
        part = out / "answers.part.jsonl"
        kept = part.read_bytes().count(b"\n") - 1 if part.exists() else 0  # behind a line of settings
        return Outcome(kept, error=str(err))
    failed = out / "failed.jsonl"
    told = [json.loads(line) for line in failed.read_text().splitlines()] if failed.exists() else []
    kept = (out / "answers.jsonl").read_bytes().count(b"\n")
    return Outcome(kept, {one["id"]: one["why"] for one in told})


def http_capture(url: str, timeout_s: float = LONG_S) -> SGLangHTTPCapture:
    """The capture from two servers, here at one address."""
    cfg = SGLangCaptureConfig(url=f"{url}/aux", teacher_url=f"{url}/last", timeout_s=timeout_s)
    plan = HTTPPlan("0.5.23", convention("sglang-0.5.23"), [1, 2, 4], "bfloat16")
    return SGLangHTTPCapture(WIRING, plan, cfg, vocab_size=64)


def capture(url: str, count: int, _folder: Path, timeout_s: float = LONG_S) -> Outcome:
    """The capture over HTTP: two requests a record."""
    one, out = http_capture(url, timeout_s), Outcome()
    try:
        for k in range(count):
            one.run([(f"r{k}", [5, 9, k], [0, 1, 1])])
            out.answered += 1
    except RedraftError as err:
        out.error = str(err)
    return out


def probe(url: str, count: int, _folder: Path, timeout_s: float = LONG_S) -> Outcome:
    """The live probe's prompts."""
    server, out = ProbeServer(f"{url}/aux", timeout_s), Outcome()
    facts = ServerFacts(url, {"disable_radix_cache": True})
    try:
        for k in range(count):
            check_rows(server.states([5, 9, k]), 3, facts, AUX * HIDDEN, f"prompt {k}")
            out.answered += 1
    except RedraftError as err:
        out.error = str(err)
    return out


CONSUMERS: dict[str, Consumer] = {
    "sglang": sglang, "vllm": vllm, "answers": answers, "capture": capture, "probe": probe,
}  # fmt: skip
