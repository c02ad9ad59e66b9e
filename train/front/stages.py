"""The stages up to the served folder; `accept.py` has the last. Each is skipped while its inputs are unchanged.

A stage returns what the summary should name.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from data_prep.prepare import MEND as PREPARE_AGAIN
from data_prep.prepare import check_files, prepare, read_manifest
from data_prep.rounds import RoundPlan
from data_prep.store import Store, StoreManifest
from data_prep.store.seal import is_sealed, is_whole
from eagle3.atomic import sha256_file
from eagle3.checked_json import read_checked
from eagle3.checkpoint import check_files_of, load_state, save_served
from eagle3.draft import Eagle3Draft
from eagle3.draft_build import build_draft
from eagle3.draft_shape import DraftShape
from eagle3.errors import IntegrityError, RedraftError
from eagle3.place import list_files, remove
from eagle3.safetensors_files import read_all
from eagle3.sizes import size_text
from eagle3.state_codec import ROUNDING
from eagle3.target_identity import TargetIdentity
from eagle3.vocab import load_vocab, vocab_from_maps
from eagle3.wiring import Wiring
from train.front.capture import CaptureChoice
from train.front.console import console, progress_bar
from train.front.context import Run
from train.front.draft_shape import target_shape
from train.front.extraction import Work, run_extraction
from train.front.model_card import write_card
from train.front.records import StageRecord, skip, source_fingerprint
from train.front.rounds import MARKER as ROUNDS_MARKER
from train.front.rounds import Rounds, check_rounds, rounds_of
from train.front.store_check import check_states, check_tokens
from train.front.vocabulary import draft_vocab_file
from train.job import TrainJob, TrainResult
from train.launch import run_training


def prepare_stage(run: Run) -> dict[str, Any]:
    """Conversations -> tokens and loss masks."""
    data = run.config.data
    inputs = {
        "data": asdict(data),
        "sources": [source_fingerprint(source) for source in data.sources],
        "tokenizer": run.renderer.tokenizer_hash,
        "template": run.renderer.template_hash,
    }
    record = StageRecord(run.prepared / "stage.json", inputs)
    if not (prepared_is_whole(run, record) and skip(record)):
        record.begin()
        with progress_bar("conversations", data.max_samples or None, "records") as advance:
            manifest = prepare(data, run.tokenizer, run.prepared, advance)
        report_prepared(manifest)
        record.finish(counts=manifest["counts"])
    return {"tokens and masks": run.prepared}


def prepared_is_whole(run: Run, record: StageRecord) -> bool:
    """Whether every file of a finished stage is as it was written; says what is not."""

    def check() -> None:
        for split in ("train", "val"):
            check_files(run.prepared, split)

    return as_written(record, check)


def as_written(record: StageRecord, check: Callable[[], None]) -> bool:
    """Whether `check` finds nothing damaged of what a finished stage left; says what is."""
    if not record.finished():
        return True
    try:
        check()
    except IntegrityError as err:
        again(err.what, err.where)
        return False
    return True


def again(what: str, where: str) -> None:
    """Say that a finished stage runs once more since its output was damaged."""
    console.print(f"      runs again: {what} [{where}]", style="yellow", markup=False)


def report_prepared(manifest: dict[str, Any]) -> None:
    """Counts of a prepared set, and which records were left out."""
    for split in ("train", "val"):
        counts = manifest["counts"][split]
        told = ", ".join(f"{value:,} {name.replace('_', ' ')}" for name, value in counts.items())
        console.print(f"      {split}: {told}")
    skipped = manifest["counts"]["skipped"]
    if skipped:
        first = manifest["skipped"][0]
        console.print(f"      skipped {skipped}: first {first['record']} ({first['why']}); all are in manifest.json")


def prepared_manifest(run: Run) -> dict[str, Any]:
    """What `prepare` wrote, refused when missing."""
    there = (run.prepared / "manifest.json").exists()
    return read_manifest(run.prepared, PREPARE_AGAIN if there else "run the prepare stage first")


def check_tokenizer(run: Run, prepared: dict[str, Any]) -> None:
    """Refuse tokens that were prepared with another tokenizer than the target's: they would read as another text.

    Raises:
        RedraftError: naming both.
    """
    found, own = str(prepared["tokenizer_hash"]), run.renderer.tokenizer_hash
    if found != own:
        raise RedraftError(
            "the tokens were prepared with another tokenizer",
            where=str(run.prepared),
            why=f"its hash is {found[:12]}; that of {run.target_path} is {own[:12]}",
            mend="run the prepare stage again with this target",
        )


def store_manifest(run: Run, prepared: dict[str, Any], capture: dict[str, Any]) -> StoreManifest:
    """Identity of the store this run extracts into; `capture` says how its states are computed."""
    return StoreManifest(
        wiring=run.wiring,
        target=run.identity,
        tokenizer_hash=prepared["tokenizer_hash"],
        template_hash=prepared["template_hash"],
        codec=run.config.store.codec,
        capture=capture,
    )


def extract_record(run: Run, prepared: dict[str, Any]) -> StageRecord:
    """The finished-marker of a whole extraction."""
    asked = store_manifest(run, prepared, CaptureChoice(run).settings)
    return StageRecord(run.store / "stage.json", {"store": asked.to_dict(), "content": prepared["content"]})


def extract_stage(run: Run) -> dict[str, Any]:
    """Tokens -> hidden states at the wiring's sites, on disk; in rounds, the train stage does it."""
    prepared = prepared_manifest(run)
    check_tokenizer(run, prepared)
    record = extract_record(run, prepared)
    if not (is_whole(run.store) and skip(record)):
        rounds = rounds_of(run)
        if rounds is not None:
            check_rounds(run, rounds)
            return {"hidden states": f"{run.store} (extracted and freed in {len(rounds.rounds)} rounds)"}
        manifest = store_manifest(run, prepared, CaptureChoice(run).identity)
        record.begin()
        remove(run.store / ROUNDS_MARKER)  # from here on the store is filled for good
        tokens = sum(prepared["counts"][split]["tokens"] for split in ("train", "val"))
        started = time.monotonic()
        done = run_extraction(run, Work(manifest, tokens))
        if done.complete:
            spent = {"captured": done.tokens, "seconds": time.monotonic() - started}  # the plan's rate of a later run
            record.finish(records=done.records + done.found_done, tokens=tokens, **spent)
    size = sum(path.stat().st_size for path in list_files(run.store, "shard-*.safetensors"))
    return {"hidden states": f"{run.store} ({size_text(size)})"}


def train_inputs(run: Run) -> dict[str, Any]:
    """Everything that the trained weights depend on; of the store's codecs, those that round."""
    warm, codec = run.config.draft.warm_start, run.config.store.codec
    return {
        **({"codec": codec} if codec in ROUNDING else {}),
        "train": asdict(run.config.train),
        "draft": draft_inputs(run),
        "warm_start": sha256_file(Path(warm) / "model.safetensors") if warm else None,
        "wiring": run.wiring.to_dict(),
        "target": run.identity,
        "content": prepared_manifest(run)["content"],
    }


def draft_inputs(run: Run) -> dict[str, Any]:
    """The draft's settings; one that came later stays out at what was done before, so that older drafts go on."""
    settings = asdict(run.config.draft)
    later = {"init_layer": "random"}
    if settings["init_fc"] != "fitted":
        del settings["fit_rows"]
    return {name: value for name, value in settings.items() if name not in later or value != later[name]}


def train_stage(run: Run) -> dict[str, Any]:
    """Hidden states -> trained draft, under DeepSpeed."""
    folder = run.run_dir / "train"
    record = StageRecord(folder / "stage.json", train_inputs(run))
    if not (trained_is_whole(folder, record) and skip(record)):
        prepared = prepared_manifest(run)
        there = extract_record(run, prepared).finished() or (
            "extract" not in run.config.stages and is_sealed(run.store)
        )
        rounds = None if there else rounds_of(run)
        if rounds is None:
            check_store(run)
            record.begin()
            result = run_training(train_job(run, folder))
        else:
            result = train_in_rounds(run, rounds, prepared, record, folder)
        record.finish(steps=result.steps, val=result.val)
    trained = TrainResult.read(folder / "result.json")
    facts: dict[str, Any] = {"trained weights": trained.weights, "training metrics": trained.metrics}
    if (folder / "wandb").exists():
        facts["wandb"] = f"{folder / 'wandb'} (offline; `wandb sync` takes it online)"
    return facts


def trained_is_whole(folder: Path, record: StageRecord) -> bool:
    """Whether a finished training's weights are as they were written; else they come from the newest checkpoint."""
    if not record.finished():
        return True
    try:
        trained = TrainResult.read(folder / "result.json")
    except IntegrityError as err:
        again(err.what, err.where)
        return False
    damage = trained.damage()
    if damage:
        again("the trained weights are damaged", f"{trained.weights}: {damage}")
    return not damage


def train_in_rounds(
    run: Run, plan: RoundPlan, prepared: dict[str, Any], record: StageRecord, folder: Path
) -> TrainResult:
    """Extract and train in turns, within the disk budget."""
    check_rounds(run, plan)
    record.begin()
    rounds = Rounds(run, plan, store_manifest(run, prepared, CaptureChoice(run).identity))
    job = train_job(run, folder)
    job = replace(job, source_args={**job.source_args, "partial": True})
    return rounds.go(folder, job, lambda: check_store(run, partial=True), run_training)


def check_store(run: Run, partial: bool = False) -> None:
    """Refuse a store that is missing, damaged, of another wiring, target or tokenizer, or not what it says it is.

    `partial`: it holds a part of the records only, as in rounds.
    """
    prepared = prepared_manifest(run)
    check_tokenizer(run, prepared)
    opened = Store.open(
        run.store,
        wiring=run.wiring,
        target=run.identity,
        tokenizer_hash=prepared["tokenizer_hash"],
        template_hash=prepared["template_hash"],
        accept_other_wiring=run.config.store.accept_other_wiring,
        unfinished=partial,
    )
    check_tokens(opened, run.prepared)
    check_states(run, run.store)


def train_job(run: Run, folder: Path) -> TrainJob:
    """The job that training processes are given."""
    config, prepared, wiring = run.config, prepared_manifest(run), run.wiring.to_dict()
    vocab = draft_vocab_file(run)
    return TrainJob(
        run_dir=str(folder),
        train=config.train,
        track=config.track,
        wiring=wiring,
        source="train.front.source:open_source",
        source_args={
            "prepared": str(run.prepared),
            "store": str(run.store),
            "target": str(run.target_path),
            "wiring": wiring,
            "identity": run.identity,
            "tokenizer_hash": prepared["tokenizer_hash"],
            "accept_other_wiring": config.store.accept_other_wiring,
        },
        model="train.parts:open_parts",
        model_args={
            "target": str(run.target_path),
            "shape": target_shape(config, run.weights).to_dict(),
            "vocab": str(vocab),
            "draft": asdict(config.draft),
            "teacher": run.wiring.teacher,
            "seed": config.train.seed,
        },
        identity={name: value for name, value in train_inputs(run).items() if name not in ("train", "wiring")},
        name=config.name,
    )


def served_is_whole(run: Run, record: StageRecord) -> bool:
    """Whether a finished export's folder is as it was written; says what is not."""
    return as_written(record, lambda: check_files_of(run.served))


def export_stage(run: Run) -> dict[str, Any]:
    """Trained weights -> the folder an engine serves, read back before it takes its name."""
    there = (run.run_dir / "train" / "result.json").exists()
    mend = "run the train stage again: it goes on from the newest checkpoint" if there else "run the train stage first"
    trained = TrainResult.read(run.run_dir / "train" / "result.json", mend)
    weights = Path(trained.weights)
    damage = trained.damage()
    if damage:
        raise IntegrityError("the trained weights are damaged", where=str(weights), why=damage, mend=mend)
    check_trained(run)
    sha = trained.weights_sha256 or sha256_file(weights)  # just compared; older results have none
    inputs = {"weights": sha, "export": asdict(run.config.export), "wiring": run.wiring.to_dict()}
    record = StageRecord(run.run_dir / "export.json", inputs)
    if not (served_is_whole(run, record) and skip(record)):
        record.begin()
        shape: DraftShape = target_shape(run.config, run.weights)
        draft = build_draft(shape)
        with torch.no_grad():
            draft.embed_tokens.weight.copy_(run.weights.embedding())
        load_state(draft, read_all(weights, mend), str(weights))
        export = run.config.export
        save_served(
            run.served,
            draft,
            run.wiring,
            target=run.identity,
            convention_name=export.convention,
            vocab=export_vocab(run, draft),
            dtype=getattr(torch, export.dtype),
            with_embedding=export.with_embedding,
        )
        record.finish()
    write_card(run)
    return {"served draft": f"{run.served} (README.md in it is its model card)"}


def check_trained(run: Run) -> None:
    """Refuse to export weights under another wiring, or for another target, than they were trained on.

    Raises:
        IntegrityError: training has not finished.
        WiringError: naming what differs.
    """
    record = run.run_dir / "train" / "stage.json"
    trained = read_checked(record, "run the train stage first")["inputs"]
    mend = "give the settings that the draft was trained with, or run the train stage again in another run_dir"
    run.wiring.check_same(Wiring.from_dict(trained["wiring"]), where=str(record), mend=mend)
    TargetIdentity.from_dict(run.identity).check_same(
        TargetIdentity.from_dict(trained["target"]), where=str(record), mend=mend
    )


def export_vocab(run: Run, draft: Eagle3Draft) -> Any:
    """The vocabulary record for the served folder: the built one, or a warm start's own."""
    built = run.run_dir / "train" / "draft_vocab.safetensors"
    if run.config.draft.warm_start or not built.exists():
        return vocab_from_maps(draft.d2t, draft.t2d, str(built))
    try:
        return load_vocab(built)
    except IntegrityError as err:
        if not (run.prepared / "manifest.json").exists():
            raise
        again(err.what, err.where)
        return load_vocab(draft_vocab_file(run))
