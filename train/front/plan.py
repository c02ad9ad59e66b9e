"""`stages=[plan]`: what the run would do and cost, and what is missing here. Loads no weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from rich.table import Table

from data_prep.budget import DraftBudget, draft_budget, free_bytes, state_bytes_per_token
from eagle3.conventions import CONVENTIONS
from eagle3.errors import WiringError
from eagle3.target_weights import TargetWeights
from eagle3.wiring import Wiring
from train.front.config import RedraftConfig
from train.front.console import console, size_text
from train.front.draft_shape import declared_shape, target_shape


def draft_of(config: RedraftConfig) -> DraftBudget:
    """Parameters of the run's draft; sizes that the config leaves open are the target's, when it is here."""
    here = (Path(config.target.path) / "config.json").exists()
    shape = target_shape(config, TargetWeights(Path(config.target.path))) if here else declared_shape(config)
    sizes = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    filled = replace(config.draft, **{name: getattr(shape, name) for name in sizes})
    return draft_budget(config.build_wiring(), filled, config.target.vocab_size)


def ids_table(wiring: Wiring) -> Table:
    """The wiring as each engine's ids."""
    table = Table("engine convention", "ids that mean this wiring", title="Wiring, by engine", title_justify="left")
    for name, convention in CONVENTIONS.items():
        try:
            ids = str(convention.render(wiring))
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
    python = config.capture.sglang.python
    if config.capture.backend == "sglang" and python and not Path(python).exists():
        missing.append(f"the interpreter that has SGLang, {python} (capture.sglang.python)")
    gpus = torch.cuda.device_count()
    if config.train.processes > 1 and gpus < config.train.processes:
        missing.append(f"GPUs: {gpus} found, {config.train.processes} processes asked for")
    need, free = store_bytes(config), free_bytes(Path(config.paths.store))
    if need > free:
        missing.append(f"disk: the store needs up to {size_text(need)}, {size_text(free)} are free there")
    return missing


def store_bytes(config: RedraftConfig) -> int:
    """Upper bound of the store's size: every sample at `data.max_length` tokens."""
    tokens = config.data.max_samples * config.data.max_length
    return tokens * state_bytes_per_token(config.build_wiring())


def plan(config: RedraftConfig) -> None:
    """Print the plan."""
    wiring = config.build_wiring()
    draft = draft_of(config)
    per_token = state_bytes_per_token(wiring)
    table = Table(show_header=False, title=f"Plan for {config.name}", title_justify="left")
    table.add_row("target", f"{config.target.name} ({config.target.model_type}, {wiring.num_layers} layers)")
    table.add_row("aux sites, slot 0 first", " | ".join(site.words for site in wiring.aux))
    table.add_row("teacher", wiring.teacher)
    table.add_row("feature width", f"{len(wiring.aux)} x {wiring.hidden_size} = {wiring.feature_width}")
    table.add_row("draft parameters", f"{draft.trained:,} trained + {draft.frozen:,} frozen (the target's embedding)")
    table.add_row("weights, gradients, Adam", f"{size_text(draft.training_bytes)} over all processes, ZeRO 1 to 3")
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
