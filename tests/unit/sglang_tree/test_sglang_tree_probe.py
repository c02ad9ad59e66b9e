"""The static probe: which ids to write for a wiring, or why none do and what to do about it."""

from __future__ import annotations

from pathlib import Path

import pytest
from mini_sglang import ALWAYS, FIRST, mini_tree

from eagle3.sglang_tree import patch, read_tree
from eagle3.wiring import Site, Wiring
from eval.probe.static import probe_static
from eval.probe.verdict import Verdict


def wiring(*layers: int, model_type: str = "kimi_k25") -> Wiring:
    return Wiring(tuple(Site(k) for k in layers), "final", model_type, 61, 7168)


def probe(root: Path, *layers: int, **more: bool) -> Verdict:
    return probe_static(root, "kimi_k25", "", wiring(*layers) if layers else None, **more)


@pytest.mark.parametrize(
    ("rule", "loop", "version", "layers", "ids"),
    [
        (ALWAYS, "adds", "0.5.10", (3, 31, 59), [2, 30, 58]),
        (FIRST, "packer", "0.5.23", (3, 31, 59), [3, 31, 59]),
        (FIRST, "packer", "0.5.23", (0, 3, 31), [0, 3, 31]),
        (FIRST, "packer", "0.5.23", (1, 20, 40), [20, 40, 1]),
    ],
)
def test_the_ids_to_write(
    tmp_path: Path, rule: str, loop: str, version: str, layers: tuple[int, ...], ids: list[int]
) -> None:
    found = probe(mini_tree(tmp_path, rule=rule, loop=loop, version=version), *layers)
    assert found.ok and found.exit_code == 0
    assert found.facts["ids"] == ids and str(ids) in found.what
    assert found.facts["default_ok"] is False


def test_without_a_wiring_it_says_the_convention(tmp_path: Path) -> None:
    root = mini_tree(tmp_path)
    found = probe(root)
    assert found.ok and "sglang-0.5.9" in found.what and "ids" not in found.facts
    patch.apply(read_tree(root))
    assert "sglang-0.5.9-patched" in probe(root).what


def test_the_default_wiring_needs_no_ids(tmp_path: Path) -> None:
    found = probe(mini_tree(tmp_path, graphs="late"), 2, 30, 58)
    assert found.ok and found.facts["default_ok"] and "no ids at all" in found.reasons[0]


def test_an_embedding_on_an_old_build_is_mended_by_the_patch(tmp_path: Path) -> None:
    root = mini_tree(tmp_path, graphs="late", wrapper_setter=False)
    assert "stops at start-up" in probe(root, 0, 3, 31).what
    found = probe_static(root, "kimi_k2", "", wiring(0, 3, 31, model_type="kimi_k2"))
    assert found.exit_code == 1 and "sglang_patch.py apply" in found.mend
    patch.apply(read_tree(root))
    for model_type in ("kimi_k25", "kimi_k2"):
        found = probe_static(root, model_type, "", wiring(0, 3, 31, model_type=model_type))
        assert found.ok and found.facts["ids"] == [-1, 2, 30]


def test_late_graphs_spoil_ids_that_are_not_the_default(tmp_path: Path) -> None:
    root = mini_tree(tmp_path, graphs="late")
    found = probe(root, 3, 31, 59)
    assert found.exit_code == 1 and "--disable-cuda-graph" in found.mend and found.facts["ids"] == [2, 30, 58]
    assert probe(root, 3, 31, 59, cuda_graphs=False).ok
    patch.apply(read_tree(root))
    assert probe(root, 3, 31, 59).ok


def test_an_embedding_kept_by_reference_is_refused(tmp_path: Path) -> None:
    root = mini_tree(tmp_path, loop="guarded")
    model = root / "srt" / "models" / "deepseek_v2.py"
    (model.parent / "qwen3.py").write_text(model.read_text().replace("DeepseekV3ForCausalLM", "Qwen3ForCausalLM"))
    found = probe_static(root, "qwen3", "", wiring(0, 3, 31, model_type="qwen3"))
    assert found.exit_code == 1 and "cannot feed the embedding" in found.reasons[0]
    assert any("by reference" in why for why in found.reasons)
    assert probe_static(root, "qwen3", "", wiring(3, 31, model_type="qwen3")).ok


def test_half_a_patch_and_unknown_code_are_told_apart(tmp_path: Path) -> None:
    root = mini_tree(tmp_path / "a")
    model = root / "srt" / "models" / "deepseek_v2.py"
    model.write_text(
        model.read_text().replace(
            "        self.first_k", "        self.capture_embedding = False\n        self.first_k"
        )
    )
    found = probe(root, 3, 31, 59)
    assert found.exit_code == 1 and "by half" in found.what
    found = probe(mini_tree(tmp_path / "b", rule="self.model.layers_to_capture = shifted(ids)"), 3, 31, 59)
    assert found.exit_code == 2 and "live" in found.mend


def test_what_no_ids_express_is_refused_with_the_conventions_own_words(tmp_path: Path) -> None:
    found = probe(mini_tree(tmp_path, rule=FIRST, loop="packer", version="0.5.23"), 31, 3, 59)
    assert found.exit_code == 1 and "out of layer order" in found.reasons[0] and "order the sites" in found.mend
