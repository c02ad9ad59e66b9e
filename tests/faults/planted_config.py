"""Faults in the configuration: refused before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from planted_bench import LAYERS, Bench, Fault, composed, refusal

STAGE = "configuration"


def _kimi(*wrong: str, right: tuple[str, ...] = ()) -> Callable[[Bench, bool], str]:
    """The Kimi-K2.5 preset with settings that are right or wrong."""

    def run(_bench: Bench, planted: bool) -> str:
        return refusal(lambda: composed("kimi_k25", *(wrong if planted else right)))

    return run


def _shallow(_bench: Bench, planted: bool) -> str:
    layers = 6 if planted else 7
    return refusal(lambda: composed("kimi_k25", "wiring.aux=[]", f"target.num_layers={layers}"))


def _declared(bench: Bench, planted: bool) -> str:
    _ = bench.store
    stage = partial(bench.front, "train", f"target.num_layers={LAYERS + planted}", run_dir=bench.folder("run"))
    return refusal(stage, reaches=True)


FAULTS = [
    Fault("bare integers for sites", STAGE, _kimi("wiring.aux=[3,31,59]"), ("wiring.aux", "bare id", "layer_<k>")),
    Fault(
        "a site named twice",
        STAGE,
        _kimi("wiring.aux=[layer_3,layer_3,layer_59]"),
        ("wiring.aux", "twice", "layer_3, layer_3"),
    ),
    Fault(
        "a site past the last layer",
        STAGE,
        _kimi("wiring.aux=[layer_3,layer_31,layer_61]"),
        ("layer_61", "layers 0 to 60"),
    ),
    Fault("the default wiring on 6 layers: 2, 3, 3", STAGE, _shallow, ("layer_2, layer_3, layer_3", "6 layers")),
    Fault(
        "slots out of layer order, for an engine that joins by layer",
        STAGE,
        _kimi("wiring.aux=[layer_59,layer_3,layer_31]"),
        ("export.convention", "order the sites by layer"),
    ),
    Fault(
        "the embedding, for a build that cannot feed it",
        STAGE,
        _kimi(
            "wiring.aux=[embedding,layer_3,layer_31]",
            "export.convention=sglang-0.5.9",
            right=("wiring.aux=[embedding,layer_3,layer_31]", "export.convention=sglang-0.5.9-patched"),
        ),
        ("export.convention", "embedding"),
    ),
    Fault(
        "layer 1 alone, on a build where a first id of 1 shifts all ids",
        STAGE,
        _kimi("wiring.aux=[layer_1]", right=("wiring.aux=[layer_1,layer_20,layer_40]",)),
        ("layer 1 alone cannot be written", "add one to every id"),
    ),
    Fault(
        "an engine build nobody has read",
        STAGE,
        _kimi("export.convention=sglang-0.4.0"),
        ("unknown engine convention", "sglang-0.5.23"),
    ),
    Fault(
        "a teacher that is neither before nor after the final norm",
        STAGE,
        _kimi("wiring.teacher=layer_60", right=("wiring.teacher=final_normed",)),
        ("wiring.teacher", "final or final_normed"),
    ),
    Fault(
        "a target with another number of layers than declared",
        "any stage, when the target is opened",
        _declared,
        ("target.num_layers", "set target.num_layers=8"),
    ),
]
