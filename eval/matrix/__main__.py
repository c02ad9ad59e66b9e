"""Which draft works on which SGLang with which ids: `python -m eval.matrix RUN_NATIVE RUN_EMBEDDING --out FOLDER`.

Each run is a folder made by train/run.py whose config says how to start a server (eval.server). The table is computed
from the wirings for every build whose reading of ids is known, and measured on the installed SGLang as it is and on a
patched copy of it. A finished cell is kept in FOLDER/matrix.json and not measured again.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import AutoTokenizer

from eagle3.atomic import read_json, sha256_file, write_json, write_text
from eagle3.checkpoint import CONFIG, WEIGHTS, served_wiring
from eagle3.command_line import Parser, one_line_errors
from eagle3.errors import ConfigError
from eagle3.redact import hidden_words
from eagle3.wiring import Wiring
from eval.engines.base import Ask
from eval.engines.server_config import ServerConfig
from eval.engines.sglang_build import choose_convention, find_build
from eval.matrix.cells import Cell, matrix
from eval.matrix.measure import Measured, Setting, measure_cell, measure_plain, patched_copy, with_tree
from eval.matrix.page import matrix_page
from eval.matrix.table import consequences, disagreements, outcome, report, rule
from eval.prompts import encode_prompt, read_prompt_sets


@one_line_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; 0 = every measured cell did what its wiring says, 1 = one did not, 2 = bad input."""
    parser = Parser(
        prog="python -m eval.matrix",
        description=__doc__,
        examples="""
        python -m eval.matrix runs/matrix_native runs/matrix_embedding --out runs/matrix
        python -m eval.matrix runs/matrix_native --only-computed
        """,
    )
    parser.add_argument("runs", nargs="+", type=Path, help="run folders; the folder's name names the draft")
    parser.add_argument("--out", type=Path, default=Path("runs/matrix"), help="results and logs (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=0, help="per text; 0 = the first run's setting")
    parser.add_argument("--only-computed", action="store_true", help="start no server")
    chosen = parser.parse_args(arguments)
    return _main(chosen, Console())


def _main(chosen: argparse.Namespace, console: Console) -> int:
    drafts = {run.name: run / "served" for run in chosen.runs}
    wirings = {name: _trained(draft) for name, draft in drafts.items()}
    cells = matrix(wirings)
    measured: dict[str, Measured] = {}
    builds: dict[str, str] = {}
    if not chosen.only_computed:
        config = _config(chosen.runs[0])
        setting, cfg = _setting(config, chosen), _server(config)
        builds, measured = _measure(cells, drafts, wirings, setting, cfg, console)
    text, agrees = report(cells, measured, builds, console)
    chosen.out.mkdir(parents=True, exist_ok=True)
    write_text(chosen.out / "matrix.txt", text)
    command = "python -m eval.matrix " + shlex.join(hidden_words(sys.argv[1:]))
    lines, problems = consequences(cells, measured, builds), disagreements(cells, measured)
    write_text(chosen.out / "matrix.html", matrix_page(cells, measured, lines, problems, [command]))
    console.print(f"report: {chosen.out / 'matrix.html'} (and matrix.txt beside it)", markup=False, soft_wrap=True)
    return 0 if agrees else 1


def _trained(folder: Path) -> Wiring:
    found = served_wiring(read_json(folder / CONFIG, mend="run the export stage first"), str(folder))
    if found is None:
        raise ConfigError("the draft names no wiring", where=str(folder), mend="export it with this tool")
    return found


def _config(run: Path) -> Any:
    path = run / "config.yaml"
    if not path.exists():
        raise ConfigError("not a run", where=str(run), why="it has no config.yaml", mend="name folders of train/run.py")
    return OmegaConf.load(path)


def _server(config: Any) -> ServerConfig:
    server: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(ServerConfig), config.eval.server))
    server.validate()
    if server.connects:
        raise ConfigError(
            "the matrix starts its own servers",
            where="eval.server.url",
            why="a running server holds one draft and one set of ids",
            mend="leave it empty and set eval.server.python",
        )
    return server


def _setting(config: Any, chosen: argparse.Namespace) -> Setting:
    target = Path(config.target.path)
    tokenizer = AutoTokenizer.from_pretrained(target, trust_remote_code=config.target.trust_remote_code)
    kwargs = OmegaConf.to_object(config.data.template_kwargs)
    sets = read_prompt_sets(list(config.eval.prompt_sets), config.eval.max_prompts)
    asks = [Ask(f"{one.name}/{p.id}", encode_prompt(tokenizer, p, kwargs)) for one in sets for p in one.prompts]  # type: ignore[arg-type]
    length = chosen.max_new_tokens or config.eval.max_new_tokens
    return Setting(target, asks, config.eval.num_steps, length, chosen.out / "work", max(config.eval.batch_sizes))


def _measure(
    cells: list[Cell],
    drafts: dict[str, Path],
    wirings: dict[str, Wiring],
    setting: Setting,
    cfg: ServerConfig,
    console: Console,
) -> tuple[dict[str, str], dict[str, Measured]]:
    """Measure the cells of the installed build and of its patched copy; the builds' conventions with what they are."""
    setting.work_dir.mkdir(parents=True, exist_ok=True)
    build = find_build(cfg.python or sys.executable, cfg.env, "sglang")
    model_type = next(iter(wirings.values())).model_type
    servers: dict[str, ServerConfig] = {}
    builds: dict[str, str] = {}
    for words, server in (
        ("as installed", cfg),
        ("patched copy", with_tree(cfg, patched_copy(build.tree, setting.work_dir))),
    ):
        found = find_build(server.python or sys.executable, server.env, "sglang")
        name = choose_convention("auto", found.tree, found.version, setting.target, model_type).name
        servers[name], builds[name] = server, f"SGLang {found.version}, {words}"
    todo = [cell for cell in cells if cell.build in servers]
    path = setting.work_dir.parent / "matrix.json"
    kept = _Kept(path, _identity(drafts, setting, builds))
    with _bar(console) as progress:
        task = progress.add_task("cells", total=len(todo) + 1)
        plain = kept.plain or measure_plain(setting, drafts[todo[0].draft], wirings[todo[0].draft], cfg)
        kept.keep_plain(plain)
        progress.advance(task)
        for cell in todo:
            progress.update(task, description=f"{cell.draft}, {rule(cell)}")
            if cell.key not in kept.cells:
                server = servers[cell.build]
                kept.keep(measure_cell(setting, drafts[cell.draft], cell, server, plain))
            progress.console.print(f"{cell.draft}, {rule(cell)}: {outcome(kept.cells[cell.key])}", markup=False)
            progress.advance(task)
    return builds, kept.cells


def _bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console)


def _identity(drafts: dict[str, Path], setting: Setting, builds: dict[str, str]) -> dict[str, Any]:
    return {
        "drafts": {name: sha256_file(folder / WEIGHTS) for name, folder in drafts.items()},
        "prompts": [list(ask.prompt_ids) for ask in setting.prompts],
        "num_steps": setting.num_steps,
        "max_new_tokens": setting.max_new_tokens,
        "target": str(setting.target),
        "builds": builds,
    }


class _Kept:
    """Finished cells on disk, of these very drafts, prompts and builds."""

    def __init__(self, path: Path, identity: dict[str, Any]) -> None:
        self._path, self._identity = path, identity
        self.cells: dict[str, Measured] = {}
        self.plain: list[list[int]] | None = None
        if path.exists():
            data = read_json(path)
            if data.get("identity") == identity:
                self.plain = data["plain"]
                self.cells = {key: _measured_from(value) for key, value in data["cells"].items()}

    def keep_plain(self, plain: list[list[int]]) -> None:
        self.plain = plain
        self._write()

    def keep(self, one: Measured) -> None:
        self.cells[one.key] = one
        self._write()

    def _write(self) -> None:
        cells = {key: vars(one) for key, one in self.cells.items()}
        write_json(self._path, {"identity": self._identity, "plain": self.plain, "cells": cells})


def _measured_from(data: dict[str, Any]) -> Measured:
    return Measured(**{**data, "tokens": tuple(tuple(text) for text in data["tokens"])})


if __name__ == "__main__":
    sys.exit(main())
