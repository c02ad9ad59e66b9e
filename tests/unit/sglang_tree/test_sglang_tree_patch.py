"""The patch tool: whole after apply, byte for byte after revert, nothing touched where it does not know the code."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mini_sglang import ALWAYS, FIRST, entering, load, mini_tree, model_file, states

from eagle3.conventions import Shape, convention
from eagle3.errors import RedraftError, WiringError
from eagle3.sglang_tree import convention_of_tree, patch, read_tree
from scripts.sglang_patch import main

SHAPES = [
    (ALWAYS, "adds", "0.5.9", "sglang-0.5.9"),
    (FIRST, "adds", "0.5.13", "sglang-0.5.13"),
    (FIRST, "boundary", "0.5.14", "sglang-0.5.14"),
    (FIRST, "packer", "0.5.23", "sglang-0.5.23"),
]


def contents(root: Path) -> dict[str, bytes]:
    files = [path for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


def run(command: str, root: Path, *more: str) -> int:
    return main([command, str(root), *more])


@pytest.mark.parametrize(("rule", "loop", "version", "name"), SHAPES)
@pytest.mark.parametrize("graphs", ["late", "early", ""])
def test_apply_then_revert(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rule: str, loop: str, version: str, name: str, graphs: str
) -> None:
    root = mini_tree(tmp_path, rule=rule, loop=loop, version=version, graphs=graphs, wrapper_setter=False)
    before = contents(root)
    assert run("verify", root) == 1
    assert run("apply", root) == 0
    assert run("verify", root) == 0
    for model_type in ("deepseek_v3", "kimi_k25"):
        found = convention_of_tree(root, model_type)
        assert (found.convention, found.patch, found.stops) == (f"{name}-patched", "whole", "")
        assert not found.late_graphs
    once = contents(root)
    capsys.readouterr()
    assert run("apply", root) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert contents(root) == once
    assert run("status", root) == 0
    assert "applied by this tool" in capsys.readouterr().out
    assert run("revert", root) == 0
    assert contents(root) == before


@pytest.mark.parametrize(("rule", "loop", "version", "name"), SHAPES)
def test_the_patched_model_feeds_what_its_convention_says(
    tmp_path: Path, rule: str, loop: str, version: str, name: str
) -> None:
    """The miniature is run: each list of ids captures the very states that the patched convention names."""
    root = mini_tree(tmp_path, rule=rule, loop=loop, version=version)
    patch.apply(read_tree(root))
    follows = convention(f"{name}-patched")
    shape = Shape("kimi_k25", 8, 1)
    for ids in ([-1, 2, 4], [-1, 0, 5], [2, -1, 4], [-1, 1, 3], [-1], [2, 3, 5], [1, 3, 5], [3, 1, 5], None):
        want = [site.layer for site in follows.parse_like(ids, shape).aux]
        assert states(model_file(root), ids) == entering(*want), ids


@pytest.mark.parametrize(("rule", "loop", "version", "name"), SHAPES)
def test_a_native_draft_is_fed_the_same_before_and_after(
    tmp_path: Path, rule: str, loop: str, version: str, name: str
) -> None:
    root = mini_tree(tmp_path, rule=rule, loop=loop, version=version)
    samples: list[list[int] | None] = [[2, 3, 5], [1, 3, 5], [3, 1, 5], [4], None]
    before = [states(model_file(root), ids) for ids in samples]
    patch.apply(read_tree(root))
    assert [states(model_file(root), ids) for ids in samples] == before


@pytest.mark.parametrize("loop", ["adds", "packer"])
def test_the_flag_is_cleared_by_ids_without_the_embedding(tmp_path: Path, loop: str) -> None:
    root = mini_tree(tmp_path, rule=FIRST, loop=loop)
    patch.apply(read_tree(root))
    model = load(model_file(root)).DeepseekV3ForCausalLM(SimpleNamespace(num_hidden_layers=8))
    assert model.model.capture_embedding_for_eagle3 is False
    for ids, on in (([-1, 2], True), ([2, 3], False), ([-1, 2], True), (None, False)):
        model.set_eagle3_layers_to_capture(ids)
        assert model.model.capture_embedding_for_eagle3 is on


def test_more_than_one_pipeline_stage_is_refused_by_the_server(tmp_path: Path) -> None:
    root = mini_tree(tmp_path)
    patch.apply(read_tree(root))
    model = load(model_file(root)).DeepseekV3ForCausalLM(SimpleNamespace(num_hidden_layers=8))
    model.pp_group.is_first_rank = False
    model.set_eagle3_layers_to_capture([2, 4])
    with pytest.raises(ValueError, match="one pipeline stage"):
        model.set_eagle3_layers_to_capture([-1, 2])
    model.pp_group.is_last_rank = False
    model.set_eagle3_layers_to_capture([-1, 2])  # a rank that captures nothing


def test_a_model_that_builds_itself_gets_the_default_too(tmp_path: Path) -> None:
    root = mini_tree(tmp_path)
    patch.apply(read_tree(root))
    heir = load(model_file(root)).HeirModel(4)
    assert heir.capture_embedding_for_eagle3 is False


def test_the_ids_are_set_before_graphs_are_captured(tmp_path: Path) -> None:
    """The miniature's runners are run: what a captured graph holds, before the patch and after."""

    def captured(root: Path, ids: list[int]) -> list[int]:
        runners = root / "srt" / "model_executor"
        runner = load(runners / "model_runner.py")
        runner.__dict__["GraphRunner"] = load(runners / "cuda_graph_runner.py").GraphRunner
        one: Any = runner.ModelRunner()
        one.device, one.eagle_use_aux_hidden_state, one.ids = "cuda", True, ids
        one.model = load(model_file(root)).DeepseekV3ForCausalLM(SimpleNamespace(num_hidden_layers=8))
        one.initialize()
        one.warm()
        assert one.log == ["memory", "done"]
        return list(one.captured)

    root = mini_tree(tmp_path, graphs="late")
    assert captured(root, [2, 3, 4]) == [2, 4, 5]  # the default, whatever the ids
    patch.apply(read_tree(root))
    assert captured(root, [2, 3, 4]) == [3, 4, 5]


def test_the_wrapper_hands_on_what_eagle_calls(tmp_path: Path) -> None:
    root = mini_tree(tmp_path, wrapper_setter=False)
    patch.apply(read_tree(root))
    source = (root / "srt" / "models" / "kimi_k25.py").read_text()
    place: dict[str, Any] = {"Language": load(model_file(root)).DeepseekV3ForCausalLM}
    exec(source.split("\n", 1)[1], place)
    wrapper = place["KimiK25ForConditionalGeneration"](SimpleNamespace(num_hidden_layers=8))
    wrapper.set_eagle3_layers_to_capture([-1, 2])
    assert wrapper.language_model.model.layers_to_capture == [3]
    assert wrapper.get_embed_and_head() == ("embed", "head")
    wrapper.set_embed_and_head("e", "h")
    assert wrapper.language_model.both == ("e", "h")


# --- line ends, modes, links ----------------------------------------------------------------------------------------


def test_windows_line_ends_and_text_outside_ascii_are_kept(tmp_path: Path) -> None:
    root = mini_tree(tmp_path)
    text = "# ä→語\n" + model_file(root).read_text()
    model_file(root).write_text(text, newline="\r\n")
    before = contents(root)
    patch.apply(read_tree(root))
    lines = model_file(root).read_bytes().split(b"\n")
    assert all(line.endswith(b"\r") for line in lines[:-1])
    patch.revert(read_tree(root))
    assert contents(root) == before


def test_an_expression_after_wide_characters_is_edited_in_its_place(tmp_path: Path) -> None:
    root = mini_tree(tmp_path, rule=FIRST, loop="packer")
    text = model_file(root).read_text()
    text = text.replace("hidden, residual, out=(aux if", 'hidden, *([] and ["ä→語"]), residual, out=(aux if')
    model_file(root).write_text(text)
    patch.apply(read_tree(root))
    assert states(model_file(root), [-1, 2, 4]) == entering(0, 3, 5)


def test_the_mode_of_a_file_is_kept(tmp_path: Path) -> None:
    root = mini_tree(tmp_path)
    model_file(root).chmod(0o640)
    patch.apply(read_tree(root))
    assert stat.S_IMODE(model_file(root).stat().st_mode) == 0o640
    patch.revert(read_tree(root))
    assert stat.S_IMODE(model_file(root).stat().st_mode) == 0o640


def test_a_hard_link_elsewhere_keeps_the_original(tmp_path: Path) -> None:
    """Installers share files between environments by hard links: patching one must not patch the others."""
    root = mini_tree(tmp_path)
    other = tmp_path / "cache.py"
    os.link(model_file(root), other)
    before = other.read_bytes()
    patch.apply(read_tree(root))
    assert other.read_bytes() == before != model_file(root).read_bytes()


def test_a_symbolic_link_is_refused(tmp_path: Path) -> None:
    root = mini_tree(tmp_path)
    real = tmp_path / "real.py"
    model_file(root).rename(real)
    model_file(root).symlink_to(real)
    before = contents(root)
    with pytest.raises(RedraftError, match="is a link"):
        patch.apply(read_tree(root))
    assert contents(root) == before


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("        if not self.pp_group.is_last_rank:\n            return\n", "", "no guard for the last pipeline rank"),
        ("            self.capture_aux_hidden_states = True\n", "            pass\n", "capture_aux_hidden_states"),
        ("        self.layers_to_capture = []\n        self.first", "        self.first", "layers_to_capture"),
        ("if k in self.layers_to_capture:", "if k in self.chosen:", "no layer loop"),
        ("hidden = self.embed_tokens(ids)", "hidden = self.lookup(ids)", "embedding in a local"),
        (ALWAYS, "self.model.layers_to_capture = shifted(ids)", "not followed"),
    ],
)
def test_unknown_code_is_refused_and_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, why: str
) -> None:
    root = mini_tree(tmp_path)
    text = model_file(root).read_text()
    assert old in text
    model_file(root).write_text(text.replace(old, new))
    before = contents(root)
    assert run("apply", root) == 2
    line = capsys.readouterr().err.strip()
    assert why in line and "\n" not in line and "nothing was changed" in line
    assert contents(root) == before


def test_a_patch_by_half_is_refused_with_its_parts_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = mini_tree(tmp_path)
    patch.apply(read_tree(root))
    text = model_file(root).read_text()
    model_file(root).write_text(text.replace("        self.capture_embedding_for_eagle3 = False\n", ""))
    (root / patch.RECORD).unlink()
    before = contents(root)
    assert run("apply", root) == 2
    line = capsys.readouterr().err
    assert "by half" in line and "default:" in line and "setter:" not in line
    assert run("verify", root) == 1
    assert "default: NO" in capsys.readouterr().out
    assert contents(root) == before


def test_revert_refuses_a_file_that_was_changed_since(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = mini_tree(tmp_path, graphs="late")
    patch.apply(read_tree(root))
    model_file(root).write_text(model_file(root).read_text() + "# mine\n")
    before = contents(root)
    assert run("revert", root) == 2
    assert "changed since" in capsys.readouterr().err
    assert contents(root) == before
    assert "changed since" in patch.record_state(read_tree(root))


@pytest.mark.parametrize("damage", ["backup", "gone", "record"])
def test_revert_refuses_a_damaged_record(tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str) -> None:
    root = mini_tree(tmp_path)
    patch.apply(read_tree(root))
    backup = model_file(root).with_name("deepseek_v2.py" + patch.BACKUP)
    if damage == "backup":
        backup.write_text("other")
    elif damage == "gone":
        backup.unlink()
    else:
        (root / patch.RECORD).write_text('{"files": {"srt/models/deepseek_v2.py": {}}}')
    before = contents(root)
    assert run("revert", root) == 2
    assert "\n" not in capsys.readouterr().err.strip()
    assert contents(root) == before


def test_revert_without_apply_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("revert", mini_tree(tmp_path)) == 2
    assert "not patched by this tool" in capsys.readouterr().err


def test_no_tree_is_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("apply", "verify", "revert", "status"):
        assert run(command, tmp_path / "absent") == 2
        assert "no such SGLang tree" in capsys.readouterr().err


# --- interrupted and installed over ---------------------------------------------------------------------------------


@pytest.mark.parametrize("finish", ["apply", "revert"])
def test_an_interrupted_apply_can_be_finished_or_reverted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], finish: str
) -> None:
    root = mini_tree(tmp_path, graphs="late", wrapper_setter=False)
    before = contents(root)
    write, done = patch._write, []

    def full_disk(path: Path, content: bytes) -> None:
        if done:
            raise OSError(28, "No space left on device")
        done.append(path)
        write(path, content)

    monkeypatch.setattr(patch, "_write", full_disk)
    assert run("apply", root) == 2
    assert "No space left" in capsys.readouterr().err
    monkeypatch.undo()
    assert "interrupted" in patch.record_state(read_tree(root))
    assert run(finish, root) == 0
    if finish == "apply":
        assert run("verify", root) == 0
        assert run("revert", root) == 0
    assert contents(root) == before


def test_a_release_installed_over_a_patched_one_is_patched_anew(tmp_path: Path) -> None:
    root = mini_tree(tmp_path / "old")
    patch.apply(read_tree(root))
    newer = mini_tree(tmp_path / "new", rule=FIRST, loop="packer", version="0.5.23")
    for name, content in contents(newer).items():
        (root / name).write_bytes(content)
    before = contents(newer)
    assert run("apply", root) == 0
    assert json.loads((root / patch.RECORD).read_text())["version"] == "0.5.23"
    assert run("revert", root) == 0
    assert contents(root) == before


def test_a_patch_by_hand_gets_only_what_it_lacks(tmp_path: Path) -> None:
    root = mini_tree(tmp_path, graphs="late")
    text = model_file(root).read_text()
    for old, new in (
        ("        self.first_k", "        self.emb = False\n        self.first_k"),
        (
            ALWAYS,
            "self.model.emb = -1 in ids\n            self.model.layers_to_capture = [k + 1 for k in ids if k >= 0]",
        ),
        ("        aux = []\n", "        aux = []\n        if self.emb:\n            aux.append(hidden.clone())\n"),
    ):
        text = text.replace(old, new)
    model_file(root).write_text(text)
    changes = patch.apply(read_tree(root))
    assert changes and all("model_executor" in one for one in changes)
    assert run("verify", root) == 0 and model_file(root).read_text() == text


# --- other targets --------------------------------------------------------------------------------------------------


def test_a_target_that_needs_no_patch_is_told_its_id(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = mini_tree(tmp_path, rule=FIRST, loop="packer", version="0.5.23")
    before = contents(root)
    assert run("apply", root, "--model-type", "llama") == 0
    assert "feeds the embedding for id -1 already" in capsys.readouterr().out
    assert contents(root) == before


def test_a_target_that_cannot_be_patched_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = mini_tree(tmp_path, version="0.5.9")
    llama = root / "srt" / "models" / "llama.py"
    llama.write_text(model_file(root).read_text().replace("DeepseekV3ForCausalLM", "LlamaForCausalLM"))
    before = contents(root)
    assert run("apply", root, "--model-type", "llama") == 2
    assert "for DeepSeek and Kimi targets" in capsys.readouterr().err
    assert contents(root) == before
    with pytest.raises(WiringError):
        convention("sglang-0.5.9").parse_like([-1, 2, 4], Shape("llama", 8, 1))
