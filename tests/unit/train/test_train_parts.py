"""The model factory: what comes from the target, what from the draft's own start."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from eagle3.config import DraftConfig
from eagle3.draft import DraftShape
from eagle3.errors import RedraftError
from eagle3.vocab import build_draft_vocab, save_vocab
from train.model import Trainee, TrainParts
from train.parts import open_parts
from train.tables import frozen_table

H, V, VD = 8, 20, 6


@pytest.fixture
def arguments(tmp_path: Path) -> dict[str, Any]:
    """Arguments for a target folder that holds the three tensors the draft needs."""
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": H, "vocab_size": V}
    config |= {"num_hidden_layers": 6, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {"model.embed_tokens.weight": torch.randn(V, H), "lm_head.weight": torch.randn(V, H)}
    save_file({**tensors, "model.norm.weight": torch.rand(H)}, tmp_path / "model.safetensors")
    save_vocab(tmp_path / "vocab.safetensors", build_draft_vocab(torch.arange(V), VD))
    rope = {"rope_theta": 1e4, "rope_scaling": None}
    shape = DraftShape(H, 12, 2, 1, 4, V, VD, 3, 1e-5, rope, 64)
    return {
        "target": str(tmp_path),
        "shape": shape.to_dict(),
        "vocab": str(tmp_path / "vocab.safetensors"),
        "draft": asdict(DraftConfig(vocab_size=VD)),
        "teacher": "final",
        "seed": 0,
    }


def test_draft_and_teacher_come_from_the_target(arguments: dict[str, Any]) -> None:
    arguments = json.loads(json.dumps(arguments))  # as a worker process gets them
    parts = open_parts(**arguments)
    chosen = parts.draft.to_target_ids(torch.arange(VD))
    assert chosen.tolist() == list(range(V - VD, V))  # the most counted
    assert torch.equal(parts.draft.lm_head.weight, parts.teacher.head[chosen])
    assert parts.teacher.eps == 1e-5 and not parts.teacher.normed
    assert open_parts(**{**arguments, "teacher": "final_normed"}).teacher.normed
    again, other = open_parts(**arguments), open_parts(**{**arguments, "seed": 1})
    assert torch.equal(parts.draft.fc.weight, again.draft.fc.weight)
    assert not torch.equal(parts.draft.fc.weight, other.draft.fc.weight)


def test_another_vocabulary_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(RedraftError, match="vocabulary"):
        open_parts(**{**arguments, "shape": {**arguments["shape"], "draft_vocab_size": VD + 1}})


def test_trainee_trains_all_but_the_embedding(arguments: dict[str, Any]) -> None:
    trainee = Trainee(open_parts(**arguments), torch.device("cpu"), torch.float32, 16)
    names = {name for name, _ in trainee.named_parameters()}
    assert "draft.fc.weight" in names and "draft.lm_head.weight" in names
    assert not any("embed" in name or "teacher" in name for name in names | set(trainee.state_dict()))
    n = 5
    mask = torch.tensor([False, True, True, True, False])
    weights = torch.ones(2, dtype=torch.float64)
    inputs = torch.randn(n, 3 * H), torch.arange(n), torch.randn(n, H), mask, [n], weights
    loss, stats = trainee(*inputs)
    loss.backward()
    assert stats[1].tolist() == [3, 3] and not stats.requires_grad
    assert [name for name, p in trainee.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize("saved", [torch.bfloat16, torch.float16, torch.float32])
def test_tables_of_a_target_saved_in_16_bits_take_no_more(saved: torch.dtype) -> None:
    torch.manual_seed(0)
    table = torch.randn(2500, 8).to(saved).float()
    held = frozen_table(table, "cpu", torch.float32)
    assert held.dtype == saved and torch.equal(held.float(), table)
    table[-1, -1] = 1 / 3  # one value that 16 bits do not hold, and all of it stays as it is
    assert frozen_table(table, "cpu", torch.float32).dtype == torch.float32
    assert frozen_table(table, "cpu", torch.bfloat16).dtype == torch.bfloat16


def test_trainee_holds_such_tables_narrow_and_measures_the_same(arguments: dict[str, Any]) -> None:
    parts = open_parts(**arguments)
    rounded = parts.draft.embed_tokens.weight.bfloat16().float(), parts.teacher.head.bfloat16().float()
    inputs = torch.randn(5, 3 * H), torch.arange(5), torch.randn(5, H), torch.ones(5, dtype=torch.bool), [5]
    found = []
    for offset in (0.0, 1e-7):  # a millionth more, and the tables have to stay wide
        parts = open_parts(**arguments)
        with torch.no_grad():
            parts.draft.embed_tokens.weight.copy_(rounded[0] + offset)
        head = replace(parts.teacher, head=rounded[1] + offset)
        trainee = Trainee(TrainParts(parts.draft, head), torch.device("cpu"), torch.float32, 16)
        held = {trainee.draft.embed_tokens.weight.dtype, trainee._teacher.head.dtype}
        assert held == {torch.float32 if offset else torch.bfloat16}
        loss, stats = trainee(*inputs, torch.ones(2, dtype=torch.float64))
        found.append((loss, stats))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)
