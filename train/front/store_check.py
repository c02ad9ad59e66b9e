"""Before training: the store's records are those prepared, and its tensors are what their names say.

A manifest says what a store should hold. Names, shapes and checksums agree just as well when the states of two
records were exchanged, or when one layer was captured for another: only computing some of them again can tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from data_prep.prepare import load_prepared
from data_prep.store import Store
from data_prep.store.shard import tokens_sha256
from eagle3.errors import IntegrityError, RedraftError, WiringError
from eagle3.hf_model import choose_device, choose_dtype, load_target
from eagle3.hf_states import all_site_states
from eagle3.place import Place
from eval.probe.store import judge_store
from eval.probe.stored import StoredRecord, StoreReader
from train.front.console import console
from train.front.context import Run

MAX_TOKENS = 256  # of a record; what follows bears on no earlier state
GROSS = 0.25  # relative error of a row: rounding and quantization of the same weights stay well below
MOST = 0.25  # share of such rows from which a record is refused; below it, only a warning is given


def check_tokens(store: Store, prepared: Path) -> None:
    """Refuse a store whose tokens or loss masks are not those that are prepared now.

    Raises:
        IntegrityError: naming the first record that differs.
    """
    held = {entry.id: entry.tokens_sha256 for shard in store.shards for entry in shard.records}
    other = []
    for split in ("train", "val"):
        rows = load_prepared(prepared, split).select_columns(["record_id", "input_ids", "loss_mask"])
        for block in rows.with_format("numpy").iter(512):
            for name, ids, mask in zip(block["record_id"], block["input_ids"], block["loss_mask"], strict=True):
                if held.get(str(name)) not in (None, tokens_sha256(ids, mask)):
                    other.append(str(name))
    if other:
        raise IntegrityError(
            "the store holds another text under a record's name",
            where=f"{store.path}, record {other[0]!r}",
            why=f"the tokens or the loss masks of {len(other)} records are not the prepared ones",
            mend="delete the store, or set paths.store to a new folder, and run the extract stage",
        )


def check_states(run: Run, store: Place) -> None:
    """Compute a few of the store's records again with Hugging Face's target, and compare every tensor by name.

    Where the target is too large to load beside the rest (`store.verify_max_gib`), or transformers cannot load it,
    a line says so and how to measure it elsewhere.

    Raises:
        WiringError: a tensor is another site than its name says.
        IntegrityError: a record's states are not those of its tokens in this target.
    """
    config = run.config.store
    if not config.verify_records:
        return
    elsewhere = f"python -m eval.probe store {store} --target {run.target_path}"
    size = sum(file.stat().st_size for kind in ("safetensors", "gguf") for file in run.target_path.glob(f"*.{kind}"))
    if size > config.verify_max_gib * 2**30:
        why = f"the target has {size / 2**30:.0f} GiB, store.verify_max_gib is {config.verify_max_gib:g}"
        console.print(f"      the store's states are not measured: {why}; where it can run: {elsewhere}")
        return
    reader = StoreReader(store)
    records = list(reader.spread(config.verify_records, MAX_TOKENS))
    try:
        references = [reader.as_kept(states) for states in _references(run, records)]
    except IntegrityError:
        raise
    except RedraftError as err:
        console.print(f"      the store's states are not measured: {err.what} ({err.why}); elsewhere: {elsewhere}")
        return
    sure = [_judge(reader, records, references, place, elsewhere) for place in range(len(records))]
    if all(sure):
        console.print(f"      {len(records)} records computed again: every tensor is what it is called")


def _references(run: Run, records: Sequence[StoredRecord]) -> list[dict[str, Tensor]]:
    """The target's states on each record, every site, [T, H]."""
    config = run.config
    device = choose_device(config.capture.device)
    dtype = choose_dtype(config.capture.compute_dtype, device)
    model = load_target(run.target_path, device, dtype, config.target.trust_remote_code)
    references = [all_site_states(model, record.input_ids) for record in records]
    del model
    if device != "cpu":
        torch.cuda.empty_cache()
    return references


def _judge(
    reader: StoreReader,
    records: Sequence[StoredRecord],
    references: Sequence[dict[str, Tensor]],
    place: int,
    elsewhere: str,
) -> bool:
    """Refuse a record that is wrong; False, with a line, where the measurement cannot tell."""
    record = records[place]
    where = f"{reader.path}, record {record.record_id!r}"
    verdict = judge_store(reader, [record], [references[place]])
    if verdict.ok:
        return True
    if verdict.told:
        raise WiringError(verdict.what, where=where, why="; ".join(verdict.reasons), mend=verdict.mend)
    name, share = _worst(reader, record, references[place])
    if share > MOST:
        whose = _whose(reader, records, references, place)
        raise IntegrityError(
            "a record's states are not those of its tokens",
            where=where,
            why=f"{share:.0%} of the rows of {name} are far from what the target computes there"
            + (f"; they are the states of record {whose!r}" if whose else ""),
            mend="extract again; where an engine captured them, it answered with another request's states, or runs "
            "other weights than target.path",
        )
    console.print(f"      {where}: {verdict.what} ({'; '.join(verdict.reasons)}); more: {elsewhere}", style="yellow")
    return False


def _worst(reader: StoreReader, record: StoredRecord, reference: dict[str, Tensor]) -> tuple[str, float]:
    """The stored tensor with the largest share of rows that are far from its own site, and that share."""
    shares = {}
    for name, state in record.states.items():
        wanted = reference[reader.wiring.teacher if name == "final" else name]  # [T, H]
        error = (state.float() - wanted).norm(dim=1) / wanted.norm(dim=1).clamp_min(1e-12)  # [T]
        shares[name] = (error > GROSS).float().mean().item()
    worst = max(shares, key=lambda name: shares[name])
    return worst, shares[worst]


def _whose(
    reader: StoreReader, records: Sequence[StoredRecord], references: Sequence[dict[str, Tensor]], place: int
) -> str:
    """The record, among those computed, to which the states at `place` belong; "" when none."""
    mine = records[place]
    for other, reference in zip(records, references, strict=True):
        rows = min(len(other.input_ids), len(mine.input_ids))
        moved = StoredRecord(
            other.record_id,
            other.input_ids[:rows],
            other.loss_mask[:rows],
            {name: state[:rows] for name, state in mine.states.items()},
        )
        if other is not mine and judge_store(reader, [moved], [{k: v[:rows] for k, v in reference.items()}]).ok:
            return other.record_id
    return ""
