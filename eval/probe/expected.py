"""What a draft expects to be fed: from a served folder, or as the caller says it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3.atomic import read_json
from eagle3.checkpoint import served_wiring
from eagle3.conventions import EngineConvention, TargetShape
from eagle3.errors import WiringError
from eagle3.wiring import Site, Wiring

_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class Expected:
    """A draft's wants.

    Args:
        wiring: the sites it was trained on; None when nobody says.
        source: who says so, in words.
        ids: the ids that SGLang reads from its config; None = no ids there, so the engine's default.
        has_folder: whether `ids` was read from a folder at all.
    """

    wiring: Wiring | None
    source: str
    ids: list[int] | None = None
    has_folder: bool = False


def parse_wiring(text: str, shape: TargetShape, teacher: str = "final") -> Wiring:
    """Read `layer_2,layer_15,layer_27` or `native` as a wiring of the target of `shape`.

    Raises:
        WiringError: not sites, or sites that this target has not.
    """
    if text.strip() == "native":
        return Wiring.native(shape.model_type, shape.num_layers, shape.hidden_size, teacher)
    aux = tuple(Site.parse(part) for part in text.split(","))
    return Wiring(aux, teacher, shape.model_type, shape.num_layers, shape.hidden_size)


def sglang_ids(config: dict[str, Any]) -> list[int] | None:
    """The ids that SGLang finds in a draft's config.json: in the nested `eagle_config`, or none."""
    block = config.get("eagle_config")
    ids = block.get(_IDS) if isinstance(block, dict) else None
    return list(ids) if isinstance(ids, list) else None


def expected_of_folder(folder: Path, shape: TargetShape, reader: EngineConvention | None) -> Expected:
    """What the draft in `folder` was trained on.

    A folder of this tool says it. A folder of another tool holds ids at most; `reader` (the server's own convention)
    then says what they would make the server feed, which is no proof of what the draft was trained on.

    Raises:
        IntegrityError: no readable config.json.
        WiringError: ids edited by hand.
    """
    config = read_json(Path(folder) / "config.json", mend="give a served folder: config.json and weights")
    ids = sglang_ids(config)
    wiring = served_wiring(config, str(folder))
    if wiring is not None:
        return Expected(wiring, f"the wiring that {folder} was trained on", ids, True)
    if reader is None:
        return Expected(None, f"{folder} names no wiring", ids, True)
    try:
        read = reader.parse_like(ids, shape)
    except WiringError as err:
        return Expected(None, f"{folder} names no wiring, and its ids are refused: {err.what}", ids, True)
    return Expected(read, f"ids {ids} of {folder} as {reader.name} reads them (it names no wiring)", ids, True)


def site_names(wiring: Wiring | None) -> Sequence[str] | None:
    """Names in slot order, or None."""
    return None if wiring is None else wiring.names
