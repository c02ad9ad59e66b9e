"""How a program turns integer ids into places on the residual stream: pure integer rules, no engine needed.

A *place* is a layer number `k` in `0..num_layers-1`, meaning "what enters decoder layer k" (0 = the embedding),
as in `eagle3.wiring`. A rule maps ids to places and back; it neither sorts nor checks ranges: that is the work
of `eagle3.conventions.EngineConvention`, which is the same for all programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from eagle3.errors import WiringError


def native_places(num_layers: int) -> list[int]:
    """EAGLE-3's own triple `[2, L//2, L-3]`, the default of SGLang, vLLM, speculators and EAGLE's modelling code."""
    return [2, num_layers // 2, num_layers - 3]


def output_ids(num_layers: int) -> list[int]:
    """The same triple counted by layer *outputs*: `[1, L//2-1, L-4]` (SpecForge, TorchSpec, Model-Optimizer)."""
    return [1, num_layers // 2 - 1, num_layers - 4]


class IdRule(Protocol):
    """What a convention needs of a rule."""

    def places(self, ids: Sequence[int], num_layers: int) -> list[int]:
        """Places named by `ids`, in the order of `ids`; may be out of range.

        Raises:
            WiringError: an id that the program ignores or that stands for nothing.
        """
        ...

    def ids(self, places: Sequence[int]) -> list[int]:
        """Ids that name `places`.

        Raises:
            WiringError: no list of ids names them.
        """
        ...

    def default_places(self, num_layers: int) -> list[int]:
        """Places fed when the draft's config names no ids.

        Raises:
            WiringError: the program has no default.
        """
        ...


@dataclass(frozen=True)
class Offset:
    """Id `a` names place `a + offset`: 0 counts layer inputs, 1 counts layer outputs.

    Args:
        offset: 0 or 1.
        output_default: the default ids are `output_ids`, themselves shifted; else `native_places`.
        has_default: False where the user must name the ids.
        squeezes_default: a default whose ids collide on a shallow target loses a slot instead of being refused.
    """

    offset: int
    output_default: bool = False
    has_default: bool = True
    squeezes_default: bool = False

    def places(self, ids: Sequence[int], num_layers: int) -> list[int]:
        return [value + self.offset for value in ids]

    def ids(self, places: Sequence[int]) -> list[int]:
        return [place - self.offset for place in places]

    def default_places(self, num_layers: int) -> list[int]:
        if not self.has_default:
            raise WiringError("this convention has no default", mend="name the ids")
        if not self.output_default:
            return native_places(num_layers)
        ids = output_ids(num_layers)
        if self.squeezes_default:
            ids = sorted({max(0, value) for value in ids})
        return self.places(ids, num_layers)


@dataclass(frozen=True)
class FirstIdDecides:
    """Ids count layer outputs when the first is 1, and layer inputs otherwise (SGLang's DeepSeek file from 0.5.13).

    Since the states are captured in layer order whatever the order of the ids, a wiring that begins with layer 1
    is written with its layer 1 last: `[20, 40, 1]`. Layer 1 alone cannot be written at all.
    """

    output_default: bool = False

    def places(self, ids: Sequence[int], num_layers: int) -> list[int]:
        shift = 1 if ids[0] == 1 else 0
        return [value + shift for value in ids]

    def ids(self, places: Sequence[int]) -> list[int]:
        raw = list(places)
        if raw[0] != 1:
            return raw
        if len(raw) == 1:
            raise WiringError(
                "layer 1 alone cannot be written",
                why="a first id of 1 makes this build add one to every id",
                mend="choose another layer, or more than one",
            )
        return [*raw[1:], 1]

    def default_places(self, num_layers: int) -> list[int]:
        return self.places(output_ids(num_layers), num_layers) if self.output_default else native_places(num_layers)


@dataclass(frozen=True)
class PatchedOutputs:
    """Ids count layer outputs and -1 is the embedding, which always comes first (the patch of old SGLang builds)."""

    def places(self, ids: Sequence[int], num_layers: int) -> list[int]:
        ignored = [value for value in ids if value < -1]
        if ignored:
            raise WiringError("ids that this build ignores", why=f"found {ignored}", mend="use ids from -1 up")
        return [value + 1 for value in ids]

    def ids(self, places: Sequence[int]) -> list[int]:
        return [place - 1 for place in places]

    def default_places(self, num_layers: int) -> list[int]:
        return native_places(num_layers)


@dataclass(frozen=True)
class PatchedFirstIdDecides:
    """The same patch on `FirstIdDecides`: with -1 among the ids they are `PatchedOutputs`, without it as unpatched.

    Args:
        zero: id 0 among layer inputs is the embedding; False where the unpatched layer loop stops at layer 0.
    """

    zero: bool = True

    def places(self, ids: Sequence[int], num_layers: int) -> list[int]:
        if -1 in ids:
            return PatchedOutputs().places(ids, num_layers)
        places = FirstIdDecides().places(ids, num_layers)
        if 0 in places and not self.zero:
            raise WiringError(
                "id 0 stops this build",
                why="it adds the residual to what enters layer 0, and there is none",
                mend="write -1 for the embedding, and the other ids one lower",
            )
        return places

    def ids(self, places: Sequence[int]) -> list[int]:
        return PatchedOutputs().ids(places) if 0 in places else FirstIdDecides().ids(places)

    def default_places(self, num_layers: int) -> list[int]:
        return native_places(num_layers)


@dataclass(frozen=True)
class Hardwired:
    """The places stand in the program's source and no id is read; given ids must name exactly those."""

    def places(self, ids: Sequence[int], num_layers: int) -> list[int]:
        if sorted(ids) != sorted(native_places(num_layers)):
            raise WiringError(
                "this program reads no ids",
                why=f"it always feeds {sorted(native_places(num_layers))}; found {list(ids)}",
                mend="use another engine for other sites",
            )
        return list(ids)

    def ids(self, places: Sequence[int]) -> list[int]:
        return list(places)

    def default_places(self, num_layers: int) -> list[int]:
        return native_places(num_layers)
