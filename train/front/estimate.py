"""What each stage of a run costs in bytes and hours, as formulas with their numbers. Loads and writes nothing large."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from data_prep.budget import bytes_per_token
from data_prep.store.manifest import TOKEN_BYTES
from eagle3.atomic import read_json
from eagle3.draft_shape import DraftShape
from eagle3.errors import RedraftError
from eagle3.place import Place, store_place
from train.front.config import RedraftConfig
from train.memory import WORD_READERS, trained_parameters
from train.metrics import read_metrics

ANSWER_SHARE = 0.5  # of regenerate.max_tokens, taken as the mean answer
TEXT_BYTES = 8  # a token's bytes in JSON lines, its id kept beside its text
CHECKPOINT_BYTES = 14  # a trained parameter's in a checkpoint: weight, float32 master weight, two moments
# Published for Kimi-K2.5 (docs/kimi_k25.md): what a plan's hours can be held against.
PUBLISHED_TOKENS, PUBLISHED_GPU_HOURS = 6e9, 1500.0


@dataclass(frozen=True)
class Cost:
    """One stage's cost.

    Args:
        stage: its name.
        low, high: bytes it leaves on disk.
        size: how the bytes come about.
        hours: wall time over all nodes; None when it is not estimated.
        time: how the hours come about.
    """

    stage: str
    low: int
    high: int
    size: str
    hours: float | None
    time: str


@dataclass(frozen=True)
class Rates:
    """Tokens a second over all GPUs, and where the figure is from.

    Args:
        extract, train: tokens a second; 0 = unknown.
        source: what measured them.
    """

    extract: float = 0.0
    train: float = 0.0
    source: str = ""


def samples_and_tokens(config: RedraftConfig) -> tuple[int, int, str]:
    """Conversations and tokens of the run: the prepared ones, or as many as the settings allow."""
    manifest = Path(config.paths.prepared) / "manifest.json"
    if manifest.exists():
        counts = read_json(manifest)["counts"]
        records = sum(counts[split]["records"] for split in ("train", "val"))
        tokens = sum(counts[split]["tokens"] for split in ("train", "val"))
        return records, tokens, f"{records:,} prepared records"
    samples = config.data.max_samples or config.select.total
    return samples, samples * config.data.max_length, f"{samples:,} samples x {config.data.max_length:,}, at most"


def measured_rates(config: RedraftConfig) -> Rates:
    """Rates of an earlier run: of the folder named, else of this run's own."""
    folder = Path(config.hardware.measured or config.run_dir)
    train = _training_rate(folder / "train" / "metrics.jsonl")
    store = store_place(config.paths.store) if not config.hardware.measured else folder / "store"
    extract = _extraction_rate(store / "stage.json")
    if config.hardware.measured and not (train or extract):
        raise RedraftError(
            "no rates were measured there",
            where=f"hardware.measured={folder}",
            why="neither store/stage.json nor train/metrics.jsonl has any",
            mend="name the folder of a run that extracted or trained, or unset it",
        )
    return Rates(extract, train, str(folder) if train or extract else "")


def _training_rate(path: Path) -> float:
    rows = [row for row in read_metrics(path) if row["kind"] == "train"] if path.exists() else []
    rates = [row["tokens"] / row["seconds"] for row in rows if row.get("seconds")]
    return median(rates) if rates else 0.0


def _extraction_rate(path: Place) -> float:
    told: dict[str, Any] = read_json(path) if path.exists() else {}
    return told.get("captured", 0) / told["seconds"] if told.get("seconds") else 0.0


def active_parameters(config: RedraftConfig) -> tuple[float, str]:
    """The target's parameters that work on a token: as declared, or those of a dense transformer of its sizes."""
    declared = config.target.active_parameters_b
    if declared:
        return declared * 1e9, f"{declared:g}e9 active"
    guess = 12.0 * config.target.num_layers * config.target.hidden_size**2
    return guess, f"12 x L x H^2 = {guess / 1e9:.1f}e9"


def flops_per_token(shape: DraftShape, steps: int) -> tuple[float, str]:
    """Training FLOPs a supervised token: products forward and backward of K passes of the layer and the head.

    `6 (once + K (layer + head)) + 2 V H`: two for a product forward, four backward; the teacher's head runs forward
    only. `once`: `fc`, and the words' half of the projections that read words beside states, computed once for all K
    passes. Attention's products are left out: at 4,096 tokens they are under a tenth.
    """
    sizes = trained_parameters(shape)
    head = sizes["lm_head.weight"]
    once = sizes["fc.weight"] + sum(size // 2 for name, size in sizes.items() if name.split(".")[-2] in WORD_READERS)
    layer = sum(sizes.values()) - head - once
    teacher = shape.vocab_size * shape.hidden_size
    total = 6.0 * (once + steps * (layer + head)) + 2.0 * teacher
    text = f"6 x ({once / 1e6:.0f}M + {steps} x ({layer / 1e6:.0f}M + {head / 1e6:.0f}M)) + 2 x {teacher / 1e6:.0f}M"
    return total, f"{text} = {total / 1e9:.1f} GFLOP"


def stage_costs(config: RedraftConfig, shape: DraftShape, rates: Rates) -> list[Cost]:
    """Every stage asked for, in order."""
    _, tokens, counted = samples_and_tokens(config)
    makers = {
        "select": lambda: _select(config),
        "regenerate": lambda: _regenerate(config),
        "prepare": lambda: Cost("prepare", 0, tokens * TOKEN_BYTES * 2, f"{tokens:,} tokens x 10", None, "CPUs only"),
        "extract": lambda: _extract(config, tokens, counted, rates),
        "train": lambda: _train(config, shape, tokens, rates),
        "export": lambda: _export(config, shape),
    }
    wanted = [name for name in makers if name in config.stages or set(config.stages) == {"plan"}]
    return [makers[name]() for name in wanted if name not in ("select", "regenerate") or config.select.sources]


def _select(config: RedraftConfig) -> Cost:
    bound = config.select.max_tokens or config.data.max_length
    size = config.select.total * bound * TEXT_BYTES
    return Cost("select", 0, size, f"{config.select.total:,} x {bound:,} x {TEXT_BYTES}, at most", None, "CPUs only")


def _regenerate(config: RedraftConfig) -> Cost:
    machine, answers = config.hardware, config.select.total
    tokens = answers * config.regenerate.max_tokens * ANSWER_SHARE
    rate = machine.decode_tokens_s * machine.nodes
    size = int(answers * config.data.max_length * TEXT_BYTES)
    text = f"{answers:,} x {config.regenerate.max_tokens:,} x {ANSWER_SHARE:g} / ({machine.decode_tokens_s:,.0f}/s x "
    return Cost(
        "regenerate",
        0,
        size,
        f"{answers:,} x {config.data.max_length:,} x {TEXT_BYTES}, at most",
        tokens / rate / 3600,
        f"{text}{machine.nodes} node(s))",
    )


def _extract(config: RedraftConfig, tokens: int, counted: str, rates: Rates) -> Cost:
    machine, each = config.hardware, bytes_per_token(config.build_wiring(), config.store.codec)
    low, high = tokens * (each.low + TOKEN_BYTES), tokens * (each.high + TOKEN_BYTES)
    size = f"{counted}: {tokens:,} x ({each.formula} + {TOKEN_BYTES})"
    if rates.extract:
        return Cost(
            "extract", low, high, size, tokens / rates.extract / 3600, f"{rates.extract:,.0f} tokens/s measured"
        )
    active, said = active_parameters(config)
    speed = machine.gpus * machine.gpu_tflops * 1e12 * machine.prefill_mfu
    compute, disk = 2 * active * tokens / speed / 3600, high / (machine.disk_write_gbps * 1e9 * machine.nodes) / 3600
    time = (
        f"more of 2 x {said} x {tokens:,} / ({machine.gpus} x {machine.gpu_tflops:g}e12 x {machine.prefill_mfu:g}) = "
        f"{compute:.2f} h, disk at {machine.disk_write_gbps:g} GB/s a node = {disk:.2f} h"
    )
    return Cost("extract", low, high, size, max(compute, disk), time)


def _train(config: RedraftConfig, shape: DraftShape, tokens: int, rates: Rates) -> Cost:
    machine, cfg = config.hardware, config.train
    count = sum(trained_parameters(shape).values())
    kept = cfg.keep_checkpoints * CHECKPOINT_BYTES * count
    size = f"{cfg.keep_checkpoints} checkpoints x {CHECKPOINT_BYTES} x {count:,}"
    trained = tokens * cfg.epochs * (1 - config.data.val_fraction)
    if rates.train:
        return Cost("train", kept, kept, size, trained / rates.train / 3600, f"{rates.train:,.0f} tokens/s measured")
    gpus = cfg.nodes * cfg.processes or machine.gpus
    each, said = flops_per_token(shape, cfg.ttt_steps)
    compute = each * trained / (gpus * machine.gpu_tflops * 1e12 * machine.train_mfu) / 3600
    stored = bytes_per_token(config.build_wiring(), config.store.codec).high + TOKEN_BYTES
    disk = trained * stored / (machine.disk_read_gbps * 1e9 * cfg.nodes) / 3600
    time = (
        f"more of {trained:,.0f} x ({said}) / ({gpus} x {machine.gpu_tflops:g}e12 x {machine.train_mfu:g}) = "
        f"{compute:.2f} h, disk at {machine.disk_read_gbps:g} GB/s a node = {disk:.2f} h"
    )
    return Cost("train", kept, kept, size, max(compute, disk), time)


def _export(config: RedraftConfig, shape: DraftShape) -> Cost:
    each = 4 if config.export.dtype == "float32" else 2
    count = sum(trained_parameters(shape).values())
    count += shape.vocab_size * shape.hidden_size if config.export.with_embedding else 0
    size = count * each + 9 * shape.vocab_size
    return Cost("export", size, size, f"{count:,} x {each}", None, "minutes")


def published_hours(tokens: int) -> tuple[float, str]:
    """GPU hours that the published Kimi-K2.5 run would take for so many tokens."""
    hours = PUBLISHED_GPU_HOURS * tokens / PUBLISHED_TOKENS
    return hours, f"{PUBLISHED_GPU_HOURS:,.0f} H200-hours / {PUBLISHED_TOKENS / 1e9:g}e9 tokens x {tokens:,}"
