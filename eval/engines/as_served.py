"""The served folder as one engine build must see it: the same weights, and ids that mean the wiring asked for."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from eagle3.atomic import read_json, write_json
from eagle3.checkpoint import CONFIG, sealed_config
from eagle3.conventions import convention
from eagle3.errors import WiringError
from eagle3.wiring import Wiring

IDS = "eagle_aux_hidden_state_layer_ids"


@contextlib.contextmanager
def as_served(served: Path, wiring: Wiring, convention_name: str, work_dir: Path) -> Iterator[tuple[Path, list[int]]]:
    """A temporary folder that an engine of `convention_name` loads and then feeds `wiring`.

    Args:
        served: the draft's folder; left as it is.
        wiring: what is to be fed, whatever the draft was trained on.
        convention_name: of the engine build (`eagle3.conventions`).
        work_dir: where the folder is made; it is removed again on leaving.

    Yields:
        The folder, and the ids written.

    Raises:
        WiringError: that build cannot feed this wiring.
        IntegrityError: `served` has no readable `config.json`.
    """
    config, ids = served_config_for(read_json(served / CONFIG), wiring, convention_name)
    with _linked(served, config, work_dir) as folder:
        yield folder, ids


@contextlib.contextmanager
def as_written(served: Path, ids: Sequence[int], work_dir: Path) -> Iterator[tuple[Path, list[int]]]:
    """As `as_served`, for SGLang, with `ids` unchecked: to see what a build does with ids it may not be fit for."""
    config = read_json(served / CONFIG)
    config["eagle_config"] = {**config.get("eagle_config", {}), IDS: list(ids)}
    with _linked(served, sealed_config(config), work_dir) as folder:
        yield folder, list(ids)


@contextlib.contextmanager
def _linked(served: Path, config: dict[str, Any], work_dir: Path) -> Iterator[Path]:
    work_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="as_served-", dir=work_dir.resolve()) as name:
        folder = Path(name)
        for file in served.resolve().iterdir():
            if file.name != CONFIG:
                (folder / file.name).symlink_to(file)
        write_json(folder / CONFIG, config)
        yield folder


def served_config_for(config: dict[str, Any], wiring: Wiring, convention_name: str) -> tuple[dict[str, Any], list[int]]:
    """A draft's `config.json` rewritten for one engine build, and the ids in it.

    SGLang reads the ids inside `eagle_config`, vLLM those at the top level; each level gets its reader's ids.

    Raises:
        WiringError: that build cannot feed this wiring.
    """
    ids = convention(convention_name).render(wiring)
    out = {**config, "eagle_config": {**config.get("eagle_config", {}), IDS: ids}}
    out.pop(IDS, None)
    with contextlib.suppress(WiringError):
        out[IDS] = convention("vllm").render(wiring)
    block = config.get("redraft")
    if isinstance(block, dict) and "wiring" in block:
        out["redraft"] = {**block, "wiring": wiring.to_dict(), "convention": convention_name}
        if block["wiring"] != wiring.to_dict():
            out["redraft"]["trained_on"] = block["wiring"]
    return sealed_config(out), ids
