"""Which capture backend the extract stage uses, and what tells one of its stores from another's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import cached_property
from typing import Any

import torch

from data_prep.capture.hf import HFCapture
from data_prep.capture.sglang import SGLangCapture
from data_prep.capture.sglang_engine import EnginePlan, plan_engine
from data_prep.capture.sglang_http import HTTPPlan, SGLangHTTPCapture, plan_servers
from data_prep.extract import Capture, begin
from eagle3.hf_model import choose_device, choose_dtype
from train.front.context import Run

WITHOUT_EFFECT = ("start_timeout_s", "timeout_s", "mem_fraction", "url", "teacher_url", "python", "env")


class CaptureChoice:
    """The backend that the configuration asks for.

    An engine is looked for only when `identity` or `open` is used, so a finished stage is skipped without one.
    `log` is the name of the engine's log in the run folder's `extract`.
    """

    def __init__(self, run: Run, log: str = "sglang.log") -> None:
        self.run, self.config, self.log = run, run.config.capture, log

    @property
    def settings(self) -> dict[str, Any]:
        """What the states depend on, as far as the configuration says; a stage is skipped while this is unchanged."""
        if self.config.backend == "hf":
            return self._hf_identity()
        engine = {k: v for k, v in asdict(self.config.sglang).items() if k not in WITHOUT_EFFECT}
        return {"backend": self.config.backend, "compute_dtype": self.config.compute_dtype, **engine}

    @property
    def identity(self) -> dict[str, Any]:
        """How the states are computed, engine version and ids included; the store's manifest records it.

        Raises:
            RedraftError: the engine is not there, or cannot feed the wiring.
        """
        return self._hf_identity() if self.config.backend == "hf" else dict(self._plan.identity)

    @contextmanager
    def open(self) -> Iterator[Capture]:
        """The backend, started on its first batch and ended with the block."""
        lazy = _Lazy(self)
        try:
            yield lazy
        finally:
            lazy.close()

    def make(self) -> HFCapture | SGLangCapture | SGLangHTTPCapture:
        """Start the backend."""
        run, config = self.run, self.config
        trust = run.config.target.trust_remote_code
        if config.backend == "hf":
            return HFCapture(run.target_path, run.wiring, config.device, config.compute_dtype, trust_remote_code=trust)
        vocab = run.config.target.vocab_size
        plan = self._plan
        if isinstance(plan, HTTPPlan):
            norm = run.weights.final_norm()
            return SGLangHTTPCapture(run.wiring, plan, config.sglang, vocab_size=vocab, final_norm=norm)
        log = run.run_dir / "extract" / self.log
        return SGLangCapture(
            run.target_path,
            run.wiring,
            plan,
            config.sglang,
            vocab_size=vocab,
            log=log,
            embed=self._embed,
            trust_remote_code=trust,
        )

    @cached_property
    def _plan(self) -> EnginePlan | HTTPPlan:
        if self.config.backend == "sglang_http":
            return plan_servers(self.config.sglang, self.run.wiring)
        declared = str(self.run.identity["dtype"])
        return plan_engine(self.config.sglang, self.run.wiring, self.config.compute_dtype, declared)

    def _hf_identity(self) -> dict[str, Any]:
        dtype = choose_dtype(self.config.compute_dtype, choose_device(self.config.device))
        return {"backend": "hf", "compute_dtype": str(dtype).removeprefix("torch.")}

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.run.weights.embedding()[tokens]


class _Lazy:
    """A backend that starts with its first batch."""

    def __init__(self, choice: CaptureChoice) -> None:
        self.choice = choice
        self.backend: Any = None

    def run(self, batch: Any) -> Any:
        """Capture a batch."""
        return self.begin(batch)()

    def begin(self, batch: Any) -> Callable[[], Any]:
        """Begin a batch; what is given back waits for it."""
        if self.backend is None:
            self.backend = self.choice.make()
        return begin(self.backend, batch)

    def close(self) -> None:
        """End the backend's processes, where it has any."""
        if hasattr(self.backend, "close"):
            self.backend.close()
