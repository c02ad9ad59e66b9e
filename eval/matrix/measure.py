"""The measured half: serve the cell's ids on the build itself and count what the server accepts.

A cell that the computed half calls refused is served all the same, ids as written, to see the build refuse it.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from eagle3.errors import RedraftError
from eagle3.sglang_tree import read_tree
from eagle3.sglang_tree.patch import apply
from eagle3.wiring import Wiring
from eval.engines.base import Ask, Generation, Session
from eval.engines.server_config import ServerConfig
from eval.engines.sglang import SGLangEngine
from eval.matrix.cells import Cell
from eval.results import prompt_result, summarize


@dataclass(frozen=True)
class Measured:
    """What the build did with the cell's ids.

    Args:
        key: the cell.
        tau: accept length; None where the server refused or stopped.
        low, high: 95% interval over prompts.
        verifies: verify steps behind it.
        tokens: every text's ids, in the order of the prompts, to compare cells.
        same_as_plain: how many texts are token for token those of plain decoding.
        said: the line of a server that did not serve.
    """

    key: str
    tau: float | None
    low: float = 0.0
    high: float = 0.0
    verifies: int = 0
    tokens: tuple[tuple[int, ...], ...] = ()
    same_as_plain: int = 0
    said: str = ""


@dataclass(frozen=True)
class Setting:
    """What every cell is measured with."""

    target: Path
    prompts: Sequence[Ask]
    num_steps: int
    max_new_tokens: int
    work_dir: Path
    concurrency: int = 1


def patched_copy(tree: Path, work_dir: Path) -> Path:
    """A copy of an installed SGLang with the embedding patch applied; its parent goes on PYTHONPATH.

    Raises:
        RedraftError: the tree is not one that the patch knows.
    """
    copy = work_dir / "patched" / "sglang"
    if not copy.exists():
        shutil.copytree(tree, copy.with_name("sglang.tmp"), dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.pyc"))
        copy.with_name("sglang.tmp").rename(copy)
    apply(read_tree(copy))
    return copy


def with_tree(cfg: ServerConfig, tree: Path) -> ServerConfig:
    """The same server, its SGLang taken from `tree`."""
    path = [str(tree.parent), cfg.env.get("PYTHONPATH", "")]
    return replace(cfg, env={**cfg.env, "PYTHONPATH": ":".join(part for part in path if part)})


def measure_plain(setting: Setting, draft: Path, trained: Wiring, cfg: ServerConfig) -> list[list[int]]:
    """Every prompt's text without a draft (`draft`, a served folder, is not loaded)."""
    engine = SGLangEngine(setting.target, draft, trained, setting.num_steps, cfg, setting.work_dir)
    with engine.serve(None) as session:
        return [list(made.tokens) for made in _run(session, setting)]


def measure_cell(setting: Setting, draft: Path, cell: Cell, cfg: ServerConfig, plain: list[list[int]]) -> Measured:
    """Serve the folder `draft` with `cell.ids` and measure."""
    engine = SGLangEngine(setting.target, draft, cell.trained, setting.num_steps, cfg, setting.work_dir, ids=cell.ids)
    try:
        with engine.serve(cell.fed or cell.trained) as session:
            return _measured(session, setting, cell, plain)
    except RedraftError as err:
        return Measured(cell.key, None, said=f"{err.what}: {err.why}")


def _measured(session: Session, setting: Setting, cell: Cell, plain: list[list[int]]) -> Measured:
    made = _run(session, setting)
    rows = [prompt_result(ask.id, one, None) for ask, one in zip(setting.prompts, made, strict=True)]
    total = summarize(cell.key, rows)
    same = sum(list(one.tokens) == text for one, text in zip(made, plain, strict=True))
    texts = tuple(tuple(one.tokens) for one in made)
    return Measured(cell.key, total.tau, total.tau_low, total.tau_high, total.verifies, texts, same)


def _run(session: Session, setting: Setting) -> list[Generation]:
    batch = session.run(
        setting.prompts,
        max_new_tokens=setting.max_new_tokens,
        temperature=0.0,
        concurrency=setting.concurrency,
    )
    if batch.failures:
        name, why = next(iter(batch.failures.items()))
        raise RedraftError(
            f"{len(batch.failures)} prompts failed", why=f"first {name}: {why}", mend="read the server's log"
        )
    return [made for made in batch.generations if made is not None]
