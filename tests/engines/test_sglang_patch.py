"""The patch on the real sources of SGLang, where `tests/engines/fetch_sglang_trees.sh` has put them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from real_forward import captured, entering

from eagle3.conventions import Shape, convention
from eagle3.errors import RedraftError
from eagle3.sglang_tree import convention_of_tree, patch, read_tree
from eagle3.sglang_tree.classes import ARCHITECTURES
from scripts.sglang_patch import main

ROOT = Path(__file__).resolve().parents[2]
TREES = Path(os.environ.get("SGLANG_TREES") or ROOT / ".cache" / "sglang_trees")
CONVENTIONS = {
    "0.5.6.post2": "sglang-0.5.9",
    "0.5.9": "sglang-0.5.9",
    "0.5.10": "sglang-0.5.9",
    "0.5.12": "sglang-0.5.9",
    "0.5.13": "sglang-0.5.13",
    "0.5.14": "sglang-0.5.14",
    "0.5.23": "sglang-0.5.23",
}
LATE = ("0.5.6.post2", "0.5.9", "0.5.10")
KEPT = ("srt/models", "srt/model_executor/model_runner.py", "srt/model_executor/cuda_graph_runner.py",
        "srt/layers/aux_hidden_states.py", "version.py", "_version.py")  # fmt: skip


@pytest.fixture(params=list(CONVENTIONS))
def version(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    if not (TREES / found / "sglang" / "srt" / "models").is_dir():
        pytest.skip(f"no sources of SGLang {found}: run tests/engines/fetch_sglang_trees.sh")
    return found


@pytest.fixture
def tree(version: str, tmp_path: Path) -> Path:
    """A copy of the real sources that the patch reads."""
    root = tmp_path / "sglang"
    for name in KEPT:
        source = TREES / version / "sglang" / name
        if source.is_dir():
            shutil.copytree(source, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, root / name)
    return root


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def kimi_is_served(version: str) -> bool:
    return version != "0.5.6.post2"


def test_each_release_is_read_as_its_convention(version: str, tree: Path) -> None:
    found = convention_of_tree(tree, "deepseek_v3")
    assert (found.version, found.convention, found.patch) == (version, CONVENTIONS[version], "none")
    assert found.late_graphs == (version in LATE)
    if kimi_is_served(version):
        kimi = convention_of_tree(tree, "kimi_k25", "KimiK25ForConditionalGeneration")
        assert kimi.convention == CONVENTIONS[version]
        assert bool(kimi.stops) == (version == "0.5.9")


def test_the_table_agrees_with_every_model_file(version: str, tree: Path) -> None:
    """Where a release's convention knows a model type, its code has the shape that the convention says."""
    follows = convention(CONVENTIONS[version])
    for model_type in sorted(set(ARCHITECTURES) & set(follows.families)):
        try:
            found = convention_of_tree(tree, model_type)
        except RedraftError as err:
            assert "no such model" in str(err)
            continue
        if found.patch == "unknown":
            assert "no set_eagle3_layers_to_capture" in found.reasons[0]
        elif model_type == "minimax_m2" and version in ("0.5.12", "0.5.13", "0.5.14"):
            assert found.convention == "sglang-0.5.23"  # its layers captured at their boundary before Llama's did
        else:
            assert found.convention == follows.name, (model_type, found.reasons)


def test_apply_verify_again_revert(version: str, tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(tree)
    assert main(["verify", str(tree)]) == 1
    assert main(["apply", str(tree)]) == 0
    assert main(["verify", str(tree)]) == 0
    for model_type in ("deepseek_v3", "kimi_k25") if kimi_is_served(version) else ("deepseek_v3",):
        found = convention_of_tree(tree, model_type)
        assert (found.convention, found.patch) == (f"{CONVENTIONS[version]}-patched", "whole")
        assert not found.late_graphs and not found.stops
    once = contents(tree)
    assert once != before
    capsys.readouterr()
    assert main(["apply", str(tree)]) == 0
    assert "nothing to do" in capsys.readouterr().out and contents(tree) == once
    assert main(["status", str(tree)]) == 0
    assert "unchanged since" in capsys.readouterr().out
    assert main(["revert", str(tree)]) == 0
    assert contents(tree) == before


def test_the_real_setter_and_forward_capture_what_the_convention_says(version: str, tree: Path) -> None:
    x = torch.arange(12.0).reshape(3, 4)  # whole numbers: the states are exact
    shape = Shape("deepseek_v3", 8, 4)
    native: list[list[int] | None] = [[2, 3, 5], [1, 3, 5], [3, 1, 5], [4], None]
    before = [captured(tree, ids, x, 8) for ids in native]
    patch.apply(read_tree(tree))
    follows = convention(f"{CONVENTIONS[version]}-patched")
    with_embedding: list[list[int] | None] = [[-1, 2, 4], [-1, 0, 5], [2, -1, 4], [-1, 1, 3], [-1]]
    for ids in [*native, *with_embedding]:
        want = [entering(x, site.layer) for site in follows.parse_like(ids, shape).aux]
        found = captured(tree, ids, x, 8)
        assert len(found) == len(want) and all(map(torch.equal, found, want)), ids
    for ids, old in zip(native, before, strict=True):
        assert all(map(torch.equal, captured(tree, ids, x, 8), old)), ids


def test_each_part_dropped_is_named(version: str, tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    patch.apply(read_tree(tree))
    for part, name, old, new in damages(version):
        path = tree / name
        whole = path.read_bytes()
        text = whole.decode()
        assert text.count(old) >= 1, (part, old)
        path.write_text(text.replace(old, new, 1))
        capsys.readouterr()
        assert main(["verify", str(tree)]) == 1, part
        out = capsys.readouterr().out
        assert f" {part}: NO" in out and "HALF" in out, (part, out)
        others = {"default", "setter", "forward", "wrapper", "graphs"} - {part}
        assert not any(f" {one}: NO" in out for one in others), (part, out)
        path.write_bytes(whole)
    assert main(["verify", str(tree)]) == 0


def damages(version: str) -> list[tuple[str, str, str, str]]:
    """(part, file, text, what takes its place), one for each way to lose a part of this release's patch."""
    deepseek, flag = "srt/models/deepseek_v2.py", "self.capture_embedding_for_eagle3"
    out = [
        ("default", deepseek, f"        {flag} = False\n", ""),
        ("setter", deepseek, "if self.model.capture_embedding_for_eagle3:", "if False:"),
        ("setter", deepseek, "for val in layer_ids if val >= 0]", "for val in layer_ids]"),
    ]
    if version in ("0.5.14", "0.5.23"):
        out.append(("forward", deepseek, f" or (i == 0 and {flag})", ""))
    else:
        out.append(("forward", deepseek, f"if {flag} and self.pp_group.is_first_rank:", "if False:"))
        out.append(("forward", deepseek, ".append(hidden_states.clone())", ".append(hidden_states)"))
    if version == "0.5.23":
        out.append(("forward", deepseek, f" + int({flag})", ""))
    if kimi_is_served(version):
        kimi = "srt/models/kimi_k25.py"
        out.append(("wrapper", kimi, "def set_eagle3_layers_to_capture", "def set_other_layers"))
    if version in LATE:
        runner = "srt/model_executor/cuda_graph_runner.py"
        out.append(("graphs", runner, "pass  # Redraft", "self.model_runner.model.set_eagle3_layers_to_capture()  #"))
    return out
