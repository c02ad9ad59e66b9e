"""Preparing: the split, the manifest, skipped records, and folders that appear whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_tokenizers import CHATML, make_tokenizer

from data_prep.config import DataConfig
from data_prep.prepare import count_supervised, in_validation, load_prepared, prepare, read_manifest
from data_prep.render import NothingToLearnError
from eagle3.errors import DataError, IntegrityError

TOKENIZER = make_tokenizer(CHATML)


def talk(i: int, answer: str = "blue") -> dict:
    messages = [{"role": "user", "content": f"why {i}"}, {"role": "assistant", "content": f"{answer} {i}"}]
    return {"id": f"r{i}", "messages": messages}


def config(tmp_path: Path, records: list[dict], **settings: Any) -> DataConfig:
    path = tmp_path / "talk.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return DataConfig(sources=[str(path)], **settings)


def ids(path: Path, split: str) -> list[str]:
    return list(load_prepared(path, split)["record_id"])


def test_rows_and_manifest(tmp_path: Path) -> None:
    steps: list[int] = []
    cfg = config(tmp_path, [talk(i) for i in range(40)], val_fraction=0.25)
    manifest = prepare(cfg, TOKENIZER, tmp_path / "out", steps.append)
    assert manifest == read_manifest(tmp_path / "out")
    train, val = load_prepared(tmp_path / "out", "train"), load_prepared(tmp_path / "out", "val")
    assert sum(steps) == 40 == len(train) + len(val) and 3 <= len(val) <= 20
    assert sorted([*train["record_id"], *val["record_id"]]) == sorted(f"r{i}" for i in range(40))
    row = train[0]
    answer = [t for t, on in zip(row["input_ids"], row["loss_mask"], strict=True) if on]
    assert TOKENIZER.decode(answer) == f"blue {row['record_id'][1:]}<|im_end|>"
    assert manifest["counts"]["train"]["tokens"] == sum(len(x) for x in train["input_ids"])
    assert manifest["counts"]["train"]["supervised_tokens"] == sum(sum(x) for x in train["loss_mask"])
    assert not [p for p in tmp_path.iterdir() if p.name.endswith(".tmp")]


def test_split_goes_by_record_and_seed_not_by_place(tmp_path: Path) -> None:
    records = [talk(i) for i in range(40)]
    content = []
    for name, rows, seed in (("a", records, 0), ("b", [*records[::-1], talk(99)], 0), ("c", records, 1)):
        prepare(config(tmp_path, rows, val_fraction=0.25, seed=seed), TOKENIZER, tmp_path / name)
        content.append({r for r in ids(tmp_path / name, "val") if r != "r99"})
    assert content[0] == content[1] != content[2]
    assert content[0] == {f"r{i}" for i in range(40) if in_validation(f"r{i}", 0, 0.25)}


def test_same_input_gives_same_content(tmp_path: Path) -> None:
    cfg = config(tmp_path, [talk(i) for i in range(12)])
    one, two = prepare(cfg, TOKENIZER, tmp_path / "a"), prepare(cfg, TOKENIZER, tmp_path / "a")
    for split in ("train", "val"):  # `datasets` writes a random number into its own file
        del one["files"][split]["state.json"], two["files"][split]["state.json"]
    assert one == two
    other = prepare(config(tmp_path, [talk(i, "mat") for i in range(12)]), TOKENIZER, tmp_path / "a")
    assert other["content"] != one["content"]


def test_nothing_to_learn_is_counted_and_named_or_refused(tmp_path: Path) -> None:
    records = [talk(0), {"id": "mute", "messages": talk(1)["messages"][:1]}, talk(2)]
    manifest = prepare(config(tmp_path, records), TOKENIZER, tmp_path / "out")
    assert manifest["skipped"] == [{"record": "mute", "why": "no assistant turn"}]
    assert manifest["counts"]["skipped"] == 1 and manifest["counts"]["read"] == 3
    with pytest.raises(NothingToLearnError, match="mute"):
        prepare(config(tmp_path, records, on_nothing_to_learn="refuse"), TOKENIZER, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_twins_never_reach_both_splits(tmp_path: Path) -> None:
    twins = [talk(0) | {"id": f"t{i}"} for i in range(30)]
    manifest = prepare(config(tmp_path, [*twins, talk(1)], val_fraction=0.5), TOKENIZER, tmp_path / "out")
    assert manifest["counts"]["skipped"] == 29 and "same tokens as t0" in manifest["skipped"][0]["why"]
    assert len(ids(tmp_path / "out", "train")) == len(ids(tmp_path / "out", "val")) == 1


def test_max_samples_counts_usable_records(tmp_path: Path) -> None:
    mute = {"id": "mute", "messages": talk(9)["messages"][:1]}
    records = [mute, *(talk(i) for i in range(9))]
    manifest = prepare(config(tmp_path, records, max_samples=4), TOKENIZER, tmp_path / "out")
    assert manifest["counts"]["train"]["records"] + manifest["counts"]["val"]["records"] == 4


def test_small_data_still_has_both_splits(tmp_path: Path) -> None:
    prepare(config(tmp_path, [talk(0), talk(1)], val_fraction=0.001), TOKENIZER, tmp_path / "out")
    assert len(ids(tmp_path / "out", "train")) == len(ids(tmp_path / "out", "val")) == 1
    prepare(config(tmp_path, [talk(0)], val_fraction=0.0), TOKENIZER, tmp_path / "none")
    assert (len(ids(tmp_path / "none", "train")), len(ids(tmp_path / "none", "val"))) == (1, 0)


def test_too_little_data_is_one_line_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"0 usable conversations, 3 records skipped.*no answer within 5 tokens"
    ) as caught:
        prepare(config(tmp_path, [talk(i) for i in range(3)], max_length=5), TOKENIZER, tmp_path / "out")
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


def test_failure_leaves_the_older_folder(tmp_path: Path) -> None:
    manifest = prepare(config(tmp_path, [talk(i) for i in range(3)]), TOKENIZER, tmp_path / "out")
    with pytest.raises(DataError, match="record 2"):
        prepare(config(tmp_path, [talk(0), {"id": "bad"}]), TOKENIZER, tmp_path / "out")
    assert read_manifest(tmp_path / "out") == manifest
    assert not [p for p in tmp_path.iterdir() if p.name.endswith(".tmp")]


def test_damaged_folder_is_refused(tmp_path: Path) -> None:
    prepare(config(tmp_path, [talk(i) for i in range(3)]), TOKENIZER, tmp_path / "out")
    with pytest.raises(IntegrityError, match="cannot be read"):
        load_prepared(tmp_path / "out", "test")
    (tmp_path / "out" / "manifest.json").unlink()
    with pytest.raises(IntegrityError, match="prepare stage"):
        load_prepared(tmp_path / "out", "train")


def test_supervised_counts_leave_out_what_is_never_predicted(tmp_path: Path) -> None:
    cfg = config(tmp_path, [talk(i) for i in range(8)])
    only = "{% for m in messages if m['role'] == 'assistant' %}{{ m['content'] }}<|im_end|>{% endfor %}"
    tokenizer = make_tokenizer(only)
    prepare(cfg, tokenizer, tmp_path / "out")
    dataset = load_prepared(tmp_path / "out", "train")
    counts = count_supervised(dataset, len(tokenizer))
    expected = np.zeros(len(tokenizer), dtype=np.int64)
    for row in dataset["input_ids"]:
        for token in row[2:]:
            expected[token] += 1
    assert counts.dtype == np.int64 and counts.tolist() == expected.tolist()
    assert counts.sum() < sum(len(row) for row in dataset["input_ids"])
    with pytest.raises(DataError, match="outside the vocabulary"):
        count_supervised(dataset, 10)
