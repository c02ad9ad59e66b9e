"""Bad target folders: weights, config.json, tokenizer and chat template."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bad_bench import shared, staged
from planted_bench import Bench, Fault, edit_json

OPENED, TOKENIZED, RENDERED = "any stage, when the target is opened", "prepare, at its start", "prepare, at the record"
WEIGHTS = "model.safetensors"
Change = Callable[[Path], Any]


def prepare_with(change: Change, *settings: str) -> Callable[[Bench, bool], str]:
    """The prepare stage with a changed copy of the target."""

    def line(bench: Bench, edit: Change, *more: str) -> str:
        target, run = bench.folder("target"), bench.folder("run")
        shutil.copytree(bench.target, target)
        edit(target)
        paths = (f"target.path={target}", f"paths.prepared={run / 'prepared'}", f"paths.store={run / 'store'}")
        return staged(bench, "prepare", *paths, *more, run_dir=run)

    return shared("target", lambda bench: line(bench, change, *settings), lambda bench: line(bench, lambda _: None))


def config(**values: Any) -> Change:
    """config.json with other values."""
    return lambda target: edit_json(target / "config.json", lambda data: data.update(values))


def text(name: str, content: str) -> Change:
    """One file with another content."""
    return lambda target: (target / name).write_text(content, encoding="utf-8")


def gone(name: str) -> Change:
    """One file removed."""
    return lambda target: (target / name).unlink()


def template(content: str) -> Change:
    """Another chat template."""
    return text("chat_template.jinja", content)


def indexed(weight_map: Any) -> Change:
    """An index beside the weights."""
    return text("model.safetensors.index.json", json.dumps({"weight_map": weight_map}))


def header(content: bytes) -> Change:
    """Weights with another header before the same data."""

    def change(target: Path) -> None:
        raw = (target / WEIGHTS).read_bytes()
        old = 8 + int.from_bytes(raw[:8], "little")
        (target / WEIGHTS).write_bytes(len(content).to_bytes(8, "little") + content + raw[old:])

    return change


def no_tokenizer(target: Path) -> None:
    """All of the tokenizer's files removed."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"):
        (target / name).unlink(missing_ok=True)


def no_template(target: Path) -> None:
    """The chat template removed, wherever it stands."""
    (target / "chat_template.jinja").unlink(missing_ok=True)
    edit_json(target / "tokenizer_config.json", lambda data: data.pop("chat_template", None))


def longer_vocabulary(target: Path) -> None:
    """A tokenizer whose chats hold ids that the target has no row for."""
    added = {"id": 900, "content": "river", "single_word": False, "lstrip": False, "rstrip": False}
    added |= {"normalized": False, "special": False}
    edit_json(target / "tokenizer.json", lambda data: data["added_tokens"].append(added))


def same_tensor_twice(target: Path) -> None:
    """The weights copied under a second name."""
    shutil.copy(target / WEIGHTS, target / "model-copy.safetensors")


USER = "{% for m in messages %}<|im_user|>{{ m.role }}<|im_middle|>{{ m.content }}<|im_end|>{% endfor %}"
FOLDERS: list[tuple[str, Change, tuple[str, ...]]] = [
    ("no target folder", shutil.rmtree, ("target not found", "target.path")),
    ("a target without config.json", gone("config.json"), ("config.json", "file not found", "copy")),
    ("a config.json that is no JSON", text("config.json", "{"), ("config.json", "not a readable JSON file")),
    ("... a list", text("config.json", "[]"), ("config.json", "not an object")),
    ("... without a depth", config(num_hidden_layers=None), ("config.json lacks a key", "num_hidden_layers")),
    ("... with a word for a size", config(hidden_size="wide"), ("impossible value", "hidden_size is 'wide'")),
    ("... of another model", config(vocab_size=999), ("target is another model", "set target.vocab_size=999")),
    ("a target without weights", gone(WEIGHTS), ("no weights", ".safetensors")),
    ("weights that Git LFS left out", text(WEIGHTS, "version https://git-lfs"), ("Git LFS pointer", "git lfs pull")),
    ("weights without a whole header", header(b'{"a": '), ("truncated or corrupt", WEIGHTS)),
    ("a header that places a tensor nowhere", header(b'{"a": {"data_offsets": [0]}}'), ("truncated or corrupt",)),
    ("an index that names a shard that is not there", indexed({"a": "model-2.safetensors"}), ("not found", "model-2")),
    (
        "an index that leads out of the folder",
        indexed({"a": "../../secret.safetensors"}),
        ("leads out", "../../secret"),
    ),
    ("an index without a map", indexed([]), ("no weight_map", "index.json")),
    ("one tensor in two files", same_tensor_twice, ("two files hold one tensor", "keep one copy")),
]
TOKENIZERS: list[tuple[str, Change, tuple[str, ...]]] = [
    ("no tokenizer", no_tokenizer, ("cannot load the tokenizer", "put the tokenizer's files there")),
    ("half a tokenizer.json", text("tokenizer.json", '{"version": "1.0", "mod'), ("cannot load the tokenizer",)),
    ("a tokenizer.json of something else", text("tokenizer.json", '{"a": 1}'), ("cannot load the tokenizer",)),
    ("no chat template", no_template, ("tokenizer has no chat template", "chat_template.jinja")),
]
TEMPLATES: list[tuple[str, Change, tuple[str, ...]]] = [
    ("a chat template with an open tag", template("{% for m in messages %}"), ("refuses the messages", "Syntax")),
    ("... with a filter that is none", template("{{ messages | chat }}"), ("refuses the messages", "chat")),
    ("... that raises", template("{{ raise_exception('no tools here') }}"), ("refuses the messages", "no tools here")),
    ("... that calls itself", template("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}"), ("refuses", "recursion")),
    ("... that loops for ever", template("{% for i in range(10**9) %}x{% endfor %}"), ("refuses", "Range too big")),
    ("... that leaves the answer out", template("<|im_user|>hello<|im_end|>"), ("changes the words",)),
    ("... that writes other words", template(USER.replace("m.content", "m.content | upper")), ("words",)),
]
FAULTS = [
    *(Fault(name, OPENED, prepare_with(change), words) for name, change, words in FOLDERS),
    *(Fault(name, TOKENIZED, prepare_with(change), words) for name, change, words in TOKENIZERS),
    *(Fault(name, RENDERED, prepare_with(change), words) for name, change, words in TEMPLATES),
    Fault(
        "markers of another family than the template's",
        TOKENIZED,
        prepare_with(lambda _target: None, "data.markers=llama3"),
        ("does not write these markers", "data.markers"),
    ),
]
