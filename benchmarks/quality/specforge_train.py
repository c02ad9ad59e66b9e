"""Train a draft with SpecForge's own model, loss, optimizer and schedule, on data that `neutral.py` wrote.

Runs in SpecForge's virtual environment: `PYTHON benchmarks/quality/specforge_train.py --help`. It imports torch,
safetensors and specforge alone. What is SpecForge's: `LlamaForCausalLMEagle3` with its initialization, the unrolled
`OnlineEagle3Model`, the strategy's loss (decay 0.8 a step), `BF16Optimizer` (AdamW, clipping, warm-up, cosine). What
is not: float32 throughout instead of bfloat16, and its own reference form of the loss in place of the Triton kernel,
which needs a GPU. No compilation (TORCHDYNAMO_DISABLE=1).
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


class ReferenceLoss:
    """The loss of SpecForge's kernel, by the plain function that stands beside it."""

    @staticmethod
    def apply(logits: Tensor, target: Tensor, position_mask: Tensor) -> Tensor:
        """`logits`, `target [B, T, Vd]`, `position_mask [B, T, 1]` -> scalar."""
        from specforge.core import loss

        return loss._compute_loss(logits, target, position_mask)


class Head(nn.Module):
    """The target's head with SpecForge's own shift of tokens and targets."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.fc = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        self.fc.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, states: Tensor) -> Tensor:
        """`states [B, T, H]`, normed -> logits `[B, T, V]`."""
        return self.fc(states)

    def preprocess(self, input_ids: Tensor, target: Tensor, loss_mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """SpecForge's: tokens and targets one to the left."""
        from specforge.modeling.target.target_head import TargetHead

        return TargetHead.preprocess(self, input_ids, target, loss_mask)


def build_model(config: dict[str, Any], ends: dict[str, Tensor], length: int) -> tuple[nn.Module, nn.Module]:
    """The draft as SpecForge initializes it, the target's embedding frozen in it; and it unrolled `length` steps."""
    from specforge.algorithms.eagle3 import model as eagle3_model
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
    from transformers import LlamaConfig

    eagle3_model.LogSoftmaxLoss = ReferenceLoss
    draft = LlamaForCausalLMEagle3(LlamaConfig(**config), attention_backend="sdpa").float()
    with torch.no_grad():
        draft.embed_tokens.weight.copy_(ends["embed_tokens"])
        draft.d2t.copy_(ends["d2t"])
        draft.t2d.copy_(ends["t2d"])
    draft.freeze_embedding()
    return draft, eagle3_model.OnlineEagle3Model(draft, length=length, attention_backend="sdpa")


class Records:
    """Conversations by index; fields as in SpecForge's offline files."""

    def __init__(self, folder: Path) -> None:
        self.file = safe_open(folder / "train.safetensors", framework="pt")
        lengths = self.file.get_tensor("lengths")
        self.ends = lengths.cumsum(0).tolist()
        self.starts = [0, *self.ends[:-1]]

    def batch(self, indices: list[int]) -> dict[str, Tensor]:
        """Fields of some conversations, padded with zeros to the longest, states in float32."""
        rows = [self._one(i) for i in indices]
        longest = max(len(row["input_ids"]) for row in rows)
        return {name: torch.stack([_padded(row[name], longest) for row in rows]) for name in rows[0]}

    def _one(self, index: int) -> dict[str, Tensor]:
        span = slice(self.starts[index], self.ends[index])
        read = {
            name: self.file.get_slice(name)[span]
            for name in ("input_ids", "loss_mask", "aux_hidden_state", "hidden_state")
        }
        mask = read["loss_mask"].clone()
        mask[-1] = 0  # as its reader does
        return {
            "attention_mask": torch.ones_like(mask),
            "loss_mask": mask,
            "target": read["hidden_state"].float(),
            "hidden_state": read["aux_hidden_state"].float(),
            "input_ids": read["input_ids"],
        }


def _padded(rows: Tensor, length: int) -> Tensor:
    return torch.cat((rows, rows.new_zeros((length - len(rows), *rows.shape[1:]))))


def train(args: argparse.Namespace) -> None:
    """Train by the plan and write the weights under SpecForge's names."""
    from specforge.optimizer import BF16Optimizer
    from specforge.runtime.contracts import TrainBatch
    from specforge.training.strategies.base import Eagle3TrainStrategy

    torch.manual_seed(args.seed)
    plan = json.loads(args.plan.read_text())["steps"]
    ends = load_file(args.data / "ends.safetensors")
    config = json.loads((args.data / "draft.json").read_text())
    draft, model = build_model(config, ends, args.ttt_length)
    strategy = Eagle3TrainStrategy(model, target_head=Head(ends["lm_head"]))
    optimizer = BF16Optimizer(
        model,
        lr=args.lr,
        max_grad_norm=args.max_grad_norm,
        total_steps=len(plan),
        warmup_ratio=args.warmup_ratio,
    )
    records, started = Records(args.data), time.monotonic()
    for step, indices in enumerate(plan, 1):
        batch = TrainBatch([str(i) for i in indices], "eagle3", records.batch(indices), {"target_repr": "hidden_state"})
        out = strategy.forward_loss(batch)
        out.loss.backward()
        optimizer.step()
        if step % 10 == 0 or step == len(plan):
            rate, spent = optimizer.get_learning_rate(), time.monotonic() - started
            print(f"step {step}/{len(plan)} loss {float(out.loss):.3f} lr {rate:.2e} {spent:.0f} s", flush=True)
    state = {name: value.detach().clone().contiguous() for name, value in draft.state_dict().items()}
    partial = args.out.with_suffix(".partial")
    save_file(state, partial)
    partial.replace(args.out)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder that neutral.py wrote")
    parser.add_argument("--plan", type=Path, required=True, help='JSON: {"steps": [[conversation, ...], ...]}')
    parser.add_argument("--out", type=Path, required=True, help="weights, safetensors")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--warmup-ratio", type=float, default=0.015)
    parser.add_argument("--max-grad-norm", type=float, default=0.5)
    parser.add_argument("--ttt-length", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
