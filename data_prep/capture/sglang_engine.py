"""Which SGLang is asked, which ids mean the wiring to it, and what it is told at start; nothing is loaded here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.config import SGLangCaptureConfig
from eagle3.conventions import EngineConvention, convention
from eagle3.errors import ConfigError, RedraftError, WiringError
from eagle3.sglang_tree import convention_of_tree
from eagle3.wiring import Wiring

WORKER = Path(__file__).resolve().parent / "sglang_worker"
FIND = (
    "import importlib.metadata as m, importlib.util as u, json; s = u.find_spec('sglang'); "
    "print(json.dumps({'version': m.version('sglang') if s else '', "
    "'tree': list(s.submodule_search_locations)[0] if s else ''}))"
)
# Flags that this backend sets itself, or that would cut, move or mix the states.
FORBIDDEN = {
    "--model": "target.path",
    "--tp": "capture.sglang.tp",
    "--tensor-parallel": "capture.sglang.tp",
    "--dtype": "capture.compute_dtype",
    "--pp": "nothing: only one pipeline stage can capture",
    "--pipeline-parallel": "nothing: only one pipeline stage can capture",
    "--dp": "nothing: start one extraction a replica instead",
    "--data-parallel": "nothing: start one extraction a replica instead",
    "--attn-dp": "nothing: every rank must hold every token",
    "--attn-cp": "nothing: every rank must hold every token",
    "--context-parallel": "nothing: every rank must hold every token",
    "--enable-dp-attention": "nothing: every rank must hold every token",
    "--speculative-algorithm": "nothing: states are captured without a draft",
    "--speculative-draft-model": "nothing: states are captured without a draft",
    "--nnodes": "nothing: one node",
    "--node-rank": "nothing: one node",
    "--chunked-prefill": "nothing: it is off",
    "--enable-flashinfer-allreduce-fusion": "nothing: it leaves partial sums in the residual stream (sglang#28343)",
    "--flashinfer-allreduce-fusion": "nothing: it leaves partial sums in the residual stream (sglang#28343)",
    "--enable-aiter-allreduce-fusion": "nothing: it leaves partial sums in the residual stream (sglang#28343)",
}


@dataclass(frozen=True)
class EngineFacts:
    """The SGLang that an interpreter has: release and package folder."""

    version: str
    tree: Path


def interpreter(cfg: SGLangCaptureConfig) -> str:
    """The Python that has SGLang."""
    return cfg.python or sys.executable


def find_engine(cfg: SGLangCaptureConfig) -> EngineFacts:
    """Ask the interpreter for its SGLang, without importing it (about a second).

    Raises:
        RedraftError: no such interpreter, or it has no SGLang.
    """
    python = interpreter(cfg)
    mend = "set capture.sglang.python to the interpreter of the environment that has SGLang"
    try:
        done = subprocess.run(
            [python, "-c", FIND], capture_output=True, text=True, timeout=120, env={**os.environ, **cfg.env}
        )
        found = json.loads(done.stdout.strip().splitlines()[-1]) if done.returncode == 0 else {"version": ""}
        why = "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["it failed"])[-1]
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as err:
        raise RedraftError("cannot ask an interpreter for SGLang", where=python, why=str(err), mend=mend) from None
    if not found["version"]:
        raise RedraftError("SGLang is not installed there", where=python, why=why, mend=mend)
    return EngineFacts(found["version"], Path(found["tree"]))


def choose_convention(cfg: SGLangCaptureConfig, facts: EngineFacts, wiring: Wiring) -> EngineConvention:
    """The id convention of this build: the one named, else what its source says, patched or not.

    Raises:
        ConfigError: the one named is not of SGLang.
        WiringError: the source follows no known convention, is patched by half, or cannot serve this model.
        RedraftError: the build has no such model.
    """
    if cfg.convention == "auto":
        return _convention_of_source(facts, wiring)
    if not cfg.convention.startswith("sglang-"):
        raise ConfigError(
            "not a convention of SGLang",
            where="capture.sglang.convention",
            why=f"found {cfg.convention!r}",
            mend="use auto, or one of the sglang-... conventions",
        )
    return convention(cfg.convention)


def _convention_of_source(facts: EngineFacts, wiring: Wiring) -> EngineConvention:
    verdict = convention_of_tree(facts.tree, wiring.model_type)
    if verdict.stops:
        raise WiringError(
            "this SGLang cannot serve a draft for the target",
            where=f"SGLang {facts.version}, {verdict.file}",
            why=verdict.stops,
            mend="use a newer release, or patch this one (scripts/sglang_patch.py)",
        )
    if verdict.convention is None:
        raise WiringError(
            "this SGLang's reading of layer ids is not one that is known",
            where=f"SGLang {facts.version}, {verdict.file}",
            why="; ".join(verdict.reasons),
            mend="use a release build, patch it whole (scripts/sglang_patch.py), or name capture.sglang.convention",
        )
    return convention(verdict.convention)


def render_ids(rule: EngineConvention, wiring: Wiring) -> list[int]:
    """Ids that make this build feed the wiring.

    Raises:
        WiringError: it cannot; then what the draft would learn from is not what a server could feed.
    """
    try:
        return rule.render(wiring)
    except WiringError as err:
        note = rule.note(wiring.model_type)
        raise WiringError(
            "this SGLang cannot feed the wiring, so it is not captured from it",
            where=err.where,
            why="; ".join(part for part in (err.what, err.why, note) if part),
            mend=f"{err.mend}; or capture.backend=hf for a server that can feed it",
        ) from None


def engine_dtype(compute_dtype: str, declared: str) -> str:
    """The dtype to run in: as asked, else the target's own 16-bit one, else bfloat16 (what servers use)."""
    if compute_dtype != "auto":
        return compute_dtype
    return declared if declared in ("bfloat16", "float16") else "bfloat16"


def check_extra_args(extra_args: list[str]) -> None:
    """Refuse flags that this backend must set itself.

    Raises:
        ConfigError: naming the flag and what to use.
    """
    for argument in extra_args:
        flag = argument.split("=")[0].replace("_", "-")
        taken = next((name for name in FORBIDDEN if flag == name or flag.startswith(name + "-")), None)
        if taken:
            raise ConfigError(
                "a flag that the capture sets itself",
                where="capture.sglang.extra_args",
                why=f"found {argument}",
                mend=f"use {FORBIDDEN[taken]}",
            )


@dataclass(frozen=True)
class EnginePlan:
    """Everything settled before SGLang starts; `identity` is what the store's manifest records."""

    facts: EngineFacts
    rule: EngineConvention
    ids: list[int]
    dtype: str
    tp: int

    @property
    def identity(self) -> dict[str, Any]:
        """How the states are computed; a store is continued only with the same."""
        return {
            "backend": "sglang",
            "engine_version": self.facts.version,
            "convention": self.rule.name,
            "ids": self.ids,
            "tp": self.tp,
            "compute_dtype": self.dtype,
        }


def plan_engine(cfg: SGLangCaptureConfig, wiring: Wiring, compute_dtype: str, declared_dtype: str) -> EnginePlan:
    """Find SGLang and settle ids and dtype.

    Raises:
        RedraftError: no SGLang there.
        WiringError: this build cannot feed the wiring.
        ConfigError: flags that the capture sets itself.
    """
    check_extra_args(cfg.extra_args)
    facts = find_engine(cfg)
    rule = choose_convention(cfg, facts, wiring)
    return EnginePlan(facts, rule, render_ids(rule, wiring), engine_dtype(compute_dtype, declared_dtype), cfg.tp)


def worker_job(
    plan: EnginePlan, cfg: SGLangCaptureConfig, target: Path, wiring: Wiring, trust_remote_code: bool
) -> Mapping[str, Any]:
    """The worker's first line."""
    return {
        "model": str(target),
        "tp": plan.tp,
        "dtype": plan.dtype,
        "ids": plan.ids,
        "num_layers": wiring.num_layers,
        "teacher": wiring.teacher,
        "trust_remote_code": trust_remote_code,
        "mem_fraction": cfg.mem_fraction,
        "extra_args": list(cfg.extra_args),
    }
