"""Extract and train in turns, where `disk_budget` cannot hold all hidden states at once (docs/rounds.md).

Everything that a round needs to know follows from the newest checkpoint: which round its step lies in, and so which
records must be there. A run that is killed at any moment goes on by the same look.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from data_prep.extract import Part
from data_prep.prepare import load_prepared
from data_prep.rounds import RoundPlan, Sizes, parse_size, round_plan
from data_prep.store.manifest import TOKEN_BYTES
from data_prep.store.seal import break_seal
from data_prep.store.shard import Shard
from data_prep.units import plan_windows, window_tokens
from eagle3.atomic import read_json, write_json
from eagle3.errors import ConfigError, IntegrityError, RedraftError
from eagle3.place import create, exists, list_files, remove
from eagle3.shard_file import find_shards
from eagle3.sizes import size_text
from eagle3.state_codec import state_bytes
from train.batches import StepPlan, epoch_order
from train.front.config import RedraftConfig
from train.front.console import console
from train.front.context import Run
from train.front.extraction import Work, run_extraction
from train.resume import check_same_job, newest_whole

MARKER = "rounds.json"
MUCH = 1.2  # computed tokens a stored one, above which the width of windows is worth a word


def plan_rounds(config: RedraftConfig, lengths: Sequence[int], held_out: Sequence[int]) -> RoundPlan | None:
    """The rounds of a run; None when there is no budget, or everything fits it.

    Args:
        config: `disk_budget`, `store`, `capture`'s batches and `train` are used.
        lengths: tokens of each training record, in the prepared order (before there are any: an estimate).
        held_out: tokens of each validation record.

    Raises:
        RedraftError: the budget cannot hold one training step.
    """
    if not config.disk_budget:
        return None
    budget = parse_size(config.disk_budget)
    sizes = Sizes(token_bytes(config), config.store.shard_tokens)
    if sizes.whole([*lengths, *held_out]) <= budget:
        return None
    steps = StepPlan(len(lengths), config.train, 1, 0)
    order = epoch_order(config.train.seed, 0, len(lengths)).tolist()
    capture, shard_tokens = config.capture, config.store.shard_tokens
    width = window_tokens(capture.batch_tokens, shard_tokens, capture.window_batches)
    windows = plan_windows(lengths, order, capture.batch_tokens, width)
    return round_plan(lengths, held_out, steps.global_batch, steps.total_steps, windows, budget, sizes)


def token_bytes(config: RedraftConfig) -> int:
    """Upper bound of a stored token's bytes; the lossless codec's bound is the raw size."""
    wiring = config.build_wiring()
    state = state_bytes(config.store.codec, "bfloat16", wiring.hidden_size)
    return (len(wiring.stored_sites) + 1) * state + TOKEN_BYTES


def prepared_lengths(prepared: Path, split: str) -> list[int]:
    """Tokens of each prepared record."""
    columns = load_prepared(prepared, split).select_columns(["input_ids"]).with_format("arrow")
    return [len(ids) for block in columns.iter(4096) for ids in block["input_ids"]]


def rounds_of(run: Run) -> RoundPlan | None:
    """The rounds of this run's prepared data; None when it needs none."""
    if not run.config.disk_budget:
        return None
    return plan_rounds(run.config, *(prepared_lengths(run.prepared, split) for split in ("train", "val")))


def check_rounds(run: Run, plan: RoundPlan) -> None:
    """Refuse what rounds cannot do, before anything is extracted; say what they will cost.

    Raises:
        RedraftError: the stages are not asked for together, or the store is not one that rounds may free.
    """
    if not {"extract", "train"} <= set(run.config.stages):
        raise ConfigError(
            "in rounds, hidden states are extracted and trained on in turns",
            where="stages",
            why=f"the whole store takes up to {size_text(plan.whole_bytes)}, disk_budget is {run.config.disk_budget}",
            mend="ask for the stages extract and train together, or unset disk_budget",
            page="rounds",
        )
    take_store(run)
    peak, whole = size_text(plan.peak_bytes), size_text(plan.whole_bytes)
    console.print(
        f"      {len(plan.rounds)} rounds: at most {peak} at once, where all would be up to {whole}; in all "
        f"{plan.computed_tokens:,} tokens are computed and {plan.stored_tokens:,} stored, where all at once would be "
        f"{plan.whole_tokens:,}"
    )
    window = run.config.capture.window_batches
    if plan.computed_tokens > MUCH * plan.stored_tokens and window > 1:
        console.print(
            f"      rounds are short beside a window of {window} batches, so much is computed twice: a lower "
            "capture.window_batches computes less, with more padding (docs/rounds.md)"
        )


def take_store(run: Run) -> None:
    """Mark the store as one that this run's rounds fill and free.

    Raises:
        RedraftError: it was made otherwise, or by another run's rounds that are not finished: they are not freed.
    """
    path = run.store / MARKER
    mine = {"run": str(run.run_dir.resolve()), "finished": False}
    if exists(run.store / "manifest.json") and not exists(path):
        raise RedraftError(
            "the store was not made in rounds, and rounds would free what it holds",
            where=str(run.store),
            mend="set paths.store to a new folder, or unset disk_budget to go on with this one",
            page="rounds",
        )
    if create(path, json.dumps(mine) + "\n"):
        return
    found = read_json(path, mend="delete the store")
    if found["run"] != mine["run"] and not found["finished"]:
        raise RedraftError(
            "the store is filled and freed by another run",
            where=str(run.store),
            why=f"by {found['run']}, which has not finished",
            mend="finish that run, set paths.store to a new folder, or delete the store",
            page="rounds",
        )
    write_json(path, mine)


class Rounds:
    """The rounds of one run.

    Args:
        run: the run.
        plan: its rounds.
        manifest: identity of the store.
    """

    def __init__(self, run: Run, plan: RoundPlan, manifest: Any) -> None:
        self.run, self.plan, self.manifest = run, plan, manifest
        self.names: list[str] = []
        self.lengths: list[int] = []
        for split in ("train", "val"):
            self.lengths += prepared_lengths(run.prepared, split)
            self.names += [str(name) for name in load_prepared(run.prepared, split)["record_id"]]
        self.train = len(load_prepared(run.prepared, "train"))

    def go(self, folder: Path, job: Any, check: Any, train: Any) -> Any:
        """Extract, check, train and free until the last step is done.

        Args:
            folder: the training's.
            job: the training job.
            check: called once a round's records are there.
            train: called with a job; `train.launch.run_training`.

        Returns:
            The last call's result.
        """
        while True:
            done = self._done(folder, job)
            number = self.plan.at(done)
            one = self.plan.rounds[number]
            console.print(
                f"      round {number + 1} of {len(self.plan.rounds)}: steps {one.first + 1:,} to {one.last:,}, "
                f"{len(one.records):,} records, at most {size_text(one.peak_bytes)}"
            )
            self.fill(number)
            check()
            last = number + 1 == len(self.plan.rounds)
            result = train(replace(job, stop_at=0 if last else one.last))
            gc.collect()  # lets go of the round's last batches, and of whatever else still holds a shard open
            if last:
                self._finished()
                return result
            if self._done(folder, job) < one.last:
                raise IntegrityError(
                    "the round's checkpoint cannot be read back",
                    where=str(folder / "checkpoints"),
                    mend="run the same command again: it goes on from the newest whole one",
                )

    def fill(self, number: int) -> None:
        """Free what the round does not read, and extract what it lacks."""
        held = self._free(number)
        held_out = range(self.train, len(self.names))
        wanted = self.plan.wanted(number, held_out, held)
        if all(i in held for i in wanted):
            return
        tokens = sum(self.lengths[i] for i in wanted)
        done = run_extraction(self.run, Work(self.manifest, tokens, Part(f"r{number:05d}", wanted)))
        if not done.complete:
            raise RedraftError(
                "the round's hidden states are not complete",
                where=str(self.run.store),
                why="; ".join(one.words for one in done.others),
                mend="run the same command again",
            )

    def _free(self, number: int) -> set[int]:
        """Remove the shards that hold anything not needed now, and every unfinished file; what is held then.

        The sidecar goes first: a shard whose data is being removed no longer exists. Nobody else writes here: this run
        holds its folder's lock and the store's mark, and its workers have ended.
        """
        store, place = self.run.store, {name: i for i, name in enumerate(self.names)}
        break_seal(store)
        needed = self.plan.rounds[number].records
        held: set[int] = set()
        data: set[str] = set()
        for shard in find_shards(store):
            members = {place.get(entry.id, -1) for entry in shard.records}
            if all(i in needed or i >= self.train for i in members):
                held |= members
                data.add(shard.data_name)
            else:
                remove_shard(shard)
        for pattern in ("shard-*.safetensors", ".shard-*.tmp"):
            for path in list_files(store, pattern):
                if path.name not in data:
                    remove(path)
        return held

    def _done(self, folder: Path, job: Any) -> int:
        """Steps of the newest whole checkpoint; refuses another job's, before anything of the store is freed."""
        checkpoint, _ = newest_whole(folder / "checkpoints")
        if checkpoint is None:
            return 0
        found = checkpoint.marker["identity"]
        chosen = {name: value for name, value in found.items() if name in RESOLVED}
        check_same_job(checkpoint, {**job.full_identity(), **chosen}, checkpoint.marker["processes"])
        return checkpoint.step

    def _finished(self) -> None:
        mine = {"run": str(self.run.run_dir.resolve()), "finished": True}
        write_json(self.run.store / MARKER, mine)


RESOLVED = ("train.dtype", "train.zero_stage", "train.offload_optimizer")  # that training settles for itself


def remove_shard(shard: Shard) -> None:
    """Free a shard."""
    remove(shard.path)
    remove(shard.data)
