"""The plan's numbers are those that the run then costs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from data_prep.budget import check_space, draft_budget, gigabytes, state_bytes_per_token, store_budget
from data_prep.capture.sample import CapturedSample
from data_prep.store import StoreManifest, StoreWriter
from eagle3.config import DraftConfig
from eagle3.errors import RedraftError
from eagle3.wiring import Site, Wiring


def kimi(*layers: int) -> Wiring:
    return Wiring(tuple(Site(k) for k in layers), "final", "kimi_k25", 61, 7168)


def test_kimi_matches_the_published_cost(tmp_path: Path) -> None:
    assert state_bytes_per_token(kimi(3, 31, 59)) == 57344
    assert state_bytes_per_token(kimi(0, 3, 31)) == 43008  # the embedding costs nothing
    budget = store_budget(kimi(3, 31, 59), [2048] * 100_000, 16384, tmp_path / "not" / "there")
    assert gigabytes(budget.total_bytes) == "11.7 TB"
    assert budget.shards == 12_500 and budget.free_bytes > 0


def test_the_store_is_as_large_as_planned(
    tmp_path: Path, manifest: StoreManifest, make_sample: Callable[..., CapturedSample]
) -> None:
    lengths = [5, 9, 40, 3]
    with StoreWriter(tmp_path, manifest, 1000) as writer:
        for i, tokens in enumerate(lengths):
            writer.append(make_sample(f"r{i}", tokens))
        writer.finalize()
    data = (tmp_path / "shard-0-00000.safetensors").read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    budget = store_budget(manifest.wiring, lengths, 1000, tmp_path)
    assert budget.total_bytes == len(data) - header
    assert budget.largest_sample_bytes == 40 * budget.bytes_per_token


def test_too_small_a_disk_is_refused(tmp_path: Path) -> None:
    check_space(tmp_path, 0)
    with pytest.raises(RedraftError, match=r"not enough disk space.*11\.7 TB still to be written"):
        check_space(tmp_path / "later", 11_700_000_000_000)


def test_draft_parameters_by_hand() -> None:
    wiring = Wiring((Site(1), Site(2)), "final", "llama", 6, 8)
    draft = DraftConfig(vocab_size=10, intermediate_size=12, num_attention_heads=4, num_key_value_heads=2, head_dim=3)
    budget = draft_budget(wiring, draft, vocab_size=100)
    assert budget.fc == 16 * 8
    assert budget.attention == 16 * 12 + 2 * (16 * 6) + 12 * 8
    assert budget.mlp == 3 * 8 * 12
    assert (budget.norms, budget.lm_head, budget.frozen) == (32, 80, 800)
    with pytest.raises(RedraftError, match=r"draft\.head_dim"):
        draft_budget(wiring, DraftConfig(10, 12, 4, 2, 0), 100)
