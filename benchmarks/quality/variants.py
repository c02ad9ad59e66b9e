"""What is compared: named variants of training, each the base run with some settings changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from eagle3.config import require

SIDES = ("redraft", "specforge")


@dataclass(frozen=True)
class Variant:
    """One way to train a draft.

    Args:
        name: in tables and folder names.
        settings: Hydra overrides on the base run ("train.lr=1e-3"); for side "specforge" its trainer's options
            ("--lr=1e-3") instead.
        side: whose training code runs.
        about: what it tries, for the table.
    """

    name: str
    settings: tuple[str, ...] = ()
    side: str = "redraft"
    about: str = ""

    def __post_init__(self) -> None:
        require(self.side in SIDES, "variant.side", self.side, " or ".join(SIDES))


def _own(name: str, about: str, *settings: str) -> Variant:
    return Variant(name, settings, "redraft", about)


def _theirs(name: str, about: str, *settings: str) -> Variant:
    return Variant(name, settings, "specforge", about)


def screen() -> list[Variant]:
    """One setting changed at a time."""
    return [
        _own("base", "the preset as it is"),
        _own("temp-0.5", "teacher temperature 0.5", "train.objective.teacher_temperature=0.5"),
        _own("temp-0.7", "teacher temperature 0.7", "train.objective.teacher_temperature=0.7"),
        _own("tv", "total variation alone", "train.objective.kind=acceptance"),
        _own("log-accept", "minus log of the chance of being kept", "train.objective.kind=log_acceptance"),
        _own("mixed", "half cross entropy, half total variation", "train.objective.kind=mixed"),
        _own("mixed-fade", "cross entropy fading", *_MIXED_FADE),
        _own("decay-1", "steps weigh alike", "train.step_decay=1.0"),
        _own("decay-0.6", "later steps weigh less", "train.step_decay=0.6"),
        _own("steps-2", "2 unrolled steps", "train.ttt_steps=2"),
        _own("steps-5", "5 unrolled steps", "train.ttt_steps=5"),
        _own("noise-0.2", "feature noise 0.2", "train.feature_noise=0.2"),
        _own("linear", "linear schedule", "train.schedule=linear"),
        _own("wsd", "flat, then a fall over the last 30%", "train.schedule=wsd", "train.decay_ratio=0.3"),
        _own("lr-1e-3", "half the rate", "train.lr=1e-3"),
        _own("lr-4e-3", "twice the rate", "train.lr=4e-3"),
        _own("vocab-4096", "smaller draft vocabulary", "draft.vocab_size=4096"),
        _own("vocab-12288", "larger draft vocabulary", "draft.vocab_size=12288"),
        _own("random-fc", "fc from random weights", "draft.init_fc=random"),
        _own("random-head", "head from random weights", "draft.init_lm_head=random"),
        _own("norm-1", "the target's norm as it is", "draft.init_norm_scale=1.0"),
        _own("fitted", "start fitted by least squares", "draft.init_fc=fitted"),
        _own("fitted-norm-1", "the same, norm as it is", "draft.init_fc=fitted", "draft.init_norm_scale=1.0"),
        _own("fitted-lr-1e-3", "the same, half the rate", "draft.init_fc=fitted", "train.lr=1e-3"),
        _own("layer-mlp", "MLP of the target's last layer", "draft.init_layer=target_mlp"),
        _own("layer", "the target's whole last layer", "draft.init_layer=target"),
        _theirs("specforge-1e-4", "as documented: K 7, rate 1e-4"),
        _theirs("specforge-5e-4", "five times the rate", "--lr=5e-4"),
        _theirs("specforge-2e-3", "twenty times the rate", "--lr=2e-3"),
    ]


_MIXED_FADE = ("train.objective.kind=mixed", "train.objective.ce_weight=1.0", "train.objective.ce_fade=3.0")


def final() -> list[Variant]:
    """The best of the screen, what was there before, and SpecForge, each at its best."""
    return [
        _own("base", "the preset as it is"),
        _theirs("specforge-1e-4", "as documented: K 7, rate 1e-4"),
        _theirs("specforge-2e-3", "its best rate here", "--lr=2e-3"),
    ]


PLANS: dict[str, Callable[[], list[Variant]]] = {"screen": screen, "final": final}


def chosen(plan: str, only: list[str]) -> list[Variant]:
    """Variants of a plan, in its order; with `only`, those of these names.

    Raises:
        ConfigError: an unknown plan or name.
    """
    require(plan in PLANS, "--plan", plan, " or ".join(PLANS))
    variants = PLANS[plan]()
    names = [variant.name for variant in variants]
    for name in only:
        require(name in names, "--only", name, ", ".join(names))
    return [variant for variant in variants if not only or variant.name in only]
