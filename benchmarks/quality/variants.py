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
    """One setting changed at a time: from what the preset had before ("last"), and from the fitted start ("fitted")."""
    return [
        _own("last", "starts by passing the last site through", *LAST),
        _own("last-temp-0.5", "teacher temperature 0.5", *LAST, "train.objective.teacher_temperature=0.5"),
        _own("random-fc", "fc from random weights", "draft.init_fc=random"),
        _own("random-head", "head from random weights", *LAST, "draft.init_lm_head=random"),
        _own("layer-mlp", "MLP of the target's last layer", *LAST, "draft.init_layer=target_mlp"),
        _own("layer", "the target's whole last layer", *LAST, "draft.init_layer=target"),
        _fitted("fitted", "starts from the best linear guess"),
        _fitted("norm-0.6", "head's norm at 0.6 of the target's", "draft.init_norm_scale=0.6"),
        _fitted("norm-1", "head's norm as the target's", "draft.init_norm_scale=1.0"),
        _fitted("lr-1e-3", "half the rate", "train.lr=1e-3"),
        _fitted("lr-4e-3", "twice the rate", "train.lr=4e-3"),
        _fitted("mixed-fade", "cross entropy that fades into total variation", *MIXED_FADE),
        _fitted("mixed", "half cross entropy, half total variation", "train.objective.kind=mixed"),
        _fitted("log-accept", "minus log of the chance of being kept", "train.objective.kind=log_acceptance"),
        _fitted("tv", "total variation alone", "train.objective.kind=acceptance"),
        _fitted("temp-0.7", "teacher temperature 0.7", "train.objective.teacher_temperature=0.7"),
        _fitted("temp-0.5", "teacher temperature 0.5", "train.objective.teacher_temperature=0.5"),
        _fitted("teach", "rows whose best token the draft lacks teach too", "train.objective.outside=teach"),
        _fitted("decay-1", "steps weigh alike", "train.step_decay=1.0"),
        _fitted("decay-0.6", "later steps weigh less", "train.step_decay=0.6"),
        _fitted("steps-2", "2 unrolled steps", "train.ttt_steps=2"),
        _fitted("steps-5", "5 unrolled steps", "train.ttt_steps=5"),
        _fitted("noise-0.2", "feature noise 0.2", "train.feature_noise=0.2"),
        _fitted("linear", "linear schedule", "train.schedule=linear"),
        _fitted("wsd", "flat, then a fall over the last 30%", "train.schedule=wsd", "train.decay_ratio=0.3"),
        _fitted("vocab-4096", "smaller draft vocabulary", "draft.vocab_size=4096"),
        _fitted("vocab-12288", "larger draft vocabulary", "draft.vocab_size=12288"),
        _fitted("fitted-mlp", "and the MLP of the target's last layer", *MLP),
        _fitted("mlp-1e-3", "and that MLP at half the rate", *MLP, "train.lr=1e-3"),
        _fitted("mlp-1e-3-linear", "and a linear schedule", *MLP, "train.lr=1e-3", "train.schedule=linear"),
        _theirs("specforge-1e-4", "as documented: K 7, rate 1e-4"),
        _theirs("specforge-5e-4", "five times the rate", "--lr=5e-4"),
        _theirs("specforge-2e-3", "twenty times the rate", "--lr=2e-3"),
        _theirs("specforge-k3-2e-3", "twenty times the rate, K 3", "--lr=2e-3", "--ttt-length=3"),
        _theirs("specforge-k3-5e-3", "fifty times the rate, K 3", "--lr=5e-3", "--ttt-length=3"),
    ]


LAST = ("draft.init_fc=last", "draft.init_norm_scale=0.3")
FITTED = ("draft.init_fc=fitted", "draft.init_norm_scale=0.3")
MLP = ("draft.init_layer=target_mlp",)
MIXED_FADE = ("train.objective.kind=mixed", "train.objective.ce_weight=1.0", "train.objective.ce_fade=3.0")


def _fitted(name: str, about: str, *settings: str) -> Variant:
    return _own(name, about, *FITTED, *settings)


def final() -> list[Variant]:
    """The best of the screen, what was there before, and SpecForge, each at its best."""
    return [
        _own("preset", "the preset as it is"),
        _own("last", "as the preset was before", *LAST),
        _theirs("specforge-2e-3", "K 7, the same rate", "--lr=2e-3"),
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
