from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from data_prep.legacy.__main__ import main
from data_prep.prepare import load_prepared
from data_prep.standardize import standardize
from data_prep.store import Store
from eagle3.target_weights import TargetWeights
from eagle3.wiring import Site, Wiring

ORIGIN = ("embedding", "layer_2", "layer_4", "layer_6")
WHOLE = ("layer_2", "layer_4", "layer_5", "final")
WIRING = Wiring((Site(2), Site(4), Site(6)), "final", "llama", 8, 64)


@pytest.fixture
def convert(tiny_llama_path: Path, tmp_path: Path) -> Callable[..., int]:
    def run(folder: Path, *options: str) -> int:
        return main(
            ["convert", str(folder), "--target", str(tiny_llama_path), "--store", str(tmp_path / "store"), *options]
        )

    return run


def rewrite(path: Path, **changes: Any) -> None:
    data = torch.load(path, weights_only=True)
    torch.save({**data, **changes}, path)


def test_only_the_final_state_is_extracted(
    write_v1: Callable[..., Path],
    convert: Callable[..., int],
    samples: Any,
    tmp_path: Path,
    tiny_llama_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert convert(write_v1(*ORIGIN)) == 0
    said = capsys.readouterr().out
    assert "Only the true final state is missing" in said
    assert "aux layer_2, layer_4, layer_6, teacher final computed with the target" in said
    store = Store.open(
        tmp_path / "store", wiring=WIRING, target=TargetWeights(tiny_llama_path).identity(), template_hash=""
    )
    assert store.record_ids == [f"data_{i}" for i in range(4)]
    for i, sample in enumerate(samples):
        got = store[i]
        assert torch.equal(got.input_ids, sample.ids)
        assert torch.equal(got.loss_mask, sample.mask.bool())
        for name in ("layer_2", "layer_4", "layer_6"):
            assert torch.equal(got.sites[name], sample.states[name])  # the set's own bits
        torch.testing.assert_close(got.final, sample.states["final"], rtol=0.02, atol=0.02)
        assert standardize(got, WIRING).features.shape == (len(sample.ids) - 1, 192)
    assert store.manifest.capture["teacher"] == "hf float32"
    store.verify()


@pytest.mark.parametrize("teacher", ["final", "final_normed"])
@pytest.mark.parametrize("writer", ["write_v0", "write_specforge", "write_hs"])
def test_whole_sets_are_converted_as_they_are(
    request: pytest.FixtureRequest,
    convert: Callable[..., int],
    samples: Any,
    tmp_path: Path,
    writer: str,
    teacher: str,
) -> None:
    assert convert(request.getfixturevalue(writer)(*WHOLE[:3], teacher)) == 0
    store = Store.open(tmp_path / "store")
    assert store.manifest.wiring.names == ["layer_2", "layer_4", "layer_5"]
    assert store.manifest.wiring.teacher == teacher
    assert store.manifest.capture["teacher"] == "as found"
    by_tokens = {tuple(sample.ids.tolist()): sample for sample in samples}
    for i in range(4):
        sample = by_tokens[tuple(store.tokens(i).tolist())]
        assert torch.equal(store[i].final, sample.states[teacher])
        assert torch.equal(store[i].sites["layer_5"], sample.states["layer_5"])
        assert torch.equal(store[i].loss_mask, sample.mask.bool())


def test_the_embedding_may_be_wanted_for_it_is_looked_up(
    write_v1: Callable[..., Path], convert: Callable[..., int], tmp_path: Path
) -> None:
    assert convert(write_v1(*ORIGIN), "--aux", "embedding,layer_2,layer_4", "--dtype", "float32") == 0
    store = Store.open(tmp_path / "store")
    assert store.manifest.wiring.names == ["embedding", "layer_2", "layer_4"]
    assert sorted(store[0].sites) == ["layer_2", "layer_4"]
    assert store[0].final.dtype == torch.float32


def test_missing_layers_are_refused_with_what_can_be_done(
    write_v1: Callable[..., Path], convert: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert(write_v1(*ORIGIN), "--aux", "layer_2,layer_3,layer_5") == 1
    line = capsys.readouterr().err
    assert "no layer_3, layer_5; it holds embedding, layer_2, layer_4, layer_6" in line
    assert "extract anew" in line
    assert "--aux layer_2,layer_4,layer_6" in line
    assert "ids [1, 3, 5] on sglang-0.5.9" in line
    assert line.count("\n") == 1
    assert not (tmp_path / "store").exists()


def test_states_that_the_target_does_not_give_are_refused(
    write_v1: Callable[..., Path], convert: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_v1("layer_2", "layer_4", "layer_6")
    rewrite(folder / "data_1.pt", input_ids=torch.arange(5, 14))  # other tokens of the same number
    options = ("--samples", "2")  # the first and the last are sound
    assert convert(folder, *options) == 1
    line = capsys.readouterr().err
    assert "a sample's states are not this target's" in line
    assert "data_1.pt" in line
    assert "--skip-bad" in line
    assert convert(folder, *options, "--skip-bad") == 0
    assert "Left out, 1 in all" in capsys.readouterr().out
    assert Store.open(tmp_path / "store").record_ids == ["data_0", "data_2", "data_3"]


def test_a_whole_set_is_verified_record_by_record_on_demand(
    write_v1: Callable[..., Path], convert: Callable[..., int], tmp_path: Path, samples: Any
) -> None:
    folder = write_v1(*WHOLE)
    states = samples[1].pick("layer_2", "layer_4", "layer_5")
    rewrite(folder / "data_1.pt", hidden_states=[*states, samples[1].states["final"] / 2])
    assert convert(folder, "--samples", "2", "--verify-all") == 1
    assert convert(folder, "--samples", "4", "--skip-bad") == 1  # dissent seen, and nobody looks at the rest
    assert Store.open(tmp_path / "store", unfinished=True).record_ids == ["data_0"]  # before the bad one
    assert convert(folder, "--samples", "4", "--skip-bad", "--verify-all") == 0
    assert Store.open(tmp_path / "store").record_ids == ["data_0", "data_2", "data_3"]


def test_an_embedding_slot_checks_every_record(
    write_v1: Callable[..., Path], convert: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_v1("embedding", "layer_2", "layer_4", "final")
    rewrite(folder / "data_1.pt", input_ids=torch.arange(5, 14))
    assert convert(folder, "--samples", "2") == 1  # found without running the target on it
    assert "its hidden_states[0] against the target's embedding" in capsys.readouterr().err


def test_bad_files_are_one_line_each_and_can_be_left_out(
    write_v1: Callable[..., Path], convert: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_v1(*ORIGIN)
    whole = (folder / "data_0.pt").read_bytes()
    (folder / "data_0.pt").write_bytes(whole[: len(whole) // 2])
    rewrite(folder / "data_2.pt", loss_mask=torch.ones(3))
    assert convert(folder) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert "data_0.pt" in captured.err
    assert convert(folder, "--skip-bad") == 0
    said = capsys.readouterr().out
    assert "Left out, 2 in all" in said
    report = json.loads((tmp_path / "store" / "legacy.json").read_text())
    assert [line.split("/")[-1].split("]")[0] for line in report["left_out"]] == ["data_0.pt", "data_2.pt"]
    assert Store.open(tmp_path / "store").record_ids == ["data_1", "data_3"]


def test_a_stopped_conversion_goes_on_where_it_stopped(
    write_v1: Callable[..., Path], convert: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_v1(*ORIGIN)
    sound = (folder / "data_2.pt").read_bytes()
    (folder / "data_2.pt").write_bytes(b"cut")
    options = ("--samples", "2", "--batch-tokens", "1", "--shard-tokens", "1")
    assert convert(folder, *options) == 2
    assert Store.open(tmp_path / "store", unfinished=True).record_ids == ["data_0", "data_1"]
    before = {path: path.read_bytes() for path in (tmp_path / "store").glob("shard-*")}
    (folder / "data_2.pt").write_bytes(sound)
    capsys.readouterr()
    assert convert(folder, *options) == 0
    assert "2 records, 57 tokens written" in capsys.readouterr().out
    assert all(path.read_bytes() == content for path, content in before.items())
    assert len(Store.open(tmp_path / "store")) == 4
    assert convert(folder, *options) == 0
    assert "0 records, 0 tokens written" in capsys.readouterr().out
    assert convert(folder, "--aux", "layer_2") == 1  # a store of another wiring is not gone on with


def test_hs_files_without_their_masks_are_refused(
    write_hs: Callable[..., Path], convert: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_hs(*WHOLE)
    moved = folder.rename(tmp_path / "apart")
    assert convert(moved) == 2
    assert "--rows" in capsys.readouterr().err
    assert convert(moved, "--rows", str(tmp_path / "rows")) == 0


def test_what_training_reads_beside_the_store(
    write_v1: Callable[..., Path], convert: Callable[..., int], tmp_path: Path, samples: Any
) -> None:
    out = tmp_path / "prepared"
    assert convert(write_v1(*ORIGIN), "--prepared", str(out), "--val-fraction", "0.25") == 0
    rows = [row for split in ("train", "val") for row in load_prepared(out, split)]
    assert len(load_prepared(out, "val")) >= 1
    assert {row["record_id"]: row["input_ids"] for row in rows} == {
        f"data_{i}": sample.ids.tolist() for i, sample in enumerate(samples)
    }
    manifest = json.loads((out / "manifest.json").read_text())
    Store.open(tmp_path / "store", tokenizer_hash=manifest["tokenizer_hash"], template_hash=manifest["template_hash"])


def test_records_that_teach_nothing_new_are_left_out_of_training(
    write_v1: Callable[..., Path], convert: Callable[..., int], tmp_path: Path
) -> None:
    folder = write_v1(*WHOLE)
    rewrite(folder / "data_0.pt", loss_mask=torch.zeros(24))
    (folder / "data_4.pt").write_bytes((folder / "data_3.pt").read_bytes())
    assert convert(folder, "--prepared", str(tmp_path / "prepared"), "--val-fraction", "0") == 0
    assert load_prepared(tmp_path / "prepared", "train")["record_id"][:] == ["data_1", "data_2", "data_3"]
    skipped = json.loads((tmp_path / "prepared" / "manifest.json").read_text())["skipped"]
    assert [one["record"] for one in skipped] == ["data_0", "data_4"]
    assert skipped[1]["why"] == "same tokens as data_3"
    assert len(Store.open(tmp_path / "store")) == 5


def test_diagnose_from_the_command_line(
    write_v1: Callable[..., Path], tiny_llama_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(write_v1("embedding", "layer_2", "final_normed"))
    target = ["--target", str(tiny_llama_path), "--tables-only"]
    assert main(["diagnose", folder, *target, "--json", str(tmp_path / "d.json")]) == 0
    assert "hidden_states[0]: embedding" in capsys.readouterr().out
    assert json.loads((tmp_path / "d.json").read_text())["held"] == {"embedding": 0, "final_normed": 2}
    assert main(["diagnose", folder]) == 2
    assert "give --target" in capsys.readouterr().err


def test_a_slot_that_the_target_does_not_have_is_a_refusal(
    write_v1: Callable[..., Path], tiny_llama_path: Path, samples: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_v1(*ORIGIN)
    for i, sample in enumerate(samples):
        scaled = [*sample.pick(*ORIGIN[:3]), sample.states["layer_6"] / 4]
        rewrite(folder / f"data_{i}.pt", hidden_states=scaled)
    assert main(["diagnose", str(folder), "--target", str(tiny_llama_path)]) == 1
    assert "it is layer_6 times 1/4: a partial sum of 4 ranks" in capsys.readouterr().out


def test_as_a_user_types_it(tiny_llama_path: Path, tmp_path: Path) -> None:
    command = ["diagnose", str(tmp_path / "nowhere"), "--target", str(tiny_llama_path), "--tables-only"]
    done = subprocess.run([sys.executable, "-m", "data_prep.legacy", *command], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: no sample files")
    assert done.stderr.count("\n") == 1
