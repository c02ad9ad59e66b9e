"""`stages=[plan]`: what the run would do and cost, and what is missing here. Loads no weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from rich.table import Table

from data_prep.budget import bytes_per_token
from eagle3.conventions import CONVENTIONS
from eagle3.draft import DraftShape, Eagle3Draft
from eagle3.errors import WiringError
from eagle3.wiring import Wiring
from train.front.config import RedraftConfig
from train.front.console import console, size_text
from train.front.draft_shape import declared_shape

SHOWN_CONVENTIONS = ("sglang-0.5.9", "sglang-0.5.23", "vllm", "specforge", "speculators", "hf")


def draft_parameters(shape: DraftShape) -> tuple[int, int]:
    """Trained and frozen (embedding) parameters of a draft of this shape."""
    with torch.device("meta"):
        draft = Eagle3Draft(shape)
    trained = sum(p.numel() for p in draft.parameters() if p.requires_grad)
    return trained, sum(p.numel() for p in draft.parameters()) - trained


def ids_table(wiring: Wiring) -> Table:
    """The wiring as each engine's ids."""
    table = Table("engine convention", "ids that mean this wiring", title="Wiring, by engine", title_justify="left")
    for name in SHOWN_CONVENTIONS:
        try:
            ids = str(CONVENTIONS[name].render(wiring))
        except WiringError as err:
            ids = f"cannot express it: {err.why or err.what}"
        table.add_row(name, ids)
    return table


def missing_here(config: RedraftConfig) -> list[str]:
    """What this machine lacks for the whole run."""
    missing = []
    if not (Path(config.target.path) / "config.json").exists() and config.target.maker is None:
        missing.append(f"the target's folder {config.target.path} (config.json, safetensors, tokenizer)")
    for source in config.data.sources:
        if not Path(source).exists():
            missing.append(f"the conversations {source} (unless it is the name of a dataset on the hub)")
    gpus = torch.cuda.device_count()
    if config.train.processes > 1 and gpus < config.train.processes:
        missing.append(f"GPUs: {gpus} found, {config.train.processes} processes asked for")
    need, free = store_bytes(config), shutil.disk_usage(".").free
    if need > free:
        missing.append(f"disk: the store needs up to {size_text(need)}, {size_text(free)} are free here")
    return missing


def store_bytes(config: RedraftConfig) -> int:
    """Upper bound of the store's size: every sample at `data.max_length` tokens."""
    tokens = config.data.max_samples * config.data.max_length
    return tokens * bytes_per_token(config.build_wiring())


def plan(config: RedraftConfig) -> None:
    """Print the plan."""
    wiring = config.build_wiring()
    shape = declared_shape(config)
    trained, frozen = draft_parameters(shape)
    per_token = bytes_per_token(wiring)
    table = Table(show_header=False, title=f"Plan for {config.name}", title_justify="left")
    table.add_row("target", f"{config.target.name} ({config.target.model_type}, {wiring.num_layers} layers)")
    table.add_row("aux sites, slot 0 first", " | ".join(site.words for site in wiring.aux))
    table.add_row("teacher", wiring.teacher)
    table.add_row("feature width", f"{len(wiring.aux)} x {wiring.hidden_size} = {wiring.feature_width}")
    table.add_row("draft parameters", f"{trained:,} trained + {frozen:,} frozen (the target's embedding)")
    table.add_row("store, bytes a token", f"{len(wiring.stored_sites) + 1} x {wiring.hidden_size} x 2 = {per_token:,}")
    if config.data.max_samples:
        count = f"{config.data.max_samples:,} samples of at most {config.data.max_length:,} tokens"
        table.add_row("store, at most", f"{size_text(store_bytes(config))} for {count}")
    console.print(table)
    console.print(ids_table(wiring))
    missing = missing_here(config)
    for line in missing:
        console.print(f"  [yellow]missing here[/]: {line}")
    console.print("" if missing else "  nothing is missing here")
