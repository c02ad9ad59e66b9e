"""Bad stores, checkpoints, served drafts: what a disk, a download or an editor makes of our own folders."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bad_bench import entered, shared, staged
from planted_bench import Bench, Fault, edit_json, edit_weights

from eval.probe.__main__ import main as probe

TRAIN, EXPORT, EVAL = "train, before the first step", "export", "eval, before the first prompt"
WEIGHTS, CONFIG = "model.safetensors", "config.json"
Change = Callable[[Path], Any]
Tensors = dict[str, torch.Tensor]


def text(name: str, content: str) -> Change:
    """One file with another content."""
    return lambda folder: (folder / name).write_text(content, encoding="utf-8")


def half(name: str) -> Change:
    """A file cut in the middle."""

    def change(folder: Path) -> None:
        path = next(iter(sorted(folder.glob(name))))
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    return change


def manifest(**values: Any) -> Change:
    """A store's manifest with other values; None takes a key out."""
    return _replaced("manifest.json", values)


def sidecar(**values: Any) -> Change:
    """A shard's sidecar with other values."""
    return _replaced("shard-*.json", values)


def _replaced(name: str, values: dict[str, Any]) -> Change:
    def change(data: dict[str, Any]) -> None:
        data.update(values)
        for key in [key for key, value in values.items() if value is None]:
            del data[key]

    return lambda folder: edit_json(next(iter(sorted(folder.glob(name)))), change)


def _on_changed(name: str, line: Callable[[Bench, Change], str]) -> Callable[[Change], Callable[[Bench, bool], str]]:
    """From a change, a fault's `run`: `line` is what a command says of a copy that it lets be changed first."""
    return lambda change: shared(name, lambda bench: line(bench, change), lambda bench: line(bench, lambda _: None))


def _train_line(bench: Bench, edit: Change) -> str:
    """The train stage on a copy of the store."""
    store = bench.copy_of(bench.store)
    edit(store)
    return staged(bench, "train", f"paths.store={store}")


def _export_line(bench: Bench, edit: Change) -> str:
    """The export stage on a copy of a trained run."""
    folder = bench.copy_of_run(bench.trained_run)
    edit(folder / "train")
    return staged(bench, "export", run_dir=folder)


def _eval_line(bench: Bench, edit: Change) -> str:
    """The eval stage on a copy of an exported run."""
    folder = bench.copy_of_run(bench.served_run)
    edit(folder / "served")
    return staged(bench, "eval", run_dir=folder)


_stored = _on_changed("train command", _train_line)
_trained = _on_changed("export command", _export_line)
_served = _on_changed("eval command", _eval_line)


def config(change: Callable[[dict[str, Any]], Any]) -> Change:
    """A served config.json, changed."""
    return lambda served: edit_json(served / CONFIG, change)


def weights(change: Callable[[Tensors], Any]) -> Change:
    """Served weights, changed."""
    return lambda served: edit_weights(served / WEIGHTS, change)


def sized(**values: Any) -> Change:
    """A served config.json with other values."""
    return config(lambda data: data.update(values))


def _ids_as_text(data: dict[str, Any]) -> None:
    data["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = "2,4,6"


def _twice(served: Path) -> None:
    shutil.copy(served / WEIGHTS, served / "model-copy.safetensors")


def _repeat(tensors: Tensors) -> None:
    """d2t names one target id twice."""
    tensors["d2t"][1] = tensors["d2t"][0] - 1


def _probe_store(bench: Bench, planted: bool) -> str:
    folder = bench.folder("folder") if planted else bench.store
    folder.mkdir(parents=True, exist_ok=True)
    return entered(probe, "store", folder, "--target", bench.target, "--records", 1)


def _probe_draft(change: Change, bench: Bench, planted: bool) -> str:
    if not planted:
        return ""
    served = bench.copy_of(bench.served_run / "served")
    change(served)
    return entered(probe, "draft", "--draft", served, "--target", bench.target, "--store", bench.store)


STORES: list[tuple[str, Change, tuple[str, ...]]] = [
    ("a folder of something else for a store", lambda folder: (folder / "manifest.json").unlink(), ("manifest.json",)),
    ("half a manifest", half("manifest.json"), ("manifest.json", "not a readable JSON file", "extract")),
    ("a manifest that is a list", text("manifest.json", "[]"), ("manifest.json", "not an object")),
    ("a store of a later version", manifest(version=99), ("version 99", "1 or 2", "extract again")),
    ("a store of another tool", manifest(format="other"), ("format 'other'", "redraft-store")),
    ("a manifest without the tokenizer", manifest(tokenizer_hash=None), ("manifest", "tokenizer_hash")),
    ("a codec that is none", manifest(codec="zip"), ("unknown store codec", "'zip'", "lossless")),
    ("a dtype that is none", manifest(dtype="float8"), ("unknown store dtype", "'float8'", "bfloat16")),
    ("a wiring that is none", manifest(wiring={"aux": ["layer_2"]}), ("not a wiring",)),
    ("half a sidecar", half("shard-*.json"), ("shard-", "extract")),
    ("a sidecar of a later version", sidecar(version=99), ("sidecar", "extract")),
    ("a sidecar that names a file elsewhere", sidecar(data_name="../../x.safetensors"), ("../../x", "extract")),
    ("a sidecar with words for counts", sidecar(tokens="many"), ("sidecar", "extract")),
    ("half a seal", half("complete.json"), ("complete.json", "extract")),
]
CHECKPOINTS: list[tuple[str, Change, tuple[str, ...]]] = [
    ("no trained weights", lambda train: (train / "final.safetensors").unlink(), ("final.safetensors", "train stage")),
    ("half a file of trained weights", half("final.safetensors"), ("final.safetensors", "train stage")),
    ("half a training result", text("result.json", '{"steps": '), ("result.json", "train stage")),
    ("a training result of something else", text("result.json", "{}"), ("result.json", "train stage")),
]
DRAFTS: list[tuple[str, Change, tuple[str, ...]]] = [
    ("a draft without config.json", lambda served: (served / CONFIG).unlink(), ("config.json", "export stage")),
    ("half a config.json of a draft", half(CONFIG), ("config.json", "not a readable JSON file", "export")),
    ("a draft's config.json that is a list", text(CONFIG, "[]"), ("config.json", "not an object")),
    ("a draft of another architecture", sized(architectures=["LlamaForCausalLM"]), ("not an EAGLE-3 draft",)),
    ("a draft's size in words", sized(hidden_size="64"), ("draft.hidden_size: found '64'", "export")),
    ("a draft of no width", sized(hidden_size=0), ("draft.hidden_size: found 0", "export")),
    ("a draft's size left out", config(lambda data: data.pop("vocab_size")), ("no vocab_size",)),
    ("ids written as a text", config(_ids_as_text), ("'2,4,6'", "whole numbers")),
    ("eagle_config as a list", sized(eagle_config=[2, 4, 6]), ("ids None",)),
    ("a draft without weights", lambda served: (served / WEIGHTS).unlink(), (WEIGHTS, "export stage")),
    ("half a file of a draft's weights", half(WEIGHTS), ("truncated", WEIGHTS, "export")),
    ("a draft's weights of something else", text(WEIGHTS, "PK\3\4 a zip file"), (WEIGHTS, "export")),
    ("a draft's tensor in two files", _twice, ("two files hold one tensor", "keep one copy")),
    (
        "weights that are not numbers",
        weights(lambda t: t["fc.weight"].fill_(float("nan"))),
        ("not finite", "fc.weight"),
    ),
    ("d2t that names one token twice", weights(_repeat), ("do not describe one vocabulary",)),
    ("d2t past the vocabulary", weights(lambda t: t["d2t"].add_(10_000)), ("do not describe one vocabulary",)),
    ("t2d that marks no token", weights(lambda t: t["t2d"].zero_()), ("do not describe one vocabulary", "marks 0")),
    ("d2t in floating point", weights(lambda t: t.update(d2t=t["d2t"].float())), ("d2t", "float32")),
    (
        "t2d of another length",
        weights(lambda t: t.update(t2d=t["t2d"][:-1].clone())),
        ("t2d is [319], expected [320]",),
    ),
]
FAULTS = [
    *(Fault(name, TRAIN, _stored(change), words) for name, change, words in STORES),
    Fault("a folder that is no store, probed", "`eval.probe store`", _probe_store, ("manifest.json", "store")),
    *(Fault(name, EXPORT, _trained(change), words) for name, change, words in CHECKPOINTS),
    *(Fault(name, EVAL, _served(change), words) for name, change, words in DRAFTS),
    Fault(
        "a draft without weights, probed",
        "`eval.probe draft`",
        partial(_probe_draft, lambda served: (served / WEIGHTS).unlink()),
        ("no safetensors",),
    ),
]
