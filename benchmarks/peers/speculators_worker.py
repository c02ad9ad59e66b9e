"""speculators 0.9.0's own training step: its draft, shift, packing, loss and optimizer, as its trainer runs them.

Runs in speculators' environment. What a speculators run does differently here, and why:

- Its losses are Triton kernels by default; on a CPU `--loss-implementation eager` is what it offers instead.
- Its trainer refuses a CPU, so the lines of its `Trainer.train_epoch` between a batch and the next one are written
  out here (`step`). `torch.compile` is its own switch: on with a GPU, off without.
- `norm_before_residual`, `norm_before_fc`, `norm_output` are off: they change the draft, and SpecForge and the served
  draft have none of them.
- `--optimizer adamw` (its default is Muon); `--ttt-step-loss-decay 0.8`; `--loss-fn kl_div`, whose gradient is that of
  the soft cross entropy.
- Its draft head is frozen unless `head` is "trained": then it is trained, as on every other side.

Settings: `attention` ("sdpa", "eager"; on a GPU also "simple_flex_attention"), `head` ("trained", "frozen").
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses.utils import _LOSS_REDUCTION_EPS
from speculators.models.eagle3.config import Eagle3SpeculatorConfig
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.models.eagle3.data import shift_batch
from speculators.proposals.greedy import GreedyTokenProposalConfig
from speculators.train.data import CollateFn
from speculators.train.optimizers import build_optimizers
from speculators.train.trainer import TrainerConfig
from torch import Tensor
from transformers import LlamaConfig, get_linear_schedule_with_warmup

from benchmarks.peers.serving import CaseReader, fingerprint, serve


class Speculators:
    """One case; see `benchmarks.peers.serving.Side`."""

    def __init__(self, reader: CaseReader) -> None:
        self.reader = reader
        cuda = reader.device.type == "cuda"
        self.settings = {
            "attention": "simple_flex_attention" if cuda else "sdpa",
            "head": "trained",
            "loss_implementation": "fused" if cuda else "eager",
        } | reader.settings
        self.model = Eagle3DraftModel(self._config())
        self.reload()
        self.model.to(reader.device)
        self.model.lm_head.weight.requires_grad_(self.settings["head"] == "trained")
        self.model.train()
        options, _ = Eagle3DraftModel.get_trainer_kwargs(
            loss_fn="kl_div",
            loss_implementation=self.settings["loss_implementation"],
            ttt_steps=reader.steps,
            ttt_step_loss_decay=reader.decay,
        )
        self.options = options
        config = TrainerConfig(lr=1e-4, num_epochs=1, save_path="", optimizer="adamw", hidden_states_dtype=reader.dtype)
        self.optimizers = build_optimizers(self.model, config)
        self.schedulers = [get_linear_schedule_with_warmup(o, 10, 100_000) for o in self.optimizers]
        self.batch = self._batch()

    def _config(self) -> Eagle3SpeculatorConfig:
        shape = self.reader.shape
        layer = LlamaConfig(
            **{name: shape[name] for name in ("hidden_size", "intermediate_size", "vocab_size", "rms_norm_eps")},
            **{name: shape[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")},
            max_position_embeddings=shape["max_position_embeddings"],
            num_hidden_layers=1,
            rope_parameters={"rope_type": "default", "rope_theta": shape["rope"]["rope_theta"]},
        )
        layer._attn_implementation = self.settings["attention"]
        steps = GreedyTokenProposalConfig(speculative_tokens=self.reader.steps)
        return Eagle3SpeculatorConfig(
            transformer_layer_config=layer,
            draft_vocab_size=shape["draft_vocab_size"],
            norm_before_residual=False,
            norm_before_fc=False,
            norm_output=False,
            eagle_aux_hidden_state_layer_ids=list(range(shape["num_aux"])),
            speculators_config=SpeculatorsConfig(
                algorithm="eagle3",
                proposal_methods=[steps],
                default_proposal_method="greedy",
                verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
            ),
        )

    def _batch(self) -> dict[str, Any]:
        """Documents through speculators' own shift and packing collator; rows fit exactly, so nothing is padded."""
        items = []
        for ids, aux, final, mask in zip(*self.reader.data("input_ids", "aux", "final", "loss_mask"), strict=True):
            items.append(
                {
                    "hidden_states": aux,
                    "input_ids": ids,
                    "verifier_last_hidden_states": final,
                    # Its mask at a row's token is that of the row: l[t + 1] for row t.
                    "loss_mask": torch.cat((mask[:1], mask[:-1])).long(),
                    "lengths": torch.tensor([len(ids)]),
                    "position_ids": torch.arange(len(ids)),
                }
            )
        rows = sum(self.reader.lengths) - len(items)
        collate = CollateFn(rows, self.reader.shape["hidden_size"], dtype=self.reader.dtype, preprocess=shift_batch)
        return dict(collate(items))

    def about(self) -> dict[str, Any]:
        """Versions, settings, optimizer."""
        from importlib.metadata import version

        return {
            "tool": f"speculators {version('speculators')}",
            "settings": self.settings,
            "optimizer": "torch AdamW (its option; its default is Muon), clipping at 1.0, linear schedule",
            "torch": torch.__version__,
        }

    def reload(self) -> None:
        """The case's weights, every name accounted for; its verifier head holds the draft's rows alone."""
        names = {name: _own_name(name) for name in self.reader.names()}
        weights = self.reader.weights(names)
        head = weights.pop("verifier_lm_head.weight")
        weights["verifier_lm_head.weight"] = head[weights["t2d"]].contiguous()
        self.model.load_state_dict(weights, strict=True)

    def _forward(self) -> tuple[Tensor, dict[str, Tensor]]:
        device = self.reader.device
        moved = {k: v.to(device, non_blocking=True) if isinstance(v, Tensor) else v for k, v in self.batch.items()}
        mixed = self.reader.dtype != torch.float32
        with torch.autocast(device.type, dtype=self.reader.dtype if mixed else torch.bfloat16, enabled=mixed):
            _tokens, loss, metrics = self.model(**moved, **self.options)
        return loss, metrics

    def loss(self) -> dict[str, Any]:
        """Divergence summed over supervised rows: each step's weighted mean, times rows, less its weight."""
        with torch.no_grad():
            _, metrics = self._forward()
        sums = []
        for k, rows in enumerate(self._counts()):
            sums.append(float(metrics[f"loss_{k}_sum"]) * (rows + _LOSS_REDUCTION_EPS) / self.reader.decay**k)
        return {"kind": "kl", "sums": sums}

    def _counts(self) -> list[int]:
        """Rows that its mask counts at each step."""
        mask = self.batch["loss_mask"][0]
        return [int(mask[k:].sum()) for k in range(self.reader.steps)]

    def gradients(self, request: dict[str, Any]) -> dict[str, Any]:
        """Of `sum_k decay ** k * (divergence / rows counted)`."""
        self._clear()
        self._forward()[0].backward()
        found = {
            _served_name(name): fingerprint(p.grad) for name, p in self.model.named_parameters() if p.grad is not None
        }
        self._clear()
        factors = [self.reader.decay**k / (rows + _LOSS_REDUCTION_EPS) for k, rows in enumerate(self._counts())]
        return {"gradients": found, "factors": [copy.copy(factors) for _ in self.reader.lengths]}

    def _clear(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None

    def step(self) -> float:
        """Forward, backward, clipping, optimizer and scheduler, in its trainer's order."""
        loss, _metrics = self._forward()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        for scheduler in self.schedulers:
            scheduler.step()
        return float(loss.detach())


def _own_name(name: str) -> str:
    """The case's name -> speculators' name."""
    if name.startswith("target."):
        return "verifier_" + name.removeprefix("target.")
    return name.removeprefix("draft.").replace("midlayer.", "layers.0.")


def _served_name(name: str) -> str:
    return name.replace("layers.0.", "midlayer.")


if __name__ == "__main__":
    serve(Speculators)
