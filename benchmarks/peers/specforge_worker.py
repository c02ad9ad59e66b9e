"""SpecForge 0.2.0's own training step: its draft, TTT model, strategy, trainer core and optimizer, offline mode.

Runs in SpecForge's environment. What a SpecForge run does differently here, and why:

- Its loss is a Triton kernel, which needs a GPU. On a CPU its own torch reference of that loss, `_compute_loss`
  (compiled, as it stands there), takes the kernel's place.
- Flex attention has no backward on a CPU in torch 2.13: `sdpa` is its one backend left. On a GPU `flex_attention`.
- The draft and the target's head are in the case's dtype (SpecForge's are bfloat16, which a CPU computes slowly).
- One process: no FSDP wrapper (`prepare_model(wrap=False)`), which would only cost time.

Settings: `attention`, `compact_teacher` (its option that never makes logits of the whole vocabulary), `batching`: "one"
(its default batch size of 1; documents are accumulated, nothing is padded) or "padded" (all documents in one batch).
"""

from __future__ import annotations

import json
from typing import Any

import specforge.algorithms.eagle3.model as eagle3_model
import torch
from specforge.algorithms.eagle3.data import normalize_offline_sample
from specforge.core.loss import _compute_loss
from specforge.data.utils import DataCollatorWithPadding
from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
from specforge.modeling.target.target_head import TargetHead
from specforge.optimizer import BF16Optimizer
from specforge.runtime.contracts import TrainBatch
from specforge.training.backend import FSDPTrainingBackend, ParallelConfig
from specforge.training.controller import TrainerCore
from specforge.training.strategies.base import Eagle3TrainStrategy
from torch import Tensor
from transformers import LlamaConfig

from benchmarks.peers.serving import CaseReader, fingerprint, serve

NOT_TAKEN = ("target.norm.weight",)  # its stored target states are normed already


class _TorchLoss:
    """Stands where the Triton function does."""

    @staticmethod
    def apply(logits: Tensor, target: Tensor, position_mask: Tensor) -> Tensor:
        return _compute_loss(logits, target, position_mask)


class SpecForge:
    """One case; see `benchmarks.peers.serving.Side`."""

    def __init__(self, reader: CaseReader) -> None:
        self.reader = reader
        cuda = reader.device.type == "cuda"
        own = {"attention": "flex_attention" if cuda else "sdpa", "compact_teacher": True, "batching": "one"}
        self.settings = own | reader.settings
        if not cuda:
            eagle3_model.LogSoftmaxLoss = _TorchLoss
        self.draft = LlamaForCausalLMEagle3(self._config(), attention_backend=self.settings["attention"])
        self.draft.freeze_embedding()
        self.draft.to(reader.device, reader.dtype)
        self.head = self._head()
        self.reload()
        model = eagle3_model.OnlineEagle3Model(
            self.draft, length=reader.steps, attention_backend=self.settings["attention"]
        ).to(reader.device, reader.dtype)
        model.train()
        self.batches = self._batches()
        self.strategy = Eagle3TrainStrategy(
            model,
            target_head=self.head,
            ploss_decay=reader.decay,
            compact_teacher=bool(self.settings["compact_teacher"]),
        )
        backend = FSDPTrainingBackend(
            ParallelConfig(param_dtype=reader.dtype), optimizer_factory=lambda target: BF16Optimizer(target, lr=1e-4)
        )
        backend.prepare_model(model, wrap=False, optimizer_target=self.draft)
        self.core = TrainerCore(self.strategy, backend, accumulation_steps=len(self.batches))

    def _config(self) -> LlamaConfig:
        shape, rope = self.reader.shape, self.reader.shape["rope"]
        config = LlamaConfig(
            **{name: shape[name] for name in ("hidden_size", "intermediate_size", "vocab_size", "rms_norm_eps")},
            **{name: shape[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")},
            max_position_embeddings=shape["max_position_embeddings"],
            num_hidden_layers=1,
            rope_parameters={"rope_type": "default", "rope_theta": rope["rope_theta"]},
        )
        config.pretraining_tp = 1
        config.draft_vocab_size = shape["draft_vocab_size"]
        return config

    def _head(self) -> TargetHead:
        """The target's head, made as for an offline run from the target's folder, but kept in the case's dtype."""
        target = self.reader.folder / "target"
        target.mkdir(exist_ok=True)
        sizes = {name: self.reader.shape[name] for name in ("hidden_size", "vocab_size")}
        (target / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
        head = TargetHead(str(target))
        weights = self.reader.weights(
            {"target.lm_head.weight": "fc.weight"},
            tuple(name for name in self.reader.names() if name != "target.lm_head.weight"),
        )
        head.load_state_dict(weights, strict=True)
        head.freeze_weights()
        return head.eval().to(self.reader.device, self.reader.dtype)

    def _batches(self) -> list[TrainBatch]:
        """Documents through SpecForge's own normalizer and collator."""
        samples = []
        for ids, aux, final, mask in zip(
            *self.reader.data("input_ids", "aux", "final_normed", "loss_mask"), strict=True
        ):
            raw = {
                "aux_hidden_state": aux[None],
                "hidden_state": final[None],
                "input_ids": ids,
                "loss_mask": mask.long(),
            }
            sample = normalize_offline_sample(raw, max_len=len(ids))
            samples.append({key: self._cast(value) for key, value in sample.items()})
        groups = [[sample] for sample in samples] if self.settings["batching"] == "one" else [samples]
        collate = DataCollatorWithPadding()
        return [
            TrainBatch(
                sample_ids=[str(i)], strategy="eagle3", tensors=collate(group), metadata={"target_repr": "hidden_state"}
            )
            for i, group in enumerate(groups)
        ]

    def _cast(self, value: Tensor) -> Tensor:
        return value.to(self.reader.dtype) if value.is_floating_point() else value

    def about(self) -> dict[str, Any]:
        """Versions, settings, optimizer."""
        from importlib.metadata import version

        return {
            "tool": f"SpecForge {version('specforge')}",
            "settings": self.settings,
            "optimizer": "BF16Optimizer: torch AdamW over float32 copies of the weights, clipping at 0.5",
            "torch": torch.__version__,
        }

    def reload(self) -> None:
        """The case's weights, every name accounted for."""
        names = {name: name.removeprefix("draft.") for name in self.reader.names() if name.startswith("draft.")}
        weights = self.reader.weights(names, (*NOT_TAKEN, "target.lm_head.weight"))
        self.draft.load_state_dict(weights, strict=True)

    def loss(self) -> dict[str, Any]:
        """Cross entropy summed over supervised rows: each step's mean over all positions, times positions."""
        sums = torch.zeros(self.reader.steps, dtype=torch.float64)
        with torch.no_grad():
            for batch in self.batches:
                output = self.strategy.forward_loss(batch)
                positions = batch.tensors["input_ids"].numel()
                sums += torch.stack([p.double().cpu() for p in output.metrics["plosses"]]) * positions
        return {"kind": "ce", "sums": sums.tolist()}

    def gradients(self, request: dict[str, Any]) -> dict[str, Any]:
        """Of the mean over batches of `sum_k decay ** k * (cross entropy / positions)`."""
        self._clear()
        factors: list[list[float]] = []
        for batch in self.batches:
            (self.strategy.forward_loss(batch).loss / len(self.batches)).backward()
            documents, tokens = batch.tensors["input_ids"].shape
            share = 1 / (documents * tokens * len(self.batches))
            factors += [[share * self.reader.decay**k for k in range(self.reader.steps)]] * documents
        found = {name: fingerprint(p.grad) for name, p in self.draft.named_parameters() if p.grad is not None}
        self._clear()
        return {"gradients": found, "factors": factors}

    def _clear(self) -> None:
        for parameter in self.draft.parameters():
            parameter.grad = None

    def step(self) -> float:
        """All micro-batches and the optimizer, as its trainer core drives them."""
        return sum(self.core.train_step(batch).loss for batch in self.batches) / len(self.batches)


if __name__ == "__main__":
    serve(SpecForge)
