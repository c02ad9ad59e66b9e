"""Faults in the trained draft and its served folder: refused at export, or before the first prompt is served."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from planted_bench import DRAFT_VOCAB, VOCAB, Bench, Fault, edit_json, edit_weights, probed, refusal

from eagle3.conventions import convention
from eagle3.vocab import build_draft_vocab, load_vocab, save_vocab

EVAL, EXPORT = "eval, before the first prompt", "export"
IDS = "eagle_aux_hidden_state_layer_ids"
Tensors = dict[str, torch.Tensor]


def _served(change: Callable[[Bench, Path], Any]) -> Callable[[Bench, bool], str]:
    """The eval stage on a served folder."""

    def run(bench: Bench, planted: bool) -> str:
        folder = bench.copy_of_run(bench.served_run)
        if not planted:
            return bench.once("eval", lambda: refusal(lambda: bench.front("eval", run_dir=folder), reaches=True))
        change(bench, folder / "served")
        return refusal(lambda: bench.front("eval", run_dir=folder), reaches=True)

    return run


def _weights(change: Callable[[Tensors], Any]) -> Callable[[Bench, bool], str]:
    return _served(lambda _bench, served: edit_weights(served / "model.safetensors", change))


def _config(change: Callable[[dict[str, Any]], Any]) -> Callable[[Bench, bool], str]:
    return _served(lambda _bench, served: edit_json(served / "config.json", change))


def _ids(ids: list[int]) -> Callable[[dict[str, Any]], Any]:
    return lambda config: config["eagle_config"].update({IDS: ids})


def _top_level_only(config: dict[str, Any]) -> None:
    config[IDS] = config["eagle_config"].pop(IDS)


def _no_ids(config: dict[str, Any]) -> None:
    config.pop(IDS)
    config["eagle_config"].pop(IDS)


def _rewired(bench: Bench, served: Path) -> None:
    """Wiring and ids edited together, so that they agree with each other."""
    other = bench.wire(3, 5, 7)

    def change(config: dict[str, Any]) -> None:
        config["redraft"]["wiring"] = other.to_dict()
        config["eagle_config"][IDS] = convention(config["redraft"]["convention"]).render(other)
        config[IDS] = convention("vllm").render(other)

    edit_json(served / "config.json", change)


def _other_maps() -> Any:
    return build_draft_vocab(torch.arange(VOCAB).flip(0) % 199, DRAFT_VOCAB)


def _stale_d2t(tensors: Tensors) -> None:
    tensors["d2t"] = _other_maps().d2t


def _stale_both(tensors: Tensors) -> None:
    tensors["d2t"], tensors["t2d"] = _other_maps().d2t, _other_maps().t2d


def _narrower(tensors: Tensors) -> None:
    tensors["fc.weight"] = tensors["fc.weight"][:, :128].contiguous()


def _checkpoint(change: Callable[[Path], Any]) -> Callable[[Bench, bool], str]:
    """The export stage on a trained checkpoint."""

    def run(bench: Bench, planted: bool) -> str:
        folder = bench.copy_of_run(bench.trained_run)
        if not planted:
            return bench.once("export", lambda: refusal(lambda: bench.front("export", run_dir=folder)))
        change(folder / "train")
        return refusal(lambda: bench.front("export", run_dir=folder))

    return run


def _exported_as(*settings: str) -> Callable[[Bench, bool], str]:
    """The export stage with settings that the checkpoint was not trained with."""

    def run(bench: Bench, planted: bool) -> str:
        folder = bench.copy_of_run(bench.trained_run)
        return refusal(lambda: bench.front("export", *(settings if planted else ()), run_dir=folder))

    return run


def _stale_vocabulary(train: Path) -> None:
    before = load_vocab(train / "draft_vocab.safetensors")
    save_vocab(train / "draft_vocab.safetensors", _other_maps())
    assert load_vocab(train / "draft_vocab.safetensors").size == before.size


def _mistaught(bench: Bench, planted: bool) -> str:
    """A draft fitted on cat(embedding, 2, 4) that says 2, 4, 6."""
    from probe_fakes import make_fitted_draft, make_store

    trained = bench.wire(0, 2, 4) if planted else bench.wiring
    folder = make_fitted_draft(bench.folder("served"), bench.target, bench.model, trained, claimed=bench.wiring)
    store = make_store(bench.folder("store"), bench.target, bench.model, bench.wiring)
    return probed("draft", "--draft", folder, "--target", bench.target, "--store", store, "--steps", 2, reasons=0)


EDITED = "the ids were edited by hand"
FAULTS = [
    Fault(
        "a checkpoint without its head",
        EXPORT,
        _checkpoint(lambda train: edit_weights(train / "final.safetensors", lambda t: t.pop("lm_head.weight"))),
        ("missing lm_head.weight",),
    ),
    Fault(
        "a draft vocabulary of another set beside the checkpoint (same size)",
        EXPORT,
        _checkpoint(_stale_vocabulary),
        ("the draft vocabulary is not the draft's own", "draft_vocab.safetensors"),
    ),
    Fault(
        "a checkpoint exported under another wiring than it was trained on",
        EXPORT,
        _exported_as("wiring.aux=[layer_3,layer_5,layer_7]"),
        ("another wiring", "slot 0 holds layer 2; expected layer 3", "run the train stage again"),
    ),
    Fault("a missing head", EVAL, _weights(lambda t: t.pop("lm_head.weight")), ("missing lm_head.weight",)),
    Fault(
        "an unknown weight name",
        EVAL,
        _weights(lambda t: t.update({"midlayer.fc.weight": torch.zeros(2)})),
        ("unknown midlayer.fc.weight",),
    ),
    Fault(
        "a stale d2t of another size",
        EVAL,
        _weights(lambda t: t.update(d2t=t["d2t"][:-8].contiguous())),
        (f"d2t is [{DRAFT_VOCAB - 8}], expected [{DRAFT_VOCAB}]",),
    ),
    Fault(
        "a stale d2t of the same size: t2d disagrees",
        EVAL,
        _weights(_stale_d2t),
        ("d2t and t2d do not describe one vocabulary",),
    ),
    Fault(
        "a stale d2t with its own t2d, of the same size",
        EVAL,
        _weights(_stale_both),
        ("d2t is of another draft vocabulary", "propose another token"),
    ),
    Fault(
        "a draft of another width: two slots instead of three",
        EVAL,
        _weights(_narrower),
        ("fc.weight is [64, 128], expected [64, 192]",),
    ),
    Fault(
        "the wiring and the ids edited together", EVAL, _served(_rewired), ("slot 0 holds layer 3; expected layer 2",)
    ),
    Fault("ids edited by hand", EVAL, _config(_ids([1, 3, 4])), (EDITED, "slot 2 holds layer 5; expected layer 6")),
    Fault("one added to the ids twice", EVAL, _config(_ids([2, 4, 6])), (EDITED, "slot 0 holds layer 3")),
    Fault(
        "ids counted from the input (one added never)", EVAL, _config(_ids([0, 2, 4])), (EDITED, "slot 0 holds layer 1")
    ),
    Fault("ids at the top level only", EVAL, _config(_top_level_only), (EDITED, "ids None")),
    Fault("no ids at all", EVAL, _config(_no_ids), (EDITED, "ids None", "slot 2 holds layer 5")),
    Fault(
        "a switch that norms each aux state before fc",
        EVAL,
        _config(lambda config: config.update(use_aux_norm=True)),
        ("another draft than the one trained", "fc_norm is True"),
    ),
    Fault(
        "a switch that feeds the draft's normed state on",
        EVAL,
        _config(lambda config: config.update(norm_output=True)),
        ("another draft than the one trained", "norm_output is True"),
    ),
    Fault(
        "a switch that feeds the last state alone",
        EVAL,
        _config(lambda config: config["eagle_config"].update(use_aux_hidden_state=False)),
        ("only the last state would be fed",),
    ),
    Fault(
        "target_hidden_size left null: the embedding is not shared",
        EVAL,
        _config(lambda config: config.update(target_hidden_size=None)),
        ("target_hidden_size is None", "embedding would not be shared"),
    ),
    Fault(
        "a draft trained for other target weights",
        EVAL,
        _config(lambda config: config["redraft"]["target"].update(weights_fingerprint="0" * 64)),
        ("another target", "weights_fingerprint", "eval.accept_other_target"),
    ),
    Fault(
        "a draft trained on another wiring than it says",
        "`eval.probe draft`, before serving",
        _mistaught,
        ("trained on cat(embedding, layer_2, layer_4), not on cat(layer_2, layer_4, layer_6)", "retrain"),
    ),
]
