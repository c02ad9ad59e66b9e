"""The training loop of one process: steps, validation, checkpoints, metrics."""

from __future__ import annotations

import dataclasses
import math
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eagle3.atomic import sha256_file
from eagle3.checked_json import write_checked
from eagle3.errors import RedraftError
from eagle3.tensor_file import save_tensors
from eagle3.ttt import PackedBatch
from train.batches import StepPlan
from train.engine import build_engine, gathered_state, gradient_norm, model_dtype, set_learning_rate
from train.figures import figures
from train.fit import memory_limit, memory_settings, with_stage
from train.job import SampleSource, TrainJob, TrainResult, resolve
from train.loader import Loader, Split, Step
from train.losses import step_weights, supervised_counts
from train.metrics import read_metrics
from train.model import Trainee, TrainParts
from train.noise import with_noise
from train.objective import Objective
from train.progress import TrainProgress
from train.resume import find_checkpoint, load_checkpoint, recorded, save_checkpoint
from train.schedule import learning_rate
from train.start import fit_start
from train.stop import StopRequest, listening
from train.terminal import StageConsole
from train.track import Tracker
from train.validate import shares, validate
from train.waits import Waits
from train.world import World

PAUSED = "paused.json"  # the result of a call that ended before the last step
ADVICE_AFTER = 50  # steps; a slow loader is told of then, and not only at the end


class Loop:
    """One job in one process. `run` is the only entry; every process of the world calls it.

    Args:
        job: what to train.
        world: the process group, joined.
    """

    def __init__(self, job: TrainJob, world: World) -> None:
        self.job, self.cfg, self.world = job, job.train, world
        self.folder = Path(job.run_dir)
        self.checkpoints = self.folder / "checkpoints"
        self.identity = {**job.full_identity(), "train.dtype": str(model_dtype(job.train.dtype, world.device))}
        open_source = resolve(job.source)
        self.samples: SampleSource = open_source("train", **job.source_args)
        self.held_out: SampleSource | None = open_source("val", **job.source_args)
        self.plan = StepPlan(len(self.samples), self.cfg, world.size, world.rank, self.samples.lengths)
        self.end = min(job.stop_at or self.plan.total_steps, self.plan.total_steps)
        self.factors = self.cfg.step_factors()
        self.done = 0
        self.shares = shares(len(self.held_out), self.plan.micro, world) if self.held_out else []
        self.last: dict[str, dict[str, Any]] = {"train": {}, "val": {}}
        self.waits, self.advised = Waits(), False

    def run(self) -> TrainResult:
        """Train from the newest whole checkpoint (or from scratch) to the last step and write the weights.

        Raises:
            RedraftError: bad input, a checkpoint of another job, a loss that is not a number, or SIGTERM; the
                newest checkpoint stays, and the same call goes on from it.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        _seed(self.cfg.seed + self.world.rank)
        parts = resolve(self.job.model)(**self.job.model_args)
        fitted = self._fit(parts)
        checkpoint, notes = find_checkpoint(self.checkpoints, self.identity, self.world)
        notes = [*fitted, *notes]
        if parts.fit_rows and checkpoint is None:
            notes.append(fit_start(parts.draft, self.samples, self.plan, parts.fit_rows, self.cfg.seed, self.world))
        self._build(parts)
        del parts  # the target's head as it was read: on a GPU it would stay in the host's memory
        if checkpoint is not None:
            load_checkpoint(self.engine, checkpoint, self.world)
            self.done = checkpoint.step
        resumed_from, started = self.done, time.monotonic()
        console = StageConsole() if self.world.first else None
        self.tracker, self.loader = self._tracker(), self._loader()
        with TrainProgress(self.done, self.plan.total_steps, console) as self.progress, listening() as stop:
            for note in notes:
                self.progress.say(note)
            if resumed_from:
                self.progress.say(f"going on from step {resumed_from}")
            try:
                self._steps(stop)
            except BaseException:
                self._close(exit_code=1)
                raise
            finish = self._pause if self.done < self.plan.total_steps else self._finish
            result = finish(resumed_from, time.monotonic() - started)
        self._close(exit_code=0)
        return result

    def _fit(self, parts: TrainParts) -> list[str]:
        """Choose the ZeRO stage where that is asked for; it belongs to the identity, for checkpoints depend on it."""
        dtype, device, shape = model_dtype(self.cfg.dtype, self.world.device), self.world.device, parts.draft.shape
        settings = memory_settings(
            self.cfg,
            shape,
            world=self.world.size,
            rows=self.plan.micro * max(self.samples.lengths),
            accumulation=self.plan.accumulation,
            dtype=dtype,
            cuda=device.type == "cuda",
        )
        before = self.world.broadcast(recorded(self.checkpoints, "train.zero_stage") if self.world.first else None)
        limit = self.world.least(memory_limit(self.cfg, device))
        self.cfg, line = with_stage(self.cfg, shape, settings, limit, before)
        self.identity["train.zero_stage"] = self.cfg.zero_stage
        if self.cfg.offload_optimizer:
            self.identity["train.offload_optimizer"] = True
        return [line] if line else []

    def _build(self, parts: TrainParts) -> None:
        dtype = model_dtype(self.cfg.dtype, self.world.device)
        recompute, objective = self.cfg.activation_checkpointing == "step", Objective.of(self.cfg.objective)
        self.module = Trainee(parts, self.world.device, dtype, self.cfg.head_chunk, recompute, objective)
        self.engine = build_engine(self.module, self.cfg, self.world, self.plan.micro, self.plan.accumulation)

    def _tracker(self) -> Tracker | None:
        if not self.world.first:
            return None
        settings = {**self.identity, "processes": self.world.size, "total_steps": self.plan.total_steps}
        return Tracker(self.folder, self.job.track, self.job.name, settings, self.done)

    def _loader(self) -> Loader:
        """What this process reads from here on: its part of the steps, then of the validation split."""
        splits = [Split(self.samples, self.plan.micro_batches, range(self.done, self.end))]
        if self.held_out:
            # A process without a share still runs a forward pass: under ZeRO-3 the others need its weights.
            splits.append(Split(self.held_out, lambda i: [self.shares[i] or [0]], range(len(self.shares))))
        return Loader(self.cfg, self.world.device, splits)

    def _close(self, exit_code: int) -> None:
        self.loader.close()
        if self.tracker is not None:
            self.tracker.close(exit_code)
        self.engine.destroy()

    def _steps(self, stop: StopRequest) -> None:
        total = self.plan.total_steps
        for step in self.loader.stream(0):
            asked = self._step(step, stop)
            last = self.done == total
            if self.cfg.val_every and self.done % self.cfg.val_every == 0 and not last:
                self._validate()
            if self.done % self.cfg.save_every == 0 or ((asked or self.done == self.end) and not last):
                self._save()
            if asked and not last:
                raise RedraftError(
                    "training was asked to stop",
                    why=f"step {self.done} of {total} is saved",
                    mend="run the same command again to go on",
                )
        self._advise()

    def _step(self, step: Step, stop: StopRequest) -> bool:
        """One optimizer step; returns whether any process was asked to stop."""
        started, k = time.monotonic(), self.cfg.ttt_steps
        rate = self._learning_rate(self.done)
        set_learning_rate(self.engine, rate)
        head = torch.stack([supervised_counts(batch, k) for batch in step.outlines()]).sum(0)  # [K]
        head = self.world.sum(torch.cat((head, torch.tensor([step.rows, int(stop.asked)]))))  # [K + 2] int64
        # The engine divides by micro-batches and processes; the loss is normalized by the global counts alone.
        weights = step_weights(head[:k], 1.0) * torch.tensor(self.factors, dtype=torch.float64)
        weights *= self.plan.accumulation * self.world.size
        stats, norm, number = torch.zeros(4, k, dtype=torch.float64), None, 0
        for batch in step:
            batch, number = self._noisy(batch, number), number + 1
            loss, part = self.engine(
                batch.features, batch.token_ids, batch.teacher, batch.loss_mask, batch.doc_lengths, weights
            )
            self.engine.backward(loss)
            stats += part.cpu()
            if number == self.plan.accumulation:
                stats = self.world.sum(stats)
                self._check_finite("loss", stats[0].sum().item())
                norm = gradient_norm(self.engine, self.module)
                self._check_finite("gradient norm", norm or 0.0)
            self.engine.step()
            del batch, loss  # its place is the next one's
        norm = float(self.engine.get_global_grad_norm()) if norm is None else norm
        self._check_finite("gradient norm", norm)
        self.done += 1
        waited = -self.world.least(-round(step.waited * 1e6)) / 1e6  # whoever waits longest has all others wait
        self._record(figures(stats, self.factors), rate, norm, int(head[k]), time.monotonic() - started, waited)
        return bool(head[k + 1])

    def _noisy(self, batch: PackedBatch, micro: int) -> PackedBatch:
        """Micro-batch `micro` of this process with its noise, if any."""
        if not self.cfg.feature_noise:
            return batch
        sites, places = len(self.job.wiring["aux"]), self.plan.places(self.done)[micro]
        return with_noise(batch, self.cfg.feature_noise, sites, self.cfg.seed, self.done, places)

    def _learning_rate(self, step: int) -> float:
        return learning_rate(
            step,
            self.plan.total_steps,
            peak=self.cfg.lr,
            warmup_ratio=self.cfg.warmup_ratio,
            min_ratio=self.cfg.min_lr_ratio,
            schedule=self.cfg.schedule,
            decay_ratio=self.cfg.decay_ratio,
        )

    def _check_finite(self, what: str, value: float) -> None:
        """Stop before a bad step is applied or saved."""
        if math.isfinite(value):
            return
        raise RedraftError(
            f"the {what} is not a finite number",
            where=f"{self.folder}, step {self.done + 1}",
            why=f"found {value}; the batch holds samples {self.plan.global_batch(self.done)} of the training split",
            mend="check those records' hidden states, or lower train.lr; the newest checkpoint is kept",
        )

    def _record(self, row: dict[str, Any], rate: float, norm: float, rows: int, seconds: float, waited: float) -> None:
        row = {"kind": "train", "step": self.done, "epoch": self.plan.epoch(self.done), **row}
        row.update(lr=rate, grad_norm=norm, tokens=rows)
        self.last["train"] = row
        self.waits.add(seconds, waited)
        self.progress.step(self.done, row, rows, seconds, self.waits.share)
        if self.waits.steps == ADVICE_AFTER:
            self._advise()
        if self.tracker is not None and (self.done % self.cfg.log_every == 0 or self.done == self.plan.total_steps):
            self.tracker.write({**row, "seconds": seconds, "data_wait": waited})

    def _advise(self) -> None:
        """Say once whether training waits for its data, and what helps."""
        line = "" if self.advised else self.waits.advice(self.loader.decoders.spent, self.loader.workers, self.cfg)
        if line:
            self.advised = True
            self.progress.say(line)

    def _validate(self) -> None:
        if not self.held_out:
            return
        row = validate(self.engine, self.loader.stream(1), self.shares, factors=self.factors, world=self.world)
        self.last["val"] = {"kind": "val", "step": self.done, **row}
        if self.tracker is not None:
            self.tracker.write(self.last["val"])
        self.progress.say(
            f"held out, after step {self.done:,}: loss {row['loss']:.4f}, accuracy by position "
            + " ".join(f"{a:.1%}" for a in row["acc"])
            + f", predicted accept length {row['predicted_tau']:.3f} of {self.cfg.ttt_steps + 1}"
        )

    def _save(self) -> None:
        if self.tracker is not None:
            self.tracker.log.sync()
        save_checkpoint(self.engine, self.checkpoints, self.done, self.identity, self.world, self.cfg.keep_checkpoints)

    def _reuse_rows(self) -> None:
        """Take over the last step's rows from an earlier run that got as far, so that none is written twice."""
        rows = read_metrics(self.folder / "metrics.jsonl") if self.world.first else []
        found = {row["kind"]: row for row in rows if row["step"] == self.done}
        for kind, row in self.world.broadcast(found).items():
            self.last[kind] = self.last[kind] or row

    def _pause(self, resumed_from: int, seconds: float) -> TrainResult:
        """End before the last step; the checkpoint is there."""
        train, val = self.last["train"], self.last["val"]
        metrics = str(self.folder / "metrics.jsonl")
        result = TrainResult(self.done, resumed_from, "", metrics, train=train, val=val, seconds=seconds)
        if self.world.first:
            write_checked(self.folder / PAUSED, dataclasses.asdict(result))
        self.world.barrier()
        return result

    def _finish(self, resumed_from: int, seconds: float) -> TrainResult:
        if self.done % self.cfg.save_every and self.done != resumed_from:  # else its checkpoint is there
            self._save()
        self._reuse_rows()
        if self.last["val"].get("step") != self.done:
            self._validate()
        weights = self.folder / "final.safetensors"
        state = gathered_state(self.engine, self.module.draft)
        result = TrainResult(
            steps=self.done,
            resumed_from=resumed_from,
            weights=str(weights),
            metrics=str(self.folder / "metrics.jsonl"),
            train=self.last["train"],
            val=self.last["val"],
            seconds=seconds,
        )
        if self.world.first:
            save_tensors(weights, state, {"format": "pt"})
            result = dataclasses.replace(result, weights_sha256=sha256_file(weights))
            write_checked(self.folder / "result.json", dataclasses.asdict(result))
        self.world.barrier()
        return result


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
