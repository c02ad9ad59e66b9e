"""`stages=[plan]`: what the run would do and cost, and what is missing here. Loads no weights."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from data_prep.budget import bytes_per_token
from data_prep.rounds import RoundPlan
from eagle3.atomic import write_json
from eagle3.config import STATE_CODECS
from eagle3.conventions import CONVENTIONS
from eagle3.draft_shape import DraftShape
from eagle3.errors import WiringError
from eagle3.sizes import size_text
from eagle3.target_weights import TargetWeights
from eagle3.wiring import Wiring
from train.front.config import RedraftConfig
from train.front.console import console
from train.front.draft_shape import declared_shape, target_shape
from train.front.estimate import Cost, measured_rates, published_hours, samples_and_tokens, stage_costs
from train.front.refusals import (
    TrainingFit,
    disk_refusals,
    estimated_rounds,
    length_refusals,
    longest_sample,
    missing_here,
    training_fit,
    vocabulary_refusals,
)
from train.memory import GIB, PHASES, trained_parameters


@dataclass(frozen=True)
class Plan:
    """Everything that is printed."""

    shape: DraftShape
    costs: list[Cost]
    rates: str
    fit: TrainingFit
    rounds: RoundPlan | None
    refusals: list[str]
    missing: list[str]


def draft_of(config: RedraftConfig) -> DraftShape:
    """The run's draft; sizes that the config leaves open are the target's, when it is here."""
    here = (Path(config.target.path) / "config.json").exists()
    return target_shape(config, TargetWeights(Path(config.target.path))) if here else declared_shape(config)


def make_plan(config: RedraftConfig) -> Plan:
    """Reckon everything; reads only small files."""
    shape = draft_of(config)
    rates = measured_rates(config)
    costs = stage_costs(config, shape, rates)
    fit = training_fit(config, shape)
    rounds, broken = estimated_rounds(config)
    refusals = [line for line in (fit.refusal, broken) if line]
    refusals += disk_refusals(config, costs, rounds) + length_refusals(config, fit) + vocabulary_refusals(config)
    return Plan(shape, costs, rates.source, fit, rounds, refusals, missing_here(config))


def plan(config: RedraftConfig) -> None:
    """Print the plan; write it as JSON where that is asked for."""
    made = make_plan(config)
    console.print(run_table(config, made))
    console.print(cost_table(config, made))
    if made.rounds is not None:
        console.print(rounds_table(made.rounds))
    if made.fit.plan is not None:
        console.print("", memory_table(config, made.fit), sep="\n")
    console.print("", ids_table(config.build_wiring()), sep="\n")
    for line in made.refusals:
        console.print(f"  [red]would be refused[/]: {escape(line)}", markup=True)
    for line in made.missing:
        console.print(f"  [yellow]missing here[/]: {escape(line)}", markup=True)
    if not made.refusals and not made.missing:
        console.print("  nothing is missing here, nothing would be refused")
    if config.plan_json:
        write_json(Path(config.plan_json), as_json(config, made))
        console.print(f"  written: {config.plan_json}")


def _table(title: str, *headings: str) -> Table:
    table = Table(*headings, title=title, title_justify="left", box=box.SIMPLE_HEAD, show_header=bool(headings))
    table.pad_edge = False
    return table


def run_table(config: RedraftConfig, made: Plan) -> Table:
    """What the run is."""
    wiring, shape, machine = config.build_wiring(), made.shape, config.hardware
    trained, frozen = sum(trained_parameters(shape).values()), shape.vocab_size * shape.hidden_size
    table = _table(f"Plan for {config.name}")
    table.add_row("target", f"{config.target.name} ({config.target.model_type}, {wiring.num_layers} layers)")
    table.add_row("aux sites, slot 0 first", " | ".join(site.words for site in wiring.aux))
    table.add_row("teacher", wiring.teacher)
    table.add_row("feature width", f"{len(wiring.aux)} x {wiring.hidden_size} = {wiring.feature_width}")
    vocabulary = f"{shape.draft_vocab_size:,} of {shape.vocab_size:,} tokens"
    table.add_row("draft", f"{shape.kind}, {trained:,} trained parameters, {vocabulary}")
    table.add_row("", f"{frozen:,} frozen (the target's embedding)")
    table.add_row(
        "hardware", f"{machine.nodes} x {machine.gpus_per_node} {machine.name}, {machine.gpu_memory_gib:g} GiB"
    )
    longest, name = longest_sample(config)
    table.add_row("longest sample", f"{longest:,} tokens ({name}); training fits up to {made.fit.longest:,}")
    return table


def store_lines(config: RedraftConfig) -> list[str]:
    """What a token's hidden states take under each codec; raw is the figure that others publish."""
    wiring = config.build_wiring()
    raw = bytes_per_token(wiring, "raw")
    lines = [f"hidden states, raw: {raw.formula} = {raw.high:,} B a token"]
    if config.target.model_type == "kimi_k25":
        tokens = 100_000 * 2_048
        lines[0] += f" (published: 57,344); {tokens:,} tokens = {size_text(tokens * raw.high)} (published: 11.7 TB)"
    sizes = {codec: bytes_per_token(wiring, codec) for codec in STATE_CODECS if codec != "raw"}
    said = (
        f"{codec} {one.low:,}" + ("" if one.low == one.high else f" to {one.high:,}") for codec, one in sizes.items()
    )
    return [*lines, f"store.codec: {', '.join(said)} B a token"]


def cost_table(config: RedraftConfig, made: Plan) -> Table:
    """Bytes and hours of each stage, with the arithmetic; below it what was published for comparison."""
    table = _table("Cost", "stage", "on disk", "hours", "how it comes about")
    for cost in made.costs:
        ends = [size_text(cost.low), size_text(cost.high)]
        size = ends[1] if cost.low == cost.high else f"{ends[0]} to\n{ends[1]}" if cost.low else f"up to\n{ends[1]}"
        hours = "" if cost.hours is None else f"{cost.hours:.2f}"
        table.add_row(cost.stage, size, hours, f"bytes: {cost.size}\nhours: {cost.time}")
    total = sum(cost.hours or 0 for cost in made.costs if cost.stage in ("extract", "train"))
    lines = [
        f"extract + train: {total:.2f} h x {config.hardware.gpus} GPUs = {total * config.hardware.gpus:.1f} GPU-hours"
    ]
    lines += store_lines(config)
    if config.target.model_type == "kimi_k25":
        known, said = published_hours(samples_and_tokens(config)[1])
        lines.append(f"published: {said} = {known:.1f}")
    lines.append(
        f"rates measured in {made.rates}" if made.rates else "rates assumed (hardware.*): a run's own replace them"
    )
    table.caption, table.caption_justify = "\n".join(lines), "left"
    return table


def rounds_table(rounds: RoundPlan) -> Table:
    """How extraction and training alternate under `disk_budget`."""
    table = _table(f"Rounds within {size_text(rounds.budget)}", "round", "steps", "records", "at most on disk")
    shown = range(len(rounds.rounds)) if len(rounds.rounds) <= 6 else [0, 1, 2, len(rounds.rounds) - 1]
    for number in shown:
        one = rounds.rounds[number]
        steps = f"{one.first + 1:,} to {one.last:,}"
        table.add_row(
            f"{number + 1} of {len(rounds.rounds)}", steps, f"{len(one.records):,}", size_text(one.peak_bytes)
        )
    table.caption, table.caption_justify = (
        f"tokens computed in all {rounds.computed_tokens:,}, of {rounds.whole_tokens:,} at once",
        "left",
    )
    return table


def memory_table(config: RedraftConfig, fit: TrainingFit) -> Table:
    """What one training process holds, in the phase of its peak."""
    assert fit.plan is not None
    made, s = fit.plan, fit.plan.settings
    chosen = " (chosen)" if config.train.zero_stage < 0 else ""
    title = f"GPU memory of one of {s.world} training processes, ZeRO stage {s.stage}{chosen}"
    table = _table(title, "GB", "what", f"in the {made.fullest}")
    for part in sorted((p for p in made.parts if made.fullest in p.phases), key=lambda p: -p.size):
        if part.size >= made.peak / 1000:
            table.add_row(f"{part.size / 1e9:.2f}", part.name, part.formula)
    phases = ", ".join(f"{name} {made.phase(name) / GIB:.1f}" for name in PHASES)
    lines = [
        f"peak {made.peak / 1e9:.2f} GB = {made.peak / GIB:.1f} GiB of {fit.limit / GIB:.1f} allowed "
        f"({config.train.memory_margin:.0%} left free)",
        f"GiB by phase: {phases}",
    ]
    if made.host:
        lines.append(f"in the host's memory, a process: {made.host / GIB:.1f} GiB")
    table.caption, table.caption_justify = "\n".join(lines), "left"
    return table


def ids_table(wiring: Wiring) -> Table:
    """The wiring as each engine's ids."""
    table = _table("Wiring, by engine", "engine convention", "ids that mean this wiring")
    for name, convention in CONVENTIONS.items():
        try:
            ids = str(convention.render(wiring))
        except WiringError as err:
            ids = f"cannot express it: {err.why or err.what}"
        table.add_row(name, ids)
    return table


def as_json(config: RedraftConfig, made: Plan) -> dict[str, Any]:
    """The plan's numbers, for programs."""
    memory = made.fit.plan
    return {
        "name": config.name,
        "hardware": asdict(config.hardware),
        "trained_parameters": sum(trained_parameters(made.shape).values()),
        "costs": [asdict(cost) for cost in made.costs],
        "rates": made.rates,
        "memory": memory
        and {
            "zero_stage": memory.settings.stage,
            "peak": memory.peak,
            "fullest": memory.fullest,
            "limit": made.fit.limit,
            "longest_rows": made.fit.longest,
            "parts": [asdict(part) for part in memory.parts],
        },
        "rounds": made.rounds
        and {
            "count": len(made.rounds.rounds),
            "peak_bytes": made.rounds.peak_bytes,
            "computed_tokens": made.rounds.computed_tokens,
        },
        "refusals": made.refusals,
        "missing": made.missing,
    }
