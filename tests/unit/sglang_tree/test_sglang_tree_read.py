"""Reading a tree: found wherever it is named, judged by its code, doubtful code named and never guessed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from mini_sglang import ALWAYS, FIRST, entering, mini_tree, model_file, states

from eagle3.errors import RedraftError
from eagle3.sglang_tree import TreeVerdict, convention_of_tree, read_tree


def rewrite(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1, (old, text.count(old))
    path.write_text(text.replace(old, new))


def verdict(root: Path, model_type: str = "deepseek_v3") -> TreeVerdict:
    return convention_of_tree(root, model_type)


# --- finding it -----------------------------------------------------------------------------------------------------


def test_a_tree_is_found_from_each_of_its_usual_names(tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    root = mini_tree(repo / "python", version="0.5.10")
    for given in (root, root.parent, repo):
        found = read_tree(given)
        assert (found.root, found.version) == (root, "0.5.10")
    prefix = tmp_path / "venv"
    inside = mini_tree(prefix / "lib" / "python3.11" / "site-packages")
    assert read_tree(prefix).root == inside


def test_a_tree_is_found_from_an_interpreter(tmp_path: Path) -> None:
    root = mini_tree(tmp_path / "site")
    (root / "__init__.py").write_text("raise RuntimeError('the package must not be imported')\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={root.parent} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    assert read_tree(python).root == root
    if not os.access(__file__, os.X_OK):
        with pytest.raises(RedraftError, match="not an SGLang tree"):
            read_tree(Path(__file__))


@pytest.mark.parametrize("what", ["absent", "empty"])
def test_what_is_no_tree_is_refused_in_one_line(tmp_path: Path, what: str) -> None:
    with pytest.raises(RedraftError) as caught:
        read_tree(tmp_path / "absent" if what == "absent" else tmp_path)
    assert "To mend" in str(caught.value) and "\n" not in str(caught.value)


def test_the_version_comes_from_the_metadata_when_no_file_states_it(tmp_path: Path) -> None:
    root = mini_tree(tmp_path)
    (root / "version.py").write_text("from importlib.metadata import version\n__version__ = version('sglang')\n")
    assert read_tree(root).version == ""
    (tmp_path / "sglang-0.5.14.dist-info").mkdir()
    assert read_tree(root).version == "0.5.14"


# --- conventions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "loop", "version", "name"),
    [
        (ALWAYS, "adds", "0.5.9", "sglang-0.5.9"),
        (ALWAYS, "adds", "0.5.6.post2", "sglang-0.5.9"),
        (FIRST, "adds", "0.5.13", "sglang-0.5.13"),
        (FIRST, "boundary", "0.5.14", "sglang-0.5.14"),
        (FIRST, "packer", "0.5.23", "sglang-0.5.23"),
        (FIRST, "packer", "", "sglang-0.5.23"),
    ],
)
def test_the_shape_gives_the_convention(tmp_path: Path, rule: str, loop: str, version: str, name: str) -> None:
    root = mini_tree(tmp_path, rule=rule, loop=loop, version=version)
    for model_type in ("deepseek_v3", "kimi_k2", "kimi_k25"):
        found = verdict(root, model_type)
        assert (found.convention, found.patch) == (name, "none"), found.reasons
        assert not any("disagree" in one for one in found.reasons)


def test_the_code_wins_over_the_version_and_the_disagreement_is_said(tmp_path: Path) -> None:
    found = verdict(mini_tree(tmp_path, rule=FIRST, loop="packer", version="0.5.9"))
    assert found.convention in ("sglang-0.5.14", "sglang-0.5.23")
    assert any("version 0.5.9 and the code disagree" in one for one in found.reasons)


@pytest.mark.parametrize(
    "spelling",
    [
        "self.model.layers_to_capture = list(k + 1 for k in ids)",
        "out = []\n            for k in ids:\n                out.append(k + 1)\n"
        "            self.model.layers_to_capture = out",
        "shift = 1\n            self.model.layers_to_capture = sorted([shift + k for k in ids])",
    ],
)
def test_one_rule_in_other_words_is_the_same_rule(tmp_path: Path, spelling: str) -> None:
    assert verdict(mini_tree(tmp_path, rule=spelling)).convention == "sglang-0.5.9"


@pytest.mark.parametrize(
    "rule",
    [
        "self.model.layers_to_capture = [k + 2 for k in ids]",
        "self.model.layers_to_capture = [k for k in ids]",
        "self.model.layers_to_capture = [k + 1 for k in ids] if ids[0] == 2 else list(ids)",
    ],
)
def test_another_rule_has_no_convention(tmp_path: Path, rule: str) -> None:
    found = verdict(mini_tree(tmp_path, rule=rule))
    assert found.convention is None and found.patch == "none"
    assert any("no convention in the table" in one for one in found.reasons)


def test_another_default_has_no_convention(tmp_path: Path) -> None:
    root = mini_tree(tmp_path)
    rewrite(model_file(root), "[2, count // 2, count - 3]", "[1, count // 2, count - 4]")
    found = verdict(root)
    assert found.convention is None
    assert any("without ids it captures [1, 30, 57]" in one for one in found.reasons)


def test_code_that_cannot_be_followed_is_unknown(tmp_path: Path) -> None:
    root = mini_tree(tmp_path, rule="self.model.layers_to_capture = shifted(ids)")
    found = verdict(root)
    assert (found.convention, found.patch) == (None, "unknown")
    assert "shifted(ids)" in found.reasons[0]


def test_a_model_without_a_setter_or_a_known_loop_is_unknown(tmp_path: Path) -> None:
    root = mini_tree(tmp_path / "a")
    rewrite(model_file(root), "def set_eagle3_layers_to_capture", "def set_other")
    assert "no set_eagle3_layers_to_capture" in verdict(root).reasons[0]
    root = mini_tree(tmp_path / "b")
    rewrite(model_file(root), "if k in self.layers_to_capture:", "if k in self.chosen:")
    found = verdict(root)
    assert found.patch == "unknown" and "no layer loop" in found.reasons[0]


def test_the_embedding_kept_by_reference_is_noticed(tmp_path: Path) -> None:
    root = mini_tree(tmp_path, loop="guarded")
    assert verdict(root).aliased_embedding
    assert states(model_file(root), [-1, 2])[0] != entering(0)[0]  # the fault is real: later layers wrote into it


def test_a_wrapper_without_the_setter_stops_the_server(tmp_path: Path) -> None:
    root = mini_tree(tmp_path, wrapper_setter=False)
    found = verdict(root, "kimi_k25")
    assert "has no set_eagle3_layers_to_capture" in found.stops
    assert found.file == "srt/models/kimi_k25.py"
    assert verdict(root, "kimi_k2").stops == ""


def test_late_graphs_are_noticed(tmp_path: Path) -> None:
    late = verdict(mini_tree(tmp_path / "a", graphs="late"))
    assert late.late_graphs and any("--disable-cuda-graph" in one for one in late.reasons)
    for name, graphs in (("b", "early"), ("c", "")):
        assert not verdict(mini_tree(tmp_path / name, graphs=graphs)).late_graphs


def test_another_models_class_is_found_by_its_architecture(tmp_path: Path) -> None:
    root = mini_tree(tmp_path, rule=FIRST, loop="packer", version="0.5.23")
    assert convention_of_tree(root, "llama").convention == "sglang-0.5.23"
    assert convention_of_tree(root, "kimi_k2", "KimiK25ForConditionalGeneration").convention == "sglang-0.5.23"
    for model_type, architecture in (("mystery", ""), ("llama", "NoSuchForCausalLM")):
        with pytest.raises(RedraftError) as caught:
            convention_of_tree(root, model_type, architecture)
        assert "\n" not in str(caught.value)


def test_a_broken_file_is_one_line(tmp_path: Path) -> None:
    root = mini_tree(tmp_path)
    model_file(root).write_text("class DeepseekV3ForCausalLM(:\n")
    with pytest.raises(RedraftError, match="not readable Python"):
        verdict(root)


# --- patches by hand ------------------------------------------------------------------------------------------------

DEFAULT = (
    "        self.layers_to_capture = []\n        self.first_k",
    "        self.layers_to_capture = []\n        self.emb = False\n        self.first_k",
)
HAND_SETTER = (
    ALWAYS,
    "self.model.emb = -1 in ids\n            self.model.layers_to_capture = [k + 1 for k in ids if k >= 0]",
)
HAND_FORWARD = (
    "        aux = []\n",
    "        aux = []\n        if self.emb:\n            aux.append(hidden.clone())\n",
)
BY_HAND = {"default": DEFAULT, "setter": HAND_SETTER, "forward": HAND_FORWARD}


def by_hand(root: Path, parts: dict[str, tuple[str, str]]) -> TreeVerdict:
    for old, new in parts.values():
        rewrite(model_file(root), old, new)
    return verdict(root)


def test_a_whole_patch_by_another_hand_is_whole(tmp_path: Path) -> None:
    root = mini_tree(tmp_path)
    found = by_hand(root, BY_HAND)
    assert (found.convention, found.patch) == ("sglang-0.5.9-patched", "whole"), found.reasons
    assert states(model_file(root), [-1, 2, 4]) == entering(0, 3, 5)


@pytest.mark.parametrize("without", list(BY_HAND))
def test_a_missing_part_is_named(tmp_path: Path, without: str) -> None:
    found = by_hand(mini_tree(tmp_path), {name: part for name, part in BY_HAND.items() if name != without})
    assert (found.convention, found.patch) == (None, "half")
    wrong = [one for one in found.reasons if "MISSING OR WRONG" in one]
    assert len(wrong) == 1 and wrong[0].startswith(f"{without}:"), found.reasons


@pytest.mark.parametrize("only", list(BY_HAND))
def test_one_part_alone_is_half(tmp_path: Path, only: str) -> None:
    loose = {"setter": "self.model.emb = -1 in ids\n            " + ALWAYS}
    parts = {only: BY_HAND[only]}
    if only == "default":  # a default alone is only recognised by its name
        parts = {only: (DEFAULT[0], DEFAULT[1].replace("self.emb", "self.capture_embedding"))}
    found = by_hand(mini_tree(tmp_path / "a"), parts)
    assert found.patch == "half", found.reasons
    if only in loose:
        found = by_hand(mini_tree(tmp_path / "b"), {only: (ALWAYS, loose[only])})
        assert found.patch == "half"


@pytest.mark.parametrize(
    ("part", "bad", "why"),
    [
        ("forward", HAND_FORWARD[1].replace(".clone()", ""), "keeps no copy"),
        ("forward", HAND_FORWARD[1].replace("hidden.clone()", "ids.clone()"), "is not the embedding"),
        ("forward", HAND_FORWARD[1].replace("if self.emb", "if not self.emb"), "its condition is"),
        (
            "forward",
            "        if self.emb:\n            aux.append(hidden.clone())\n" + HAND_FORWARD[0],
            "before the collector",
        ),
        ("setter", "self.model.emb = -1 in ids\n            " + ALWAYS, "-1 sets a flag, but ids"),
        ("default", DEFAULT[1].replace("False", "True"), "starts as True"),
    ],
)
def test_a_part_that_is_there_but_wrong_is_half(tmp_path: Path, part: str, bad: str, why: str) -> None:
    parts = {**BY_HAND, part: (BY_HAND[part][0], bad)}
    found = by_hand(mini_tree(tmp_path), parts)
    assert found.patch == "half"
    assert any(one.startswith(f"{part}: MISSING OR WRONG") and why in one for one in found.reasons), found.reasons


def test_a_capture_after_the_layers_is_wrong(tmp_path: Path) -> None:
    root = mini_tree(tmp_path)
    parts = {name: part for name, part in BY_HAND.items() if name != "forward"}
    parts["forward"] = (
        "        last = hidden + residual\n",
        "        last = hidden + residual\n        if self.emb:\n            aux.append(hidden.clone())\n",
    )
    found = by_hand(root, parts)
    assert any("after layers have run" in one for one in found.reasons), found.reasons


def test_a_packer_without_room_is_half(tmp_path: Path) -> None:
    root = mini_tree(tmp_path, rule=FIRST, loop="packer", version="0.5.23")
    first = "if -1 in ids:\n                self.model.emb = True\n                "
    first += "self.model.layers_to_capture = [k + 1 for k in ids if k >= 0]\n            elif ids and ids[0] == 1:"
    rewrite(model_file(root), "if ids and ids[0] == 1:", first)
    rewrite(model_file(root), *DEFAULT)
    rewrite(
        model_file(root),
        "k in self.layers_to_capture else",
        "(k in self.layers_to_capture or (self.emb and k == 0)) else",
    )
    found = verdict(root)
    assert found.patch == "half" and any("without room" in one for one in found.reasons), found.reasons
    rewrite(
        model_file(root), "Collector(len(self.layers_to_capture))", "Collector(len(self.layers_to_capture) + self.emb)"
    )
    found = verdict(root)
    assert (found.patch, found.convention) == ("whole", "sglang-0.5.23-patched"), found.reasons
    assert states(model_file(root), [-1, 2, 4]) == entering(0, 3, 5)


def test_a_flag_that_captures_every_layer_is_wrong(tmp_path: Path) -> None:
    root = mini_tree(tmp_path, loop="boundary", rule=FIRST, version="0.5.14")
    rewrite(model_file(root), *DEFAULT)
    rewrite(model_file(root), "if k in self.layers_to_capture\n", "if k in self.layers_to_capture or self.emb\n")
    assert any("layers [0, 1, 2, 3, 4, 5] are captured" in one for one in verdict(root).reasons)


def test_a_whole_patch_with_late_graphs_is_half(tmp_path: Path) -> None:
    found = by_hand(mini_tree(tmp_path, graphs="late"), BY_HAND)
    assert found.patch == "half"
    assert next(one for one in found.reasons if "MISSING" in one).startswith("graphs:")


def test_a_whole_patch_under_a_wrapper_without_the_setter_is_half(tmp_path: Path) -> None:
    root = mini_tree(tmp_path, wrapper_setter=False)
    assert by_hand(root, BY_HAND).patch == "whole"
    found = verdict(root, "kimi_k25")
    assert found.patch == "half" and any(one.startswith("wrapper: MISSING") for one in found.reasons)
