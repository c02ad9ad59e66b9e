"""The model card: `README.md` in the served folder, from what the run's stages have left.

Engines read `config.json` and the safetensors of that folder, and no stage looks at the card: it may be written again
at any time. It names sources and targets by their names, never by their paths.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2
import yaml

from eagle3.atomic import read_json, write_text
from eagle3.wiring import EMBEDDING, Wiring
from eval.results import AcceptResult, Served, predicted_tau
from eval.series import way_of
from train.front.config import RedraftConfig
from train.front.context import Run
from train.front.records import prepared_counts, training_result
from train.front.serving import in_lines, serving_command

CARD = "README.md"
TEMPLATE = Path(__file__).with_name("model_card.md.jinja")
TEACHERS = {
    "final": "what leaves the last layer, before the final norm",
    "final_normed": "what leaves the last layer, after the final norm",
}
TAGS = ("eagle3", "speculative-decoding", "draft-model", "sglang", "vllm")


def write_card(run: Run) -> None:
    """Write the card of the run's served draft, or leave it as it is when nothing has changed.

    Raises:
        IntegrityError: a file that it is made from cannot be read.
    """
    path, text = run.served / CARD, card_text(run)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        write_text(path, text)


def card_text(run: Run) -> str:
    """The card as it is to be now."""
    config, served = run.config, read_json(run.served / "config.json", mend="export the draft again")
    block, steps = served["redraft"], config.eval.num_steps
    result = training_result(run.run_dir)
    results = [AcceptResult.load(path) for path in sorted(run.run_dir.glob("eval*/results.json"))]
    wiring = Wiring.from_dict(block["wiring"])
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.keep_trailing_newline = True
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        front=front_matter(config),
        title=f"{config.name}, an EAGLE-3 draft for {config.target.name}",
        target=config.target,
        identity=block["target"],
        steps=steps,
        predicted=predicted_tau(result.get("val", {}).get("acc"), steps),
        measured=[row for one in results for row in _measured(one)],
        slots=[site.words if site == EMBEDDING else f"what enters {site.words}" for site in wiring.aux],
        teacher=TEACHERS[wiring.teacher],
        convention=block["convention"],
        ids=block["ids"],
        commands=serving_commands(steps),
        training=_training(run, result, block),
        checks=_checks(run, results),
    )


def front_matter(config: RedraftConfig) -> str:
    """The metadata that the Hugging Face hub reads, as YAML; no licence unless one is set."""
    card = config.card
    told: dict[str, Any] = {"base_model": card.base_model or config.target.name}
    if card.license:
        told["license"] = card.license
    told |= {"library_name": "redraft", "pipeline_tag": "text-generation", "tags": list(TAGS)}
    return yaml.safe_dump(told, sort_keys=False, allow_unicode=True)


def serving_commands(steps: int) -> dict[str, str]:
    """What starts each engine with the draft, for a chain of `steps` proposals."""
    return {name: in_lines(serving_command(name, "TARGET", "DRAFT", steps)) for name in ("sglang", "vllm")}


def _measured(result: AcceptResult) -> list[dict[str, str]]:
    """A row each way of serving and batch size."""
    return [
        {
            "how": _how(result, one),
            "tau": f"{one.overall.tau:.2f}",
            "interval": f"{one.overall.tau_low:.2f} to {one.overall.tau_high:.2f}",
            "ceiling": str(result.ceiling),
        }
        for one in result.served
    ]


def _how(result: AcceptResult, served: Served) -> str:
    build = served.facts.get("build")
    engine = f"{result.engine} {build}" if build else f"the {result.engine} engine"
    temperature = "greedy" if result.temperature == 0 else f"temperature {result.temperature:g}"
    batch = f", {served.batch} at a time" if served.facts else ""
    return f"served in {engine} with {way_of(result, served)}{batch}: {served.overall.measured} prompts, {temperature}"


def _training(run: Run, result: dict[str, Any], block: dict[str, Any]) -> list[str]:
    config = run.config
    lines = [f"Made with Redraft as `{config.name}`."]
    counts = prepared_counts(run)
    if counts:
        train, val = counts["train"], counts["val"]
        lines.append(
            f"Trained on {train['records']:,} conversations of {train['tokens']:,} tokens, of which "
            f"{train['supervised_tokens']:,} were learnt from; {val['records']:,} more were held out."
        )
        lines.append(f"Sources: {', '.join(map(source_name, config.data.sources))}.")
    if "steps" in result:
        lines.append(
            f"{result['steps']:,} optimizer steps of {config.train.global_batch_size} conversations, "
            f"K = {config.train.ttt_steps} unrolled steps, objective {config.train.objective.kind}."
        )
    vocab = block["vocab"]
    lines.append(
        f"Its vocabulary has {vocab['size']:,} tokens, which are {vocab['coverage']:.1%} of those learnt from."
    )
    return lines


def source_name(source: str) -> str:
    """A data source as others know it: the name of a file or folder, or of a set on the hub."""
    path = Path(source)
    return path.name if path.is_absolute() or path.exists() else source


def _checks(run: Run, results: list[AcceptResult]) -> list[str]:
    records = run.config.store.verify_records
    lines = ["The folder was read back, every name, shape and value, before it took its name."]
    if records:
        lines.append(
            f"Before training, states of {records} stored records were computed again from the target and compared."
        )
    for result in results:
        for one in result.served:
            lines += _served_checks(result, one)
    return lines


def _served_checks(result: AcceptResult, served: Served) -> list[str]:
    overall, lines = served.overall, []
    if overall.same_tokens is not None:
        lines.append(
            f"{_how(result, served)}: {overall.same_tokens} of {overall.prompts} texts are token for token those of "
            "plain decoding."
        )
    alarms = [one.headline for one in result.alarm if (one.mode, one.batch) == (served.mode, served.batch)]
    lines += [f"{_how(result, served)}: ALARM, {headline}." for headline in alarms]
    if result.incomplete:
        lines.append(f"{result.engine}: the figures are incomplete: {result.incomplete}.")
    return lines
