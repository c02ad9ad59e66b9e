"""The memory arithmetic against what autograd, the optimizer and the loss really hold, byte by byte."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from eagle3.draft_build import build_draft
from eagle3.draft_shape import DraftShape
from eagle3.errors import ConfigError
from eagle3.ttt import PackedBatch
from train import memory
from train.config import TrainConfig
from train.engine import bucket_elements, effective_stage, zero_config
from train.fit import memory_limit, memory_settings, with_stage
from train.losses import TeacherHead, step_weights, supervised_counts, ttt_loss
from train.memory import GIB, MemorySettings, choose_stage, train_memory, trained_parameters

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "draft_vocab_size": 128,
    "num_aux": 3,
    "rms_norm_eps": 1e-5,
    "rope": {"rope_theta": 1e4, "rope_scaling": None},
    "max_position_embeddings": 256,
}
LATENT = {
    "kind": "mla",
    "num_key_value_heads": 8,
    "head_dim": 24,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, whole vocabulary": {"draft_vocab_size": 256},
    "llama, norms": {"fc_norm": True, "norm_output": True},
    "llama, norm before fc": {"norm_before_fc": True},
    "mla": LATENT,
    "mla, norms": {**LATENT, "fc_norm": True, "norm_output": True},
}
LENGTHS, STEPS, CHUNK = [100, 120, 36], 4, 32
KIMI = {
    "hidden_size": 7168,
    "intermediate_size": 12288,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "head_dim": 128,
    "vocab_size": 163840,
    "draft_vocab_size": 32000,
}


def held_for_backward(shape: DraftShape, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes of the tensors that autograd keeps of one loss, weights and micro-batch apart; and asking rows."""
    torch.manual_seed(0)
    draft = build_draft(shape).to(dtype)
    rows, width = sum(LENGTHS), shape.hidden_size
    batch = PackedBatch(
        features=torch.randn(rows, shape.num_aux * width).to(dtype),
        token_ids=torch.randint(0, shape.vocab_size, (rows,)),
        teacher=torch.randn(rows, width).to(dtype),
        loss_mask=torch.rand(rows) < 0.3,
        doc_lengths=LENGTHS,
    )
    teacher = TeacherHead(torch.ones(width, dtype=dtype), torch.randn(shape.vocab_size, width).to(dtype), 1e-5)
    kept: dict[int, tuple[int, torch.Tensor]] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = (tensor.untyped_storage().nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        weights = step_weights(supervised_counts(batch, STEPS), 0.8)
        loss = ttt_loss(draft, batch, teacher, weights, CHUNK).loss
    assert loss.requires_grad
    apart = [*draft.parameters(), batch.features, batch.teacher, batch.token_ids]
    for tensor in apart:
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    head = shape.draft_vocab_size * width * dtype.itemsize  # the head's gradient, counted with the gradients
    return sum(size for size, _ in kept.values()) - head, int(batch.supervised(STEPS).any(1).sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", SHAPES)
def test_activations_are_those_that_autograd_keeps(name: str, dtype: torch.dtype) -> None:
    shape = DraftShape(**{**SIZES, **SHAPES[name]})
    held, asked = held_for_backward(shape, dtype)
    assert asked < sum(LENGTHS)
    settings = MemorySettings(STEPS, sum(LENGTHS), element=dtype.itemsize, asked=asked, cuda=False, chunk=CHUNK)
    names = ("fc's input, norms", "embeddings, norm", "step outputs, norm", "unrolled steps")
    counted = {part.name: part.size for part in train_memory(shape, settings).parts}
    assert sum(counted.get(name, 0) for name in names) == pytest.approx(held, rel=0.02)


@pytest.mark.parametrize("name", ["llama", "mla"])
def test_states_are_those_of_the_optimizer(name: str) -> None:
    shape = DraftShape(**{**SIZES, **SHAPES[name]})
    draft = build_draft(shape)
    optimizer = torch.optim.AdamW([p for p in draft.parameters() if p.requires_grad])
    draft.logits(draft.step(*_one_token(draft))).sum().backward()
    for parameter in draft.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    moments = sum(t.nbytes for state in optimizer.state.values() for t in state.values() if t.dim())
    weights = sum(p.nbytes for p in draft.parameters() if p.requires_grad)
    parts = {part.name: part.size for part in train_memory(shape, MemorySettings(2, 64, element=4, cuda=False)).parts}
    assert parts["Adam's two moments, fp32"] == moments
    assert parts["weights"] == parts["gradients"] == weights
    assert parts["frozen embedding"] == draft.embed_tokens.weight.nbytes
    assert parts["d2t, t2d"] == draft.d2t.nbytes + draft.t2d.nbytes


def _one_token(draft: Any) -> tuple[Any, ...]:
    hidden = draft.fuse(torch.randn(1, 3 * 64))
    return hidden, torch.tensor([3]), torch.tensor([0]), lambda q, k, v: v.repeat_interleave(8 // v.shape[1], 1)


def test_states_are_shared_by_stage() -> None:
    shape, settings = DraftShape(**{**SIZES, **KIMI}), MemorySettings(4, 2048, world=8, accumulation=8)
    count = sum(trained_parameters(shape).values())
    assert count == 3 * 7168**2 + 4 * 7168 + 3 * 14336 * 8192 + 8192 * 7168 + 3 * 7168 * 12288 + 32000 * 7168
    by_stage = {s: {p.name: p.size for p in train_memory(shape, replace(settings, stage=s)).parts} for s in range(4)}
    for stage, parts in by_stage.items():
        world = 8 if stage else 1
        assert parts["Adam's two moments, fp32"] == pytest.approx(8 * count / world, rel=1e-6)
    assert "master weights, fp32" not in by_stage[0]
    assert by_stage[1]["gradients"] == 2 * count > by_stage[2]["gradients"] > 2 * count / 8
    assert by_stage[3]["gradients"] == pytest.approx(2 * count / 8, rel=1e-6)


def test_whole_matrices_of_a_partition_are_counted() -> None:
    sizes = {"a": 10, "b": 30, "c": 8}  # partitions of 24: a + b, b + c
    assert memory._touched(sizes, 2) == 40
    assert memory._touched(sizes, 1) == 48


def test_recomputing_keeps_less_and_the_more_steps_the_less() -> None:
    shape = DraftShape(**{**SIZES, **KIMI})
    saved = []
    for steps in (2, 7):
        plain = train_memory(shape, MemorySettings(steps, 8192, world=8, stage=1))
        again = train_memory(shape, replace(plain.settings, recompute=True))
        saved.append(plain.peak - again.peak)
    assert saved[1] > 3 * saved[0] > 0


def test_the_lowest_stage_that_fits_is_chosen() -> None:
    shape = DraftShape(**{**SIZES, **KIMI})
    settings = MemorySettings(4, 2048, world=8, accumulation=8)
    peaks = {s: train_memory(shape, replace(settings, stage=s)).peak for s in (1, 2, 3)}
    assert peaks[1] > peaks[2] > peaks[3]
    for stage in (1, 2, 3):
        chosen, looked_at = choose_stage(shape, settings, peaks[stage])
        assert chosen.settings.stage == stage and [p.settings.stage for p in looked_at] == list(range(1, stage + 1))
    with pytest.raises(ConfigError, match=r"at any ZeRO stage.*stage 3 needs .* GiB a process.*most .*= ") as err:
        choose_stage(shape, settings, peaks[3] - 1)
    assert "\n" not in str(err.value)


def test_a_stage_that_is_set_stays_and_a_checkpoints_is_kept() -> None:
    shape = DraftShape(**SIZES)
    cfg = TrainConfig(zero_stage=-1)
    settings = memory_settings(cfg, shape, world=2, rows=64, accumulation=1, dtype=torch.float32, cuda=False)
    chosen, line = with_stage(cfg, shape, settings, GIB)
    assert chosen.zero_stage == 0 and line.startswith("ZeRO stage 0 is the lowest that fits")
    assert with_stage(replace(cfg, zero_stage=2), shape, settings, 1) == (replace(cfg, zero_stage=2), "")
    assert with_stage(cfg, shape, settings, GIB, before=3)[0].zero_stage == 3
    with pytest.raises(ConfigError, match="does not fit"):
        with_stage(cfg, shape, settings, 1000)


def test_the_limit_leaves_the_margin() -> None:
    cfg = TrainConfig(gpu_memory_gib=80, memory_margin=0.25)
    assert memory_limit(cfg, torch.device("cpu")) == 60 * GIB
    assert memory_limit(replace(cfg, gpu_memory_gib=0), torch.device("cpu")) > 0


def test_deepspeed_is_told_buckets_no_larger_than_the_draft() -> None:
    cfg = TrainConfig(bucket_elements=1000)
    assert bucket_elements(cfg, 5001) == 1000 and bucket_elements(cfg, 301) == 302
    told = zero_config(cfg, 2, 301, cuda=True)
    assert told["reduce_bucket_size"] == told["allgather_bucket_size"] == 302
    assert told["overlap_comm"] and told["contiguous_gradients"] and "offload_optimizer" not in told
    assert not zero_config(cfg, 2, 301, cuda=False)["overlap_comm"]
    away = zero_config(replace(cfg, offload_optimizer=True, zero_stage=1), 1, 301, cuda=True)
    assert away["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    assert effective_stage(0, torch.bfloat16) == 1 and effective_stage(0, torch.float32) == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("zero_stage", -2),
        ("activation_checkpointing", "all"),
        ("memory_margin", 1.0),
        ("bucket_elements", 0),
        ("nodes", 0),
        ("gpu_memory_gib", -1.0),
    ],
)
def test_bad_settings_are_named(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"train.{field}"):
        replace(TrainConfig(), **{field: value}).validate()
    with pytest.raises(ConfigError, match="zero_stage"):
        TrainConfig(offload_optimizer=True).validate()
