"""The measure: accept length and speed of a draft, per prompt set, for each wiring that it may be served with."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from eagle3.conventions import CONVENTIONS, explain
from eagle3.errors import WiringError
from eagle3.wiring import Wiring
from eval.alarm import allowed_gap, find_alarms
from eval.config import EvalConfig
from eval.engines.base import Engine, Generation
from eval.prompts import PromptSet, encode_prompt
from eval.results import AcceptResult, Baseline, PromptResult, Served, SetResult, prompt_result, summarize

SHOWN_CHARACTERS = 600  # of each continuation, kept with the results
WARM_UP_TOKENS = 8
SCALARS = (
    "tau",
    "engine_tau",
    "tokens_per_second",
    "baseline_tokens_per_second",
    "speedup",
    "batch_tokens_per_second",
    "baseline_batch_tokens_per_second",
    "batch_speedup",
    "draft_share",
)


def served_wirings(trained: Wiring, modes: list[str]) -> dict[str, Wiring]:
    """The wiring of each `eval.serve` mode; `native` is left out where it is the trained wiring anyway.

    Raises:
        WiringError: the target is too small to have the engine's default sites.
    """
    wirings: dict[str, Wiring] = {}
    for mode in modes:
        wiring = trained if mode == "matched" else native_wiring(trained)
        if wiring not in wirings.values():
            wirings[mode] = wiring
    return wirings


def native_wiring(trained: Wiring) -> Wiring:
    """What an engine feeds when it is told nothing, on the target of `trained`."""
    return Wiring.native(trained.model_type, trained.num_layers, trained.hidden_size, trained.teacher)


def count_generations(prompt_sets: list[PromptSet], cfg: EvalConfig, trained: Wiring) -> int:
    """How many times `measure` calls `advance`: one a continuation, plain decoding included."""
    each = len(served_wirings(trained, cfg.serve)) + cfg.baseline
    return each * sum(len(one.prompts) for one in prompt_sets)


def measure(
    engine_factory: Callable[[Wiring], Engine],
    prompt_sets: list[PromptSet],
    cfg: EvalConfig,
    *,
    tokenizer: PreTrainedTokenizerBase,
    trained: Wiring,
    title: str = "draft",
    target: str = "",
    draft: str = "",
    predicted_acceptance: list[float] | None = None,
    commands: list[str] | None = None,
    next_commands: list[str] | None = None,
    template_kwargs: dict[str, Any] | None = None,
    advance: Callable[[int], None] | None = None,
    log: Callable[[dict[str, float]], None] | None = None,
) -> AcceptResult:
    """Decode every prompt plainly and with the draft, and pool the counts.

    Each prompt's runs follow one another (plain first), so that a slow moment of the machine touches them alike.
    One short continuation per engine is made beforehand and thrown away.

    Args:
        engine_factory: builds an engine that serves the given wiring; called once per `eval.serve` mode.
        prompt_sets: what to continue.
        cfg: lengths, steps, temperature, seed, modes.
        tokenizer: the target's, with its chat template.
        trained: the wiring that the draft was trained on.
        title: name of the run in reports.
        target: name of the target in reports.
        draft: the served folder, for reports.
        predicted_acceptance: per-step conditional accuracies on validation data, for the predicted accept length.
        commands: exact commands, for the report.
        next_commands: what an alarm tells to run next.
        template_kwargs: extra keyword arguments of the chat template (e.g. `{"thinking": False}`).
        advance: called with 1 after every continuation.
        log: called once with scalar metrics.

    Raises:
        WiringError: a served wiring does not fit the draft or the target.
        DataError: a prompt cannot be rendered or does not fit.
    """
    engines = {mode: engine_factory(wiring) for mode, wiring in served_wirings(trained, cfg.serve).items()}
    encoded = {
        (one.name, prompt.id): encode_prompt(tokenizer, prompt, template_kwargs)
        for one in prompt_sets
        for prompt in one.prompts
    }
    _warm_up(engines, next(iter(encoded.values())), cfg)
    rows: dict[tuple[str, str], list[PromptResult]] = {(m, s.name): [] for m in engines for s in prompt_sets}
    for (set_name, prompt_id), ids in encoded.items():
        for mode, row in _measure_prompt(engines, prompt_id, ids, cfg, tokenizer, advance or _ignore):
            rows[mode, set_name].append(row)
    served = [_served(mode, engine, trained, prompt_sets, rows) for mode, engine in engines.items()]
    result = AcceptResult(
        title=title,
        engine=next(iter(engines.values())).name,
        num_steps=cfg.num_steps,
        temperature=cfg.temperature,
        max_new_tokens=cfg.max_new_tokens,
        seed=cfg.seed,
        trained=trained.to_dict(),
        engine_ids=engine_ids(trained),
        predicted_acceptance=predicted_acceptance,
        served=served,
        commands=commands or [],
        environment=environment(),
        target=target,
        draft=draft,
    )
    result.allowed_gap = allowed_gap(result.predicted_tau, cfg.alarm)
    result.alarm = find_alarms(result, cfg.alarm, next_commands or [])
    if log is not None:
        log(scalars(result))
    return result


def _ignore(_count: int) -> None:
    """No progress bar."""


def _warm_up(engines: dict[str, Engine], ids: list[int], cfg: EvalConfig) -> None:
    for engine in engines.values():
        engine.generate(ids, WARM_UP_TOKENS, cfg.num_steps, cfg.temperature, cfg.seed)
    if cfg.baseline:
        next(iter(engines.values())).baseline(ids, WARM_UP_TOKENS, cfg.temperature, cfg.seed)


def _measure_prompt(
    engines: dict[str, Engine],
    prompt_id: str,
    ids: list[int],
    cfg: EvalConfig,
    tokenizer: PreTrainedTokenizerBase,
    advance: Callable[[int], None],
) -> Iterator[tuple[str, PromptResult]]:
    plain = None
    if cfg.baseline:
        plain = next(iter(engines.values())).baseline(ids, cfg.max_new_tokens, cfg.temperature, cfg.seed)
        advance(1)
    for mode, engine in engines.items():
        made = engine.generate(ids, cfg.max_new_tokens, cfg.num_steps, cfg.temperature, cfg.seed)
        advance(1)
        beside = compare_with_plain(engine, ids, made, plain, greedy=cfg.temperature == 0) if plain else None
        yield mode, prompt_result(prompt_id, made, beside, shown_text(tokenizer, made.tokens))


def shown_text(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> str:
    """The beginning of a continuation, for reports."""
    return str(tokenizer.decode(tokens, skip_special_tokens=True))[:SHOWN_CHARACTERS]


def compare_with_plain(engine: Engine, ids: list[int], made: Generation, plain: Generation, greedy: bool) -> Baseline:
    """Plain decoding's numbers, and under greedy decoding where, if anywhere, the draft's text leaves it.

    A draft may never change greedy output; only rounding may, where two tokens tie. The target's margin at the first
    difference tells the two apart (engines without a `top_gap` method leave it out).
    """
    row = beside_plain(made, plain, greedy)
    gap = getattr(engine, "top_gap", None)
    if row.first_difference is not None and gap:
        row.top_gap = gap([*ids, *plain.tokens[: row.first_difference]])
    return row


def beside_plain(made: Generation, plain: Generation, greedy: bool) -> Baseline:
    """Plain decoding's numbers, and under greedy decoding the first token that differs."""
    row = Baseline(len(plain.tokens), plain.seconds - plain.prefill_seconds, None)
    if greedy:
        row.same_tokens = made.tokens == plain.tokens
        if not row.same_tokens:
            pairs = enumerate(zip(made.tokens, plain.tokens, strict=False))
            row.first_difference = next((k for k, (a, b) in pairs if a != b), min(len(made.tokens), len(plain.tokens)))
    return row


def _served(
    mode: str,
    engine: Engine,
    trained: Wiring,
    prompt_sets: list[PromptSet],
    rows: dict[tuple[str, str], list[PromptResult]],
) -> Served:
    sets = [SetResult(summarize(s.name, rows[mode, s.name]), s.key, rows[mode, s.name]) for s in prompt_sets]
    overall = summarize("all", [row for one in sets for row in one.prompts])
    differences = [] if engine.wiring == trained else explain(trained, engine.wiring)
    return Served(mode, engine.wiring.to_dict(), differences, sets, overall)


def engine_ids(wiring: Wiring) -> dict[str, str]:
    """For each known engine convention, the ids that feed `wiring`, or why it cannot be fed."""
    out = {}
    for name, convention in CONVENTIONS.items():
        try:
            out[name] = str(convention.render(wiring))
        except WiringError as err:
            out[name] = f"cannot: {err.why or err.what}"
    return out


def environment() -> dict[str, str]:
    """Versions and hardware that the speeds depend on."""
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    return {"device": device, "python": platform.python_version(), **versions}


def scalars(result: AcceptResult) -> dict[str, float]:
    """Flat numbers for an experiment tracker: `eval/<mode>/<set>/<number>`, with `batch_<n>/` before the set of a
    server."""
    out: dict[str, float] = {"eval/alarms": len(result.alarm)}
    if result.predicted_tau is not None:
        out["eval/predicted_tau"] = result.predicted_tau
    for served in result.served:
        way = f"{served.mode}/batch_{served.batch}" if served.facts else served.mode
        for summary in [one.summary for one in served.sets] + [served.overall]:
            prefix = f"eval/{way}/{summary.name}"
            for name in SCALARS:
                value = getattr(summary, name)
                if value is not None:
                    out[f"{prefix}/{name}"] = value
            for place, share in enumerate(summary.acceptance):
                if share is not None:
                    out[f"{prefix}/acceptance_{place}"] = share
    return out
