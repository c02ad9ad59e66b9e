"""The quality benchmark's own parts: plans, outcomes that are taken over, tables, and data handed to other trainers."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.quality.neutral import llama_config, read_weights, write_plan
from benchmarks.quality.runs import Outcome, Setting, _former, outcome_key
from benchmarks.quality.specforge_train import Records
from benchmarks.quality.table import as_table, gather, spread
from benchmarks.quality.variants import PLANS, Variant, chosen
from benchmarks.side_by_side import machine
from eagle3.atomic import write_json
from eagle3.draft_build import build_draft
from eagle3.draft_shape import DraftShape
from eagle3.errors import ConfigError, IntegrityError
from eagle3.vocab import build_draft_vocab
from train.batches import StepPlan
from train.config import TrainConfig

SHAPE = DraftShape(
    hidden_size=16,
    intermediate_size=24,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    vocab_size=40,
    draft_vocab_size=17,
    num_aux=3,
    rms_norm_eps=1e-5,
    rope={"rope_theta": 500.0},
    max_position_embeddings=64,
)


def setting(work: Path, steps: int = 4) -> Setting:
    return Setting("smollm2", ("data.max_samples=20",), steps, work, work / "python")


@pytest.mark.parametrize("plan", sorted(PLANS))
def test_every_variant_of_a_plan_is_a_valid_configuration(plan: str, tmp_path: Path) -> None:
    variants = chosen(plan, [])
    assert len({variant.name for variant in variants}) == len(variants)
    assert any(variant.side == "specforge" for variant in variants)
    for variant in variants:
        own = variant.settings if variant.side == "redraft" else ()
        config = setting(tmp_path).config(tmp_path / variant.name, 3, own)
        assert config.train.seed == 3 and config.train.max_steps == 4 and config.data.max_samples == 20
        assert config.paths.store == str(tmp_path / "base" / "store")  # shared


def test_a_plan_is_narrowed_by_name_and_a_wrong_name_is_told() -> None:
    assert [variant.name for variant in chosen("screen", ["tv", "last"])] == ["last", "tv"]
    with pytest.raises(ConfigError, match="--only"):
        chosen("screen", ["no-such"])
    with pytest.raises(ConfigError, match="--plan"):
        chosen("all", [])


def test_an_outcome_is_taken_over_only_for_the_same_training(tmp_path: Path) -> None:
    identity = {name: name for name in ("content", "wiring", "target", "shape", "train.global_batch_size")}
    identity |= {"train.epochs": 1, "train.lr": 0.1}
    theirs, ours = Variant("a", ("--lr=1",), "specforge"), Variant("a", ("train.lr=0.1",))
    for variant in (theirs, ours):
        key = outcome_key(setting(tmp_path), variant, 0, identity)
        write_json(tmp_path / "outcome.json", asdict(Outcome("a", 0, 1.2, [0.2], 5.0, key)))
        assert _former(tmp_path / "outcome.json", key) == Outcome("a", 0, 1.2, [0.2], 5.0, key)
        for other in (
            outcome_key(setting(tmp_path), variant, 0, {**identity, "content": "y"}),
            outcome_key(setting(tmp_path), variant, 1, identity),
            outcome_key(setting(tmp_path, steps=5), variant, 0, identity),
        ):
            assert _former(tmp_path / "outcome.json", other) is None
    faster = {**identity, "train.lr": 0.2}  # concerns our side alone
    assert outcome_key(setting(tmp_path), ours, 0, faster) != outcome_key(setting(tmp_path), ours, 0, identity)
    assert outcome_key(setting(tmp_path), theirs, 0, faster) == outcome_key(setting(tmp_path), theirs, 0, identity)
    again = Variant("a", ("--lr=2",), "specforge")
    assert outcome_key(setting(tmp_path), again, 0, identity) != outcome_key(setting(tmp_path), theirs, 0, identity)
    assert _former(tmp_path / "none.json", key) is None


def outcomes() -> tuple[list[Variant], list[Outcome]]:
    variants = [Variant("own"), Variant("low", (), "specforge"), Variant("high", (), "specforge"), Variant("not-run")]
    taus = {"own": (1.5, 1.7), "low": (1.0, 1.2), "high": (1.2, 1.3)}
    made = [
        Outcome(name, seed, tau - 0.1, [], 1.0, "k", tau=tau) for name, t in taus.items() for seed, tau in enumerate(t)
    ]
    return variants, made


def test_ratios_are_of_means_against_specforges_best() -> None:
    rows = {row["variant"]: row for row in gather(*outcomes())}
    assert list(rows) == ["own", "low", "high"]
    assert rows["own"]["tau"] == pytest.approx((1.6, 0.1 * 2**0.5)) and rows["own"]["seeds"] == [0, 1]
    assert rows["own"]["tau_ratio"] == pytest.approx(1.6 / 1.25)
    assert rows["own"]["predicted_ratio"] == pytest.approx(1.5 / 1.15)
    assert rows["high"]["tau_ratio"] == 1.0 and rows["low"]["tau_ratio"] == pytest.approx(1.1 / 1.25)
    table = as_table(list(rows.values()), "t", machine(torch.device("cpu")))
    assert table.row_count == 3


def test_without_specforge_or_measure_there_is_no_ratio() -> None:
    (row,) = gather([Variant("own")], [Outcome("own", 0, 1.4, [], 1.0, "k")])
    assert row["tau"] is None and row["tau_ratio"] is None and row["predicted_ratio"] is None
    assert row["predicted"] == (1.4, 0.0) and spread([]) is None


def test_the_plan_is_this_projects_own_order(tmp_path: Path) -> None:
    cfg = TrainConfig(global_batch_size=2, micro_batch_size=2, max_steps=5, seed=7)
    assert write_plan(tmp_path / "plan.json", 8, cfg) == 5
    plan = StepPlan(8, cfg, 1, 0)
    assert json.loads((tmp_path / "plan.json").read_text())["steps"] == [plan.global_batch(s) for s in range(5)]


def test_another_trainers_weights_are_checked_both_ways(tmp_path: Path) -> None:
    vocab, embedding = build_draft_vocab(torch.arange(40), 17), torch.randn(40, 16)
    torch.manual_seed(1)
    draft = build_draft(SHAPE)
    state = {**draft.state_dict(), "d2t": vocab.d2t, "t2d": vocab.t2d, "embed_tokens.weight": embedding}

    def read(changes: dict[str, Any], drop: str = "") -> Any:
        save_file({name: t for name, t in {**state, **changes}.items() if name != drop}, tmp_path / "w.safetensors")
        return read_weights(tmp_path / "w.safetensors", SHAPE, vocab, embedding)

    found = read({})
    assert all(torch.equal(found.state_dict()[name], state[name]) for name in state)
    with pytest.raises(IntegrityError, match=r"missing norm\.weight"):
        read({}, drop="norm.weight")
    with pytest.raises(IntegrityError, match="layers"):
        read({"layers.0.bias": torch.zeros(3)})
    with pytest.raises(IntegrityError, match=r"changed embed_tokens\.weight"):
        read({"embed_tokens.weight": embedding + 1})
    with pytest.raises(IntegrityError, match="changed d2t"):
        read({"d2t": vocab.d2t + 1})


def test_a_llama_configuration_has_the_drafts_sizes() -> None:
    config = llama_config(SHAPE, SimpleNamespace(text_config={"initializer_range": 0.04}))  # type: ignore[arg-type]
    for name in (
        "hidden_size",
        "intermediate_size",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "draft_vocab_size",
    ):
        assert config[name] == getattr(SHAPE, name)
    assert config["rope_theta"] == 500.0 and config["initializer_range"] == 0.04


def test_records_are_padded_with_nothing_to_learn(tmp_path: Path) -> None:
    lengths = torch.tensor([2, 4, 3])
    rows = int(lengths.sum())
    fields = {
        "lengths": lengths,
        "input_ids": torch.arange(rows),
        "loss_mask": torch.ones(rows, dtype=torch.int64),
        "aux_hidden_state": torch.arange(rows * 6).view(rows, 6).to(torch.bfloat16),
        "hidden_state": torch.arange(rows * 2).view(rows, 2).to(torch.bfloat16),
    }
    save_file(fields, tmp_path / "train.safetensors")
    batch = Records(tmp_path).batch([2, 1])
    assert batch["input_ids"].tolist() == [[6, 7, 8, 0], [2, 3, 4, 5]]
    assert batch["loss_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert batch["hidden_state"].dtype == torch.float32 and batch["hidden_state"][0, 1, 0] == 42
    assert not batch["target"][0, 3].any()
