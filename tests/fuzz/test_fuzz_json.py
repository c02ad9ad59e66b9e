"""Our own JSON files with something changed: manifests, records of stages, results, run ids; and ids of layers."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from bad_values import changed, scalars, taken_or_refused, texts, values
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from data_prep.claims import Owner
from data_prep.rounds import parse_size
from data_prep.store import StoreManifest
from data_prep.store.seal import check_seal, is_whole
from eagle3.atomic import read_json
from eagle3.checked_json import read_checked
from eagle3.conventions import CONVENTIONS, explain, parse_all, sglang_convention
from eagle3.errors import IntegrityError
from eagle3.place import store_place
from eagle3.target_identity import TargetIdentity
from eagle3.wiring import Site, Wiring
from eval.agreement import agreements
from eval.compare import check_comparable, load_run
from eval.engines.base import Generation, chain_counts
from eval.partial import Partial
from eval.results import AcceptResult, Baseline, Served, SetResult, prompt_result, summarize
from eval.series import series_of
from eval.table import show
from train.front.records import StageRecord
from train.job import TrainJob, TrainResult
from train.metrics import read_metrics
from train.resume import newest_whole, recorded

WIRING = Wiring((Site(2), Site(0), Site(4)), "final", "llama", 8, 16)
MANIFEST = StoreManifest(WIRING, {"name": "Tiny"}, "tok", "tpl", capture={"backend": "hf"}).to_dict()
IDENTITY = TargetIdentity("L", "llama", 8, 16, 32, "a", "b", "bfloat16", "none").to_dict()
RESULT = {
    "steps": 3,
    "resumed_from": 0,
    "weights": "w",
    "metrics": "m",
    "train": {},
    "val": {"acc": [0.5]},
    "seconds": 1.0,
}
KEYS = ("id", "fingerprint", "inputs", "settings", "runs", "facts", "files", "step", "identity")


def _results() -> dict[str, Any]:
    histogram = [1, 2, 1]
    tried, right = chain_counts(histogram)
    one = Generation([5] * 9, 4, 4, 8, histogram, tried, right, 1.0, ended=False)
    rows = [prompt_result("p", one, Baseline(9, 2.0, True), "text")]
    wiring = WIRING.to_dict()
    served = Served("matched", wiring, [], [SetResult(summarize("chat", rows), "key", rows)], summarize("all", rows))
    whole = AcceptResult("tiny", "local", 2, 0.0, 12, 0, wiring, {}, [0.6, 0.4], [served])
    told: dict[str, Any] = json.loads(json.dumps(asdict(whole)))
    return told


RESULTS = _results()


def _written(folder: Path, value: Any, name: str = "x.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(value))
    return path


@given(value=changed(MANIFEST) | values())
@example(value={**MANIFEST, "dtype": []})
@example(value={**MANIFEST, "codec": []})
@example(value={**MANIFEST, "wiring": {**MANIFEST["wiring"], "num_layers": "61"}})
def test_a_manifest_of_any_shape_is_read_or_refused(value: Any, tmp_path: Path) -> None:
    _written(tmp_path, value, "manifest.json")
    found = taken_or_refused(lambda: StoreManifest.read(tmp_path))
    if found is not None:
        taken_or_refused(lambda: found.check_same(StoreManifest.from_dict(MANIFEST), "here"))
        assert found.token_bytes > 0


@given(value=changed({"records": 1, "tokens": 2, "supervised": 3, "shards": {"shard-0.json": "a"}}) | values())
def test_a_seal_of_any_shape_is_read_or_refused(value: Any, tmp_path: Path) -> None:
    _written(tmp_path, value, "complete.json")
    taken_or_refused(lambda: check_seal(tmp_path, []))
    taken_or_refused(lambda: is_whole(tmp_path))


@given(value=changed(WIRING.to_dict()) | values(tuple(WIRING.to_dict())))
@example(value={**WIRING.to_dict(), "model_type": []})
@example(value={**WIRING.to_dict(), "aux": ["layer_" + "9" * 5000]})
def test_a_wiring_of_any_shape_is_read_or_refused(value: Any) -> None:
    found = taken_or_refused(lambda: Wiring.from_dict(value))
    if found is not None:
        assert found.differences(WIRING) is not None
        for one in CONVENTIONS.values():
            taken_or_refused(lambda one=one: one.render(found))
    taken_or_refused(lambda: TargetIdentity.from_dict(value))


@given(ids=st.lists(st.integers(-3, 12) | scalars, max_size=5) | values(), name=st.sampled_from(sorted(CONVENTIONS)))
@example(ids=5, name="vllm")
@example(ids="2,4,6", name="vllm")
def test_layer_ids_of_any_kind_are_parsed_or_refused(ids: Any, name: str) -> None:
    taken_or_refused(lambda: CONVENTIONS[name].parse_like(ids, WIRING))
    parse_all(ids if isinstance(ids, list) else None, WIRING)


@given(text=texts | st.text(alphabet="layer_0123456789² embding.-+", max_size=12))
@example(text="layer_" + "9" * 5000)
@example(text="0." + "9" * 5000)
def test_names_of_any_spelling_are_parsed_or_refused(text: str) -> None:
    taken_or_refused(lambda: Site.parse(text))
    taken_or_refused(lambda: sglang_convention(text))
    taken_or_refused(lambda: parse_size(text, "disk_budget"))
    taken_or_refused(lambda: store_place(text))
    Owner.read(text)


@given(value=changed(RESULTS))
@example(value={**RESULTS, "num_steps": "two"})
@example(value={**RESULTS, "served": []})
@example(value={**RESULTS, "trained": {**RESULTS["trained"], "num_layers": None}})
def test_results_of_any_shape_are_shown_or_refused(value: Any, tmp_path: Path) -> None:
    found = taken_or_refused(lambda: load_run(_written(tmp_path, value)))
    if found is None:
        return
    sound = AcceptResult.load(_written(tmp_path, RESULTS, "sound.json"))
    taken_or_refused(lambda: check_comparable([sound, found]))
    taken_or_refused(lambda: agreements(sound, found))
    with open(tmp_path / "table.txt", "w", encoding="utf-8", errors="replace") as out:
        taken_or_refused(lambda: show(series_of([found]), Console(file=out, width=120)))


@given(value=changed(RESULT) | values(tuple(RESULT)))
def test_a_training_result_of_any_shape_is_read_or_refused(value: Any, tmp_path: Path) -> None:
    found = taken_or_refused(lambda: TrainResult.read(_written(tmp_path, value)))
    if found is not None:
        assert isinstance(found.damage(), str)
        assert isinstance(found.val, dict)
    taken_or_refused(lambda: TrainJob.load(_written(tmp_path, value)))


@given(value=values(KEYS) | st.dictionaries(st.sampled_from(KEYS), values(KEYS), max_size=5))
@example(value={"inputs": None})
@example(value={"identity": None})
def test_small_files_of_any_shape_are_read_or_refused(value: Any, tmp_path: Path) -> None:
    path = _written(tmp_path, value)
    taken_or_refused(lambda: read_json(path, needs=("id",)))
    taken_or_refused(lambda: read_checked(path, "write it again"))
    record = StageRecord(path, {"a": 1})
    taken_or_refused(record.finished)
    taken_or_refused(record.changed)
    Partial(path, {}).get("matched", 1, "x")
    folder = tmp_path / "step-00000001"
    folder.mkdir(exist_ok=True)
    for name in ("checkpoint.json", "complete.json", "marker.json"):
        _written(folder, value, name)
    taken_or_refused(lambda: newest_whole(tmp_path))
    taken_or_refused(lambda: recorded(tmp_path, "train"))


@given(raw=st.binary(max_size=60) | values().map(lambda value: json.dumps(value).encode() + b"\n"))
def test_metrics_of_any_bytes_are_read(raw: bytes, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(raw)
    assert all(isinstance(row, dict) for row in taken_or_refused(lambda: read_metrics(path)) or [])


def test_explaining_a_wiring_takes_any_two() -> None:
    assert explain(WIRING, WIRING) == []


def test_a_key_that_is_needed_is_named(tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match=r"lacks a key.*: id\. To mend"):
        read_json(_written(tmp_path, {"x": 1}), needs=("id",))
