"""Redraft's own training step: `train.model.Trainee` under DeepSpeed, driven as `train.loop` drives it."""

from __future__ import annotations

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
from train.world import World, joined


class Redraft:
    """One case; see `benchmarks.peers.serving.Side`. Settings: any field of `TrainConfig`."""

    def __init__(self, reader: CaseReader, world: World) -> None:
        self.reader, self.world = reader, world
        self.cfg = TrainConfig(
            ttt_steps=reader.steps, step_decay=reader.decay, dtype=reader.case["dtype"], **reader.settings
        )
        self.cfg.validate()
        self.documents = self._documents()
        self.batch = self.documents.packed()
        self.counts = supervised_counts(self.batch, reader.steps)
        draft = Eagle3Draft(DraftShape(**reader.shape))
        weights = self._weights()
        teacher = TeacherHead(weights["norm"], weights["head"], reader.shape["rms_norm_eps"])
        draft.load_state_dict(weights["draft"], strict=True)
        self.module = Trainee(
            TrainParts(draft, teacher),
            world.device,
            model_dtype(self.cfg.dtype, world.device),
            self.cfg.head_chunk,
            self.cfg.activation_checkpointing == "step",
        )
        self.engine = build_engine(self.module, self.cfg, world, len(self.batch.doc_lengths), 1)

    def _documents(self) -> Documents:
        columns = self.reader.data("input_ids", "aux", "final", "loss_mask")
        ids, aux, final, mask = (torch.cat(parts) for parts in columns)
        dtype = self.reader.dtype
        return Documents(self.reader.lengths, ids, aux.to(dtype), final.to(dtype), mask)

    def _weights(self) -> dict[str, Any]:
        names = {name: name for name in self.reader.names()}
        found = self.reader.weights(names)
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

    def _measure(self, batch: PackedBatch, weights: Tensor) -> tuple[Tensor, Tensor]:
        return self.module(batch.features, batch.token_ids, batch.teacher, batch.loss_mask, batch.doc_lengths, weights)

    def loss(self) -> dict[str, Any]:
        """Cross entropy summed over the supervised rows of each step."""
        with torch.no_grad():
            _, stats = self._measure(self.batch, step_weights(self.counts, self.reader.decay))
        return {"kind": "ce", "sums": stats[0].tolist()}

    def gradients(self, request: dict[str, Any]) -> dict[str, Any]:
        """Of `sum_k factor * cross entropy`, with the factors asked for of each document (`factors`)."""
        self.module.zero_grad()
        for number, factors in enumerate(request["factors"]):
            loss, _ = self._measure(self.documents.packed([number]), torch.tensor(factors, dtype=torch.float64))
            loss.backward()  # type: ignore[no-untyped-call]
        named = self.module.draft.named_parameters()
        found = {name: fingerprint(p.grad) for name, p in named if p.grad is not None}
        self.module.zero_grad()
        return {"gradients": found, "factors": request["factors"]}

    def step(self) -> float:
        """What `train.loop` does between one batch and the next."""
        batch = self.batch
        counts = self.world.sum(supervised_counts(batch, self.reader.steps))
        weights = step_weights(counts, self.reader.decay)
        loss, _ = self.engine(
            batch.features, batch.token_ids, batch.teacher, batch.loss_mask, batch.doc_lengths, weights
        )
        self.engine.backward(loss)
        gradient_norm(self.engine, self.module)
        self.engine.step()
        return float(loss.detach())


if __name__ == "__main__":
    with joined() as world:
        serve(lambda reader: Redraft(reader, world))
