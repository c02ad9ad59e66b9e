"""Capture with SGLang's own model code, for targets too large for Hugging Face's.

A worker under the interpreter that has SGLang loads the target over `tp` GPUs and is asked, by the ids of its own
convention, for what it would feed a draft. That it is what the wiring names is then measured on the first batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from data_prep.capture.sample import CapturedSample
from data_prep.capture.sglang_engine import WORKER, EnginePlan, interpreter, worker_job
from data_prep.capture.sglang_process import SLOTS, WorkerProcess
from data_prep.capture.sglang_samples import Asked, check_tokens, sample, spans
from data_prep.config import SGLangCaptureConfig
from eagle3.errors import DataError, RedraftError, WiringError
from eagle3.site_match import match_slots
from eagle3.wiring import EMBEDDING, Site, Wiring

MEASURED_ROWS = 64
# Ranks hold the same sums bit for bit; a relative difference above one rounding of bfloat16 is no rounding.
RANK_LIMIT = 2.0**-8
NO_FUSION = "--enforce-disable-flashinfer-allreduce-fusion"


@dataclass
class _Part:
    """Records of a batch that go to the worker together, with their samples once they are there."""

    asked: list[Asked]
    number: int = 0
    slot: int = 0
    samples: list[CapturedSample] | None = None


class SGLangCapture:
    """Runs prefills in a worker and keeps the states that the wiring names.

    Args:
        path: the target's folder.
        wiring: which sites and which teacher to keep.
        plan: engine, ids and dtype, from `sglang_engine.plan_engine`.
        cfg: interpreter, tensor parallelism, timeouts.
        vocab_size: the target's, to refuse foreign tokens before the engine reads them.
        log: file for the worker's output.
        embed: token ids [N] -> rows of the target's embedding table [N, H]; asked when the wiring holds the embedding.
        out_dtype: dtype of the states handed over.
        trust_remote_code: run Python shipped in the target's folder.
        command: the worker's program; for tests.

    Raises:
        RedraftError: the worker cannot start, load the target, or is another SGLang than planned for.
    """

    def __init__(
        self,
        path: Path,
        wiring: Wiring,
        plan: EnginePlan,
        cfg: SGLangCaptureConfig,
        *,
        vocab_size: int,
        log: Path,
        embed: Callable[[torch.Tensor], torch.Tensor] | None = None,
        out_dtype: torch.dtype = torch.bfloat16,
        trust_remote_code: bool = False,
        command: Sequence[str] | None = None,
    ) -> None:
        self.wiring, self.plan, self.cfg = wiring, plan, cfg
        self.vocab_size, self.out_dtype, self.embed = vocab_size, out_dtype, embed
        self.info: dict[str, Any] = dict(plan.identity)
        self._batch = 0  # number of the last one sent
        self._waiting: deque[_Part] = deque()  # not sent yet
        self._sent: deque[_Part] = deque()  # sent and not answered, at most SLOTS
        self.worker = WorkerProcess(command or [interpreter(cfg), str(WORKER)], cfg.env, log)
        try:
            self.worker.send(worker_job(plan, cfg, path, wiring, trust_remote_code))
            self.facts = self.worker.receive("ready", cfg.start_timeout_s, "loading the target")
            self._check_facts()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the worker and its ranks."""
        self.worker.close()

    def __enter__(self) -> SGLangCapture:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_facts(self) -> None:
        for name, want in (("version", self.plan.facts.version), ("dtype", self.plan.dtype)):
            if self.facts[name] != want:
                raise RedraftError(
                    "the worker runs another SGLang than the ids were written for",
                    where="capture.sglang",
                    why=f"{name} is {self.facts[name]!r}, expected {want!r}",
                    mend="check capture.sglang.python, env and extra_args",
                )

    def run(self, batch: Sequence[tuple[str, Any, Any]]) -> list[CapturedSample]:
        """Capture a batch of records (`record_id`, `input_ids` [T], `loss_mask` [T]), in the given order.

        Raises:
            DataError: a record that this target or engine cannot read.
            WiringError: what the engine feeds is not what the wiring names.
            RedraftError: the worker failed, or its answer is not what was asked for.
        """
        return self.begin(batch)()

    def begin(self, batch: Sequence[tuple[str, Any, Any]]) -> Callable[[], list[CapturedSample]]:
        """Send a batch, as `run` does, and return what waits for its samples.

        The worker goes on with the next batch that is begun while the states of this one are taken over.

        Raises:
            DataError: a record that this target or engine cannot read. The rest is for the returned function.
        """
        asked = [Asked.check(record, self.vocab_size) for record in batch]
        for one in asked:
            self._check_fits(one)
        parts = [_Part(part) for part in self._parts(asked)]
        self._waiting += parts
        self._send()

        def finish() -> list[CapturedSample]:
            while any(part.samples is None for part in parts):
                self._take()
            return [sample for part in parts for sample in part.samples or ()]

        return finish

    def _check_fits(self, one: Asked) -> None:
        limit = min(self.facts["max_tokens"], self.facts["max_length"])
        if one.tokens > limit:
            raise DataError(
                "a record is longer than SGLang can prefill at once",
                where=f"record {one.record_id}",
                why=f"{one.tokens} tokens; its cache holds {self.facts['max_tokens']}, "
                f"its context {self.facts['max_length']}",
                mend="lower data.max_length, or give the cache more room (capture.sglang.mem_fraction, tp)",
                page="capture",
            )

    def _parts(self, asked: list[Asked]) -> list[list[Asked]]:
        """Split a batch so that each part fits the engine's cache; the same batch is always split alike."""
        parts: list[list[Asked]] = []
        held = 0
        for one in asked:
            full = not parts or len(parts[-1]) >= self.facts["max_requests"]
            if full or held + one.tokens > self.facts["max_tokens"]:
                parts.append([])
                held = 0
            parts[-1].append(one)
            held += one.tokens
        return parts

    def _send(self) -> None:
        """Send what waits, as far as there are free slots."""
        while self._waiting and len(self._sent) < SLOTS:
            part = self._waiting.popleft()
            self._batch += 1
            part.number, part.slot = self._batch, self._batch % SLOTS
            self._sent.append(part)
            self.worker.send(
                {
                    "op": "run",
                    "batch": part.number,
                    "slot": part.slot,
                    "keys": [one.record_id for one in part.asked],
                    "ids": [one.input_ids.tolist() for one in part.asked],
                    "measure": MEASURED_ROWS if part.number == 1 else 0,
                }
            )

    def _take(self) -> None:
        """Wait for the oldest part sent and take its samples over; its slot is free then."""
        part = self._sent.popleft()
        tokens = sum(one.tokens for one in part.asked)
        during = f"capturing {len(part.asked)} records of {tokens} tokens"
        reply = self.worker.receive("batch", self.cfg.timeout_s, during)
        if reply["batch"] != part.number:
            raise RedraftError(
                "the worker answered another batch",
                why=f"{reply['batch']} for {part.number}",
                mend="run the stage again",
            )
        self._check_ranks(reply["ranks"])
        states = self.worker.states(part.slot)
        where = spans(part.asked, reply["records"])
        check_tokens(part.asked, where, states["tokens"])
        if part.number == 1:
            self._measure(states)
        part.samples = [self._sample(one, where[one.record_id], states) for one in part.asked]
        self._send()

    def _measure(self, states: dict[str, torch.Tensor]) -> None:
        sites = {name.removeprefix("site."): state for name, state in states.items() if name.startswith("site.")}
        check_wiring(self.wiring, states["aux"], sites, self.plan)
        if self.embed is not None and EMBEDDING in self.wiring.aux:
            check_embedding(self.embed, states["tokens"], sites["embedding"])

    def _sample(self, one: Asked, rows: slice, states: dict[str, torch.Tensor]) -> CapturedSample:
        return sample(one, states["aux"][rows], states["teacher"][rows], self.wiring, self.out_dtype, self.plan.dtype)

    def _check_ranks(self, ranks: dict[str, dict[str, float]]) -> None:
        if len(ranks) != self.plan.tp - 1:
            raise RedraftError(
                "not every rank answered", why=f"{len(ranks) + 1} of {self.plan.tp}", mend="read the worker's log"
            )
        for rank, errors in ranks.items():
            for name, error in errors.items():
                if not error <= RANK_LIMIT:
                    raise WiringError(
                        "the tensor-parallel ranks hold different states",
                        where=f"{name} on rank {rank} against rank 0",
                        why=f"relative difference {error:.2g}: partial sums of the ranks, as fused all-reduces leave "
                        "in the residual stream (sglang#28343)",
                        mend=f"turn all-reduce fusion off where it is on ({NO_FUSION}; no symmetric memory), or lower "
                        "capture.sglang.tp",
                    )


def check_wiring(wiring: Wiring, aux: torch.Tensor, sites: dict[str, torch.Tensor], plan: EnginePlan) -> None:
    """Refuse unless every slot holds the site that the wiring names, measured against hooks on the layers.

    Args:
        aux: [N, k*H], what the engine would feed a draft.
        sites: site name -> [M, H], the first M rows of what enters each layer.

    Raises:
        WiringError: naming every slot that holds another tensor.
    """
    needed = [*wiring.names, "final", "final_normed", *(Site(k).name for k in range(wiring.num_layers))]
    missing = sorted(set(needed) - set(sites))
    if missing:
        raise WiringError(
            "cannot measure which tensors SGLang feeds",
            where=f"SGLang {plan.facts.version}",
            why=f"no hook fired at {', '.join(missing[:4])}: a fused or compiled forward pass",
            mend="turn fusion and graph capture off in capture.sglang.extra_args, or use capture.backend=hf",
            page="capture",
        )
    rows = next(iter(sites.values())).shape[0]
    if aux.shape[1] != wiring.feature_width:
        raise WiringError(
            "SGLang feeds another width than the wiring",
            where=f"ids {plan.ids}, {plan.rule.name}",
            why=f"{aux.shape[1]} columns, expected {wiring.feature_width}",
            mend="name the convention of this build in capture.sglang.convention",
        )
    wrong = [
        f"slot {match.slot} holds {match.site if match.sure else f'something close to {match.site}'}, expected {want}"
        for match, want in zip(match_slots(aux[:rows], sites, wiring.hidden_size), wiring.names, strict=True)
        if match.site != want or not match.sure
    ]
    if wrong:
        raise WiringError(
            "SGLang feeds other tensors than the wiring names",
            where=f"SGLang {plan.facts.version}, ids {plan.ids} by {plan.rule.name}",
            why="; ".join(wrong),
            mend="name the convention that this build follows in capture.sglang.convention",
            page="capture",
        )


def check_embedding(
    embed: Callable[[torch.Tensor], torch.Tensor], tokens: torch.Tensor, entering: torch.Tensor
) -> None:
    """Refuse a target that changes its embedding before layer 0: stores look the embedding up instead.

    Args:
        tokens: [N] int64.
        entering: [M, H], the first M rows of what enters layer 0.

    Raises:
        WiringError: a row differs from the token's row of the table.
    """
    looked_up = embed(tokens[: entering.shape[0]]).to(entering.dtype)
    if not torch.equal(looked_up, entering):
        raise WiringError(
            "this target changes its embedding before layer 0",
            where="wiring.aux: embedding",
            why="what enters layer 0 is not the token's row of the embedding table",
            mend="name a layer instead of the embedding",
            page="capture",
        )
