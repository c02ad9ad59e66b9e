"""The benchmarks of planning and writing count what they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import padding, writers
from benchmarks.padding import fewest, waste
from data_prep.units import plan_batches


def test_waste_counts_padded_tokens_and_batches() -> None:
    assert waste([10, 10, 10, 10], 20, 10**6, plan_batches) == (1.0, 2)
    padded, batches = waste([10, 5], 20, 10**6, fewest)
    assert (padded, batches) == (20 / 15, 1)
    apart, count = waste([10, 5], 20, 1, fewest)  # a window a record
    assert (apart, count) == (1.0, 2)


def test_padding_shrinks_with_the_window(tmp_path: Path) -> None:
    assert padding.main(["--records", "400", "--longest", "512", "--batch-tokens", "2048", "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "padding.json").read_text())
    first, *_, last = result["rows"]
    assert 1 < last["planned"][0] < first["planned"][0] < first["fewest"][0]
    assert all(
        row["planned"][0] <= row["fewest"][0] and row["planned"][1] >= row["fewest"][1] for row in result["rows"]
    )
    assert "2,048" in (tmp_path / "padding.txt").read_text()


def test_writers_benchmark_fills_whole_stores_and_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    real = writers.extract

    def watched(*args: Any, **kwargs: Any) -> Any:
        done.append(real(*args, **kwargs))
        return done[-1]

    monkeypatch.setattr(writers, "extract", watched)
    sizes = ["--hidden", "64", "--documents", "3", "--copies", "2", "--tokens", "8", "--shard-tokens", "16"]
    assert writers.main([*sizes, "--rounds", "1", "--writers", "1", "2", "--out", str(tmp_path)]) == 0
    assert [(one.records, one.complete) for one in done] == [(6, True)] * (
        2 * 4 * 2
    )  # uncounted round, codecs, writers
    assert sorted(path.name for path in tmp_path.iterdir()) == ["writers.json", "writers.txt"]
    rates = json.loads((tmp_path / "writers.json").read_text())["rates"]
    assert {codec: [len(one) for one in each] for codec, each in rates.items()} == {name: [1, 1] for name in rates}


def test_sizes_that_cannot_be_are_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert writers.main(["--tokens", "0"]) == 2 and padding.main(["--records", "0"]) == 2
    told = capsys.readouterr().err
    assert "--tokens" in told and "--records" in told
