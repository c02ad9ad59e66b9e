"""Redraft's own training step: `train.model.Trainee` under DeepSpeed, driven as `train.loop` drives it."""

from __future__ import annotations

import functools
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.documents import Documents
from benchmarks.peers.serving import CaseReader, fingerprint, serve
from eagle3.draft import DraftShape, Eagle3Draft
from eagle3.ttt import PackedBatch
from train.config import TrainConfig
from train.engine import build_engine, gradient_norm, model_dtype
from train.losses import TeacherHead, step_weights, supervised_counts
from train.model import Trainee, TrainParts
from train.objective import Objective
from train.world import World, joined


class Redraft:
    """One case; see `benchmarks.peers.serving.Side`. Settings: any field of `TrainConfig`, `objective.kind` and kin."""

    def __init__(self, reader: CaseReader, world: World) -> None:
        self.reader, self.world = reader, world
        self.cfg = configured(reader)
        self.batch = self._batch()
        weights = self._weights()
        draft = Eagle3Draft(DraftShape(**reader.shape))
        draft.load_state_dict(weights["draft"], strict=True)
        parts = TrainParts(draft, TeacherHead(weights["norm"], weights["head"], reader.shape["rms_norm_eps"]))
        dtype, recompute = model_dtype(self.cfg.dtype, world.device), self.cfg.activation_checkpointing == "step"
        objective = Objective.of(self.cfg.objective)
        self.module = Trainee(parts, world.device, dtype, self.cfg.head_chunk, recompute, objective)
        self.engine = build_engine(self.module, self.cfg, world, len(self.batch.doc_lengths), 1)

    def _batch(self) -> PackedBatch:
        """All documents packed, as the loader hands them over."""
        ids, aux, final, mask = (torch.cat(x) for x in self.reader.data("input_ids", "aux", "final", "loss_mask"))
        dtype = self.reader.dtype
        return Documents(self.reader.lengths, ids, aux.to(dtype), final.to(dtype), mask).packed()

    def _document(self, number: int) -> PackedBatch:
        """One of them, as a view."""
        lengths, batch = self.batch.doc_lengths, self.batch
        rows = slice(sum(lengths[:number]), sum(lengths[: number + 1]))
        columns = (batch.features, batch.token_ids, batch.teacher, batch.loss_mask)
        features, token_ids, teacher, mask = (column[rows] for column in columns)
        return PackedBatch(features, token_ids, teacher, mask, [lengths[number]])

    def _weights(self) -> dict[str, Any]:
        found = self.reader.weights({name: name for name in self.reader.names()})
        norm, head = found.pop("target.norm.weight"), found.pop("target.lm_head.weight")
        return {"draft": {name.removeprefix("draft."): x for name, x in found.items()}, "norm": norm, "head": head}

    def about(self) -> dict[str, Any]:
        """Versions, settings, optimizer."""
        return {
            "tool": "Redraft",
            "settings": self.reader.settings,
            "optimizer": f"torch AdamW under DeepSpeed {version('deepspeed')}, clipping at {self.cfg.grad_clip}",
            "torch": torch.__version__,
        }

    def reload(self) -> None:
        """The case's weights; the embedding is a plain tensor of the trainee and never changes."""
        weights = self._weights()["draft"]
        weights.pop("embed_tokens.weight")
        with torch.no_grad():
            self.module.draft.load_state_dict(weights, strict=True)

    def _own_weights(self) -> Tensor:
        counts = self.world.sum(supervised_counts(self.batch, self.reader.steps))
        return step_weights(counts, self.reader.decay)

    def _measure(self, batch: PackedBatch, weights: Tensor) -> tuple[Tensor, Tensor]:
        return self.module(batch.features, batch.token_ids, batch.teacher, batch.loss_mask, batch.doc_lengths, weights)

    def loss(self) -> dict[str, Any]:
        """Cross entropy summed over the supervised rows of each step."""
        with torch.no_grad():
            _, stats = self._measure(self.batch, self._own_weights())
        return {"kind": "ce", "sums": stats[0].tolist()}

    def gradients(self, request: dict[str, Any]) -> dict[str, Any]:
        """Of `sum_k factor * cross entropy`, with the factors asked for of each document (`factors`)."""
        trained = {name: p for name, p in self.module.draft.named_parameters() if p.requires_grad}
        sums = [torch.zeros_like(p, dtype=torch.float32) for p in trained.values()]
        for number, factors in enumerate(request["factors"]):
            loss, _ = self._measure(self._document(number), torch.tensor(factors, dtype=torch.float64))
            # Not `backward`: under ZeRO that hands the gradients to the engine.
            for total, gradient in zip(sums, torch.autograd.grad(loss, list(trained.values())), strict=True):
                total += gradient
        found = {name: fingerprint(total) for name, total in zip(trained, sums, strict=True)}
        return {"gradients": found, "factors": request["factors"]}

    def step(self) -> float:
        """What `train.loop` does between one batch and the next."""
        batch = self.batch
        weights = self._own_weights()
        loss, _ = self.engine(
            batch.features, batch.token_ids, batch.teacher, batch.loss_mask, batch.doc_lengths, weights
        )
        self.engine.backward(loss)
        gradient_norm(self.engine, self.module)
        self.engine.step()
        return float(loss.detach())


def configured(reader: CaseReader) -> TrainConfig:
    """The defaults of training with the case's K, decay and dtype, and the settings of `--set`.

    Raises:
        ConfigError: a value that cannot be.
        AttributeError: no such field.
    """
    cfg = TrainConfig(ttt_steps=reader.steps, step_decay=reader.decay, dtype=reader.case["dtype"])
    for key, value in reader.settings.items():
        *parents, field = key.split(".")
        place = functools.reduce(getattr, parents, cfg)
        setattr(place, field, type(getattr(place, field))(value))
    cfg.validate()
    return cfg


if __name__ == "__main__":
    with joined() as world:
        serve(lambda reader: Redraft(reader, world))
