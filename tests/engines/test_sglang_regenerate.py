"""The regeneration against the real SGLang, started as the stage starts it."""

from __future__ import annotations

from pathlib import Path

from regenerating import PARSERS, Reference, check_greedy, check_sampled, make_target

from eagle3.wiring import Wiring
from eval.engines.server_config import ServerConfig
from eval.engines.sglang import SGLangEngine


def test_answers_of_sglang_are_the_targets_own(
    sglang_python: Path, sglang_env: dict[str, str], sglang_args: list[str], tmp_path: Path
) -> None:
    target = make_target(tmp_path / "model")
    cfg = ServerConfig(
        python=str(sglang_python), env=sglang_env, dtype="float32", start_timeout_s=600.0,
        extra_args=[*sglang_args, *PARSERS],
    )  # fmt: skip
    wiring = Wiring.native("llama", 8, 64)  # of a draft that is never served
    engine = SGLangEngine(target, tmp_path / "no-draft", wiring, 3, cfg, tmp_path, trust_remote_code=True)
    reference = Reference(target)
    with engine.serve(None) as session:
        report = check_greedy(session.facts["url"], reference, tmp_path)
        check_sampled(session.facts["url"], reference, tmp_path)
    served = report["served"]
    assert (served["engine"], served["version"]) == ("sglang", session.facts["build"])
    assert (served["reasoning_parser"], served["tool_call_parser"]) == ("kimi_k2", "kimi_k2")
    assert report["retokenized"]["prompts_differ"] == 0
