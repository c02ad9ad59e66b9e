"""What is settled before SGLang starts: interpreter, ids, dtype, flags, and the choice of the backend."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from data_prep.capture.sglang_engine import (
    EngineFacts,
    check_extra_args,
    choose_convention,
    engine_dtype,
    find_engine,
    plan_engine,
    render_ids,
)
from data_prep.config import CaptureConfig, SGLangCaptureConfig
from eagle3.conventions import convention
from eagle3.errors import ConfigError, RedraftError, WiringError
from eagle3.wiring import Site, Wiring

KIMI = Wiring((Site(3), Site(31), Site(59)), "final", "deepseek_v3", 61, 64)


def test_the_interpreter_is_asked_and_refused_when_it_has_none(tmp_path: Path) -> None:
    package = tmp_path / "site" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    info = tmp_path / "site" / "sglang-0.5.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.9\n")
    cfg = SGLangCaptureConfig(python=sys.executable, env={"PYTHONPATH": str(tmp_path / "site")})
    assert find_engine(cfg) == EngineFacts("0.5.9", package)
    with pytest.raises(RedraftError, match=r"SGLang is not installed there.*capture\.sglang\.python"):
        find_engine(SGLangCaptureConfig(python=sys.executable, env={"PYTHONPATH": str(tmp_path / "nowhere")}))
    with pytest.raises(RedraftError, match="cannot ask an interpreter"):
        find_engine(SGLangCaptureConfig(python=str(tmp_path / "no-python")))


def test_ids_are_written_in_the_convention_named() -> None:
    facts = EngineFacts("0.5.9", Path("unread"))
    for name, ids in {"sglang-0.5.9": [2, 30, 58], "sglang-0.5.23": [3, 31, 59]}.items():
        rule = choose_convention(SGLangCaptureConfig(convention=name), facts, KIMI)
        assert render_ids(rule, KIMI) == ids
    with pytest.raises(ConfigError, match=r"not a convention of SGLang \[capture.sglang.convention\]"):
        choose_convention(SGLangCaptureConfig(convention="vllm"), facts, KIMI)


def test_a_wiring_that_the_build_cannot_feed_is_not_captured_from_it() -> None:
    embedding = Wiring((Site(0), Site(3), Site(31)), "final", "deepseek_v3", 61, 64)
    with pytest.raises(WiringError, match=r"cannot feed the wiring.*capture\.backend=hf"):
        render_ids(convention("sglang-0.5.9"), embedding)


@pytest.mark.parametrize(
    ("asked", "declared", "dtype"),
    [
        ("auto", "bfloat16", "bfloat16"),
        ("auto", "float16", "float16"),
        ("auto", "float32", "bfloat16"),
        ("auto", "unknown", "bfloat16"),
        ("float32", "bfloat16", "float32"),
    ],
)
def test_the_dtype_is_the_one_that_servers_use(asked: str, declared: str, dtype: str) -> None:
    assert engine_dtype(asked, declared) == dtype


@pytest.mark.parametrize(
    "argument",
    [
        "--tp-size=2",
        "--pp-size=2",
        "--dp-size",
        "--enable-dp-attention",
        "--speculative-algorithm=EAGLE3",
        "--model-path=/x",
        "--chunked-prefill-size=512",
        "--enable_flashinfer_allreduce_fusion",
        "--dtype",
    ],
)
def test_flags_that_the_capture_sets_itself_are_refused(argument: str) -> None:
    with pytest.raises(ConfigError, match=r"capture\.sglang\.extra_args.*--"):
        plan_engine(SGLangCaptureConfig(extra_args=["--device=cpu", argument]), KIMI, "auto", "bfloat16")


def test_other_flags_pass() -> None:
    check_extra_args(["--device=cpu", "--attention-backend=triton", "--max-total-tokens", "4096", "--quantization=fp8"])


def test_the_configuration_names_its_bad_field() -> None:
    CaptureConfig(backend="sglang").validate()
    both = SGLangCaptureConfig(url="http://a:1", teacher_url="http://b:2")
    CaptureConfig(backend="sglang_http", sglang=both).validate()
    for config, field in [
        (CaptureConfig(backend="vllm"), "capture.backend"),
        (CaptureConfig(sglang=SGLangCaptureConfig(tp=0)), "capture.sglang.tp"),
        (CaptureConfig(sglang=SGLangCaptureConfig(mem_fraction=1.5)), "capture.sglang.mem_fraction"),
        (CaptureConfig(sglang=SGLangCaptureConfig(timeout_s=0)), "capture.sglang.timeout_s"),
        (CaptureConfig(backend="sglang_http"), "capture.sglang.url"),
        (
            CaptureConfig(backend="sglang_http", sglang=SGLangCaptureConfig(url="http://a")),
            "capture.sglang.teacher_url",
        ),
    ]:
        with pytest.raises(ConfigError) as error:
            config.validate()
        assert error.value.where == field
