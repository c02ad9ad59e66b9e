"""What a run would be refused for, found before it starts: the plan lists these, the stages raise them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from data_prep.budget import bytes_per_token, free_bytes
from data_prep.prepare import count_supervised, load_prepared
from data_prep.rounds import RoundPlan
from data_prep.store.manifest import TOKEN_BYTES
from eagle3.draft_shape import DraftShape
from eagle3.errors import RedraftError
from eagle3.sizes import size_text
from train.engine import model_dtype
from train.fit import memory_limit, memory_settings, run_memory
from train.front.config import RedraftConfig
from train.front.estimate import Cost, samples_and_tokens
from train.front.rounds import plan_rounds, prepared_lengths
from train.memory import GIB, MemoryPlan, MemorySettings, train_memory

LONGEST = 1 << 20  # rows of a sample that nobody has


@dataclass(frozen=True)
class TrainingFit:
    """Training's memory against what a GPU has.

    Args:
        plan: of the stage that would run; None where none fits.
        limit: bytes a process may take.
        longest: rows of the longest sample whose micro-batch of one still fits.
        refusal: one line, or "".
    """

    plan: MemoryPlan | None
    limit: int
    longest: int
    refusal: str


def planned_settings(config: RedraftConfig, shape: DraftShape) -> MemorySettings:
    """Memory settings of the run on the GPUs that are planned for."""
    cfg = config.train
    world = cfg.nodes * cfg.processes or config.hardware.gpus
    share = cfg.global_batch_size // world or 1
    micro = next(m for m in range(min(cfg.micro_batch_size, share), 0, -1) if share % m == 0)
    dtype = model_dtype(cfg.dtype if cfg.dtype != "auto" else "bfloat16", torch.device("cpu"))
    rows = micro * longest_sample(config)[0]
    times = share // micro
    return memory_settings(cfg, shape, world=world, rows=rows, accumulation=times, dtype=dtype, cuda=True)


def longest_sample(config: RedraftConfig) -> tuple[int, str]:
    """Tokens of the longest sample, and which it is: of the prepared ones, or what the settings allow."""
    prepared = Path(config.paths.prepared)
    if not (prepared / "manifest.json").exists():
        return config.data.max_length, "data.max_length"
    rows = load_prepared(prepared, "train")
    lengths = prepared_lengths(prepared, "train")
    place = int(np.argmax(lengths))
    return lengths[place], f"record {rows[place]['record_id']}"


def training_fit(config: RedraftConfig, shape: DraftShape) -> TrainingFit:
    """Whether training fits, at which ZeRO stage, and up to which length."""
    settings = planned_settings(config, shape)
    cfg = config.train
    gib = cfg.gpu_memory_gib or config.hardware.gpu_memory_gib
    limit = memory_limit(replace(cfg, gpu_memory_gib=gib), torch.device("cpu"))
    try:
        plan = run_memory(cfg, shape, settings, limit)
    except RedraftError as err:
        return TrainingFit(None, limit, longest_that_fits(shape, settings, limit), str(err))
    longest = longest_that_fits(shape, plan.settings, limit)
    refusal = ""
    if plan.peak > limit:
        refusal = (
            f"train: ZeRO stage {plan.settings.stage} needs {plan.peak / GIB:.1f} GiB a process, {limit / GIB:.1f} of "
            f"{gib:g} GiB are allowed: set train.zero_stage=-1, or train.activation_checkpointing=step"
        )
    return TrainingFit(plan, limit, longest, refusal)


def longest_that_fits(shape: DraftShape, settings: MemorySettings, limit: int) -> int:
    """Rows of the longest single sample whose training fits `limit` bytes."""
    low, high = 0, LONGEST
    while low < high:
        middle = (low + high + 1) // 2
        fits = train_memory(shape, replace(settings, rows=middle)).peak <= limit
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def estimated_rounds(config: RedraftConfig) -> tuple[RoundPlan | None, str]:
    """The rounds that `disk_budget` leads to, and why it cannot be kept ("" when it can)."""
    prepared = Path(config.paths.prepared)
    try:
        if (prepared / "manifest.json").exists():
            return plan_rounds(config, prepared_lengths(prepared, "train"), prepared_lengths(prepared, "val")), ""
        samples, _, _ = samples_and_tokens(config)
        held_out = round(samples * config.data.val_fraction)
        length = config.data.max_length
        return plan_rounds(config, [length] * (samples - held_out), [length] * held_out), ""
    except RedraftError as err:
        return None, str(err)


def disk_refusals(config: RedraftConfig, costs: list[Cost], rounds: RoundPlan | None) -> list[str]:
    """Stages whose bytes the disk does not have free."""
    found = []
    store = next((cost for cost in costs if cost.stage == "extract"), None)
    if store is not None and "://" not in config.paths.store:
        need, free = rounds.peak_bytes if rounds else store.high, free_bytes(Path(config.paths.store))
        if need > free:
            found.append(
                f"extract: {size_text(need)} of hidden states, {size_text(free)} free at {config.paths.store}: "
                f"set disk_budget, store.codec=fp8, paths.store, or fewer or shorter samples"
            )
    rest = sum(cost.high for cost in costs if cost.stage in ("train", "export"))
    free = free_bytes(Path(config.run_dir))
    if rest > free:
        found.append(f"train: {size_text(rest)} of checkpoints, {size_text(free)} free at {config.run_dir}")
    return found


def vocabulary_refusals(config: RedraftConfig) -> list[str]:
    """Fewer different supervised tokens than the draft vocabulary has room for."""
    prepared = Path(config.paths.prepared)
    if not (prepared / "manifest.json").exists() or config.draft.warm_start:
        return []
    counts = count_supervised(load_prepared(prepared, "train"), config.target.vocab_size)
    seen, room = int((counts > 0).sum()), config.draft.vocab_size
    full = room == config.target.vocab_size
    if full or seen >= room:
        return []
    return [
        f"draft.vocab_size={room:,}: only {seen:,} different tokens are supervised, the other {room - seen:,} ids "
        "would be filled up with tokens never seen: lower it, or add data"
    ]


def length_refusals(config: RedraftConfig, fit: TrainingFit) -> list[str]:
    """Samples too long for one forward pass of training or of the target."""
    longest, name = longest_sample(config)
    each = bytes_per_token(config.build_wiring(), config.store.codec).high + TOKEN_BYTES
    told = f"{longest:,} tokens = {size_text(longest * each)} of states"
    found = []
    if longest > fit.longest:
        found.append(f"train: {name} has {told}; at most {fit.longest:,} rows fit one GPU")
    if longest > config.capture.batch_tokens:
        found.append(f"extract: {name} has {told}; capture.batch_tokens={config.capture.batch_tokens:,} is less")
    return found


def missing_here(config: RedraftConfig) -> list[str]:
    """What this machine lacks for the whole run."""
    missing = []
    if not (Path(config.target.path) / "config.json").exists() and config.target.maker is None:
        missing.append(f"the target's folder {config.target.path} (config.json, safetensors, tokenizer)")
    missing += [f"the conversations {path} (unless a dataset's name on the hub)" for path in missing_sources(config)]
    python = config.capture.sglang.python
    if config.capture.backend == "sglang" and python and not Path(python).exists():
        missing.append(f"the interpreter that has SGLang, {python} (capture.sglang.python)")
    gpus = torch.cuda.device_count()
    if config.train.processes > 1 and gpus < config.train.processes:
        missing.append(f"GPUs: {gpus} found, {config.train.processes} processes a node asked for")
    return missing


def missing_sources(config: RedraftConfig) -> list[str]:
    """Data that is neither here nor made by a stage of this run."""
    stages = set(config.stages) if set(config.stages) != {"plan"} else {"select"} if config.select.sources else set()
    if "select" in stages or "regenerate" in stages:
        paths = [source.path for source in config.select.sources] if "select" in stages else [config.regenerate.source]
    else:
        paths = list(config.data.sources)
    return [path for path in paths if path and not Path(path).exists()]
