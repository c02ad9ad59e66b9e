"""What is damaged: each folder the product writes, and how the product reads it before it uses what is in it."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import load_file

from data_prep import prepare
from data_prep.capture.sample import CapturedSample
from data_prep.conversations import read_conversations
from data_prep.extract import extract
from data_prep.legacy.prepared import write_prepared
from data_prep.regenerate.part import PartFile, record_line, whole_record
from data_prep.rows import Row
from data_prep.store import Store, StoreManifest
from data_prep.store.__main__ import run as store_command
from eagle3.checked_json import write_checked
from eagle3.checkpoint import load_served, save_served
from eagle3.draft_build import build_draft
from eagle3.draft_shape import DraftShape
from eagle3.errors import IntegrityError
from eagle3.tensor_file import save_tensors
from eagle3.vocab import build_draft_vocab, load_vocab, save_vocab, vocab_from_maps
from eagle3.wiring import Site, Wiring
from train.decoders import Decoders, Region
from train.front.source import StoreSource
from train.job import TrainResult
from train.resume import newest_whole, save_checkpoint
from train.world import World

H, V, RECORDS = 128, 50, 9
WIRING = Wiring((Site(3), Site(1)), "final", "llama", 6, H)
PASSED_OVER = "passed over"


def digest(value: Any) -> str:
    """SHA-256 of whatever a reader hands out: tensors by their bytes, the rest by its JSON."""
    sha = hashlib.sha256()

    def add(one: Any) -> None:
        if isinstance(one, torch.Tensor):
            sha.update(f"{one.dtype}{tuple(one.shape)}".encode())
            sha.update(one.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(one, dict):
            for key in sorted(one):
                sha.update(str(key).encode())
                add(one[key])
        elif isinstance(one, (list, tuple)):
            sha.update(b"[")
            for each in one:
                add(each)
        else:
            sha.update(json.dumps(one, sort_keys=True, default=str).encode())

    add(value)
    return sha.hexdigest()


class Subject(ABC):
    """One folder. `open` is what comes before anything of it is used, `read` hands out all of it."""

    name = ""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.make()

    @abstractmethod
    def make(self) -> None:
        """Write it."""

    @abstractmethod
    def open(self) -> Any:
        """Raises RedraftError where damage shows at once."""

    def read(self, opened: Any) -> Any:
        """Everything that would be used; raises RedraftError."""
        return opened

    @property
    def files(self) -> list[str]:
        """What may be damaged."""
        found = [path for path in self.folder.rglob("*") if path.is_file() and not path.name.startswith(".")]
        return sorted(str(path.relative_to(self.folder)) for path in found)

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Files that may be taken for one another."""
        return []

    def found(self, value: Any) -> bool:
        """Whether what was read says itself that something is lost and will be made again."""
        return False

    def mend(self) -> None:
        """Do what the message says, where that can be done here; the folder must then be as it was."""
        raise NotImplementedError

    def content(self) -> dict[str, str]:
        """All of it, for a comparison after the mend."""
        return {name: hashlib.sha256((self.folder / name).read_bytes()).hexdigest() for name in self.files}


def _pairs(names: Sequence[str]) -> list[tuple[str, str]]:
    return [(a, b) for place, a in enumerate(names) for b in names[place + 1 :]]


def samples() -> list[CapturedSample]:
    """Records of 4 to 12 tokens, always the same."""
    gen = torch.Generator().manual_seed(11)
    made = []
    for number in range(RECORDS):
        tokens = 4 + (number * 5) % 9
        states = {name: torch.randn(tokens, H, generator=gen).bfloat16() for name in ("layer_3", "layer_1", "final")}
        ids = torch.randint(V, (tokens,), generator=gen)
        mask = torch.rand(tokens, generator=gen) > 0.4
        mask[-1] = True
        made.append(CapturedSample(f"r{number:02d}", ids, mask, states, states.pop("final"), "final"))
    return made


class _Again:
    """Captures the records again, with the same bits; remembers which it was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def run(self, batch: Sequence[Row]) -> list[CapturedSample]:
        known = {sample.record_id: sample for sample in samples()}
        self.asked += [record_id for record_id, *_ in batch]
        return [known[record_id] for record_id, *_ in batch]


class _Tokens:
    """The prepared tokens beside a store."""

    def __init__(self) -> None:
        self.record_ids = [sample.record_id for sample in samples()]
        self.lengths = [sample.tokens for sample in samples()]

    def tokens(self, index: int) -> Any:
        return samples()[index].input_ids.int().numpy()


class StoreSubject(Subject):
    """A hidden-state store, read by the loader's way into a batch; `sealed`, or as it stands between rounds."""

    def __init__(self, folder: Path, codec: str, sealed: bool = True) -> None:
        self.codec, self.sealed = codec, sealed
        self.name = f"store, {codec}" + ("" if sealed else ", in rounds")
        self.manifest = StoreManifest(WIRING, {"name": "Tiny"}, "tok" * 8, "tpl" * 8, codec=codec)
        super().__init__(folder)

    def make(self) -> None:
        self.extract(_Again())
        self.put_apart()

    def put_apart(self) -> None:
        """Leave only what belongs to a store at rest."""
        shutil.rmtree(self.folder / "claims", ignore_errors=True)
        if not self.sealed:
            (self.folder / "complete.json").unlink(missing_ok=True)

    def extract(self, capture: _Again) -> None:
        known = samples()
        rows = Dataset.from_dict(
            {
                "record_id": [one.record_id for one in known],
                "input_ids": [one.input_ids.tolist() for one in known],
                "loss_mask": [one.loss_mask.int().tolist() for one in known],
            }
        )
        extract(rows, capture, self.folder, self.manifest, batch_tokens=16, shard_tokens=20)

    @property
    def pairs(self) -> list[tuple[str, str]]:
        return [pair for end in ("safetensors", "json") for pair in _pairs(sorted(self._named(f"shard-*.{end}")))]

    def _named(self, pattern: str) -> list[str]:
        return [path.name for path in self.folder.glob(pattern)]

    def open(self) -> StoreSource:
        """As the train stage opens it."""
        manifest = self.manifest
        identity = {"target": manifest.target, "tokenizer_hash": manifest.tokenizer_hash}
        opened = Store.open(self.folder, wiring=WIRING, unfinished=not self.sealed, **identity)
        return StoreSource(opened, _Tokens(), WIRING, None)

    def read(self, opened: StoreSource) -> Any:
        """Every record as a batch gets it, and what the sidecars say of them."""
        decoders, out = Decoders(0, Region(64, shared=False), False), []
        for index in range(len(opened)):
            rows = opened.lengths[index]
            features, teacher = torch.empty(rows, 2 * H).bfloat16(), torch.empty(rows, H).bfloat16()
            opened.fill(index, features, teacher, decoders)
            out.append([features, teacher, *opened.tokens(index)])
        decoders.close()
        opened.close()
        store = opened.store
        return [out, store.record_ids, store.lengths, store.supervised, store.manifest.to_dict()]

    def mend(self) -> None:
        """The command that every message names, then extraction: of what is whole, nothing is captured again."""
        assert store_command("mend", str(self.folder)) == 0
        capture = _Again()
        self.extract(capture)
        self.put_apart()
        assert len(set(capture.asked)) < RECORDS

    def content(self) -> dict[str, str]:
        """Every byte, but for the random part of data files' names and what depends on it."""
        out = {}
        for name in self.files:
            plain = re.sub(r"\.[0-9a-f]{16}\.safetensors", ".safetensors", name)
            data = (self.folder / name).read_bytes()
            if name.endswith(".json"):
                data = re.sub(rb"\.[0-9a-f]{16}\.safetensors", b"", data)
                data = re.sub(rb'"(checksum|shard-[^"]*\.json)": "[0-9a-f]{64}"', b"", data)
            out[plain] = hashlib.sha256(data).hexdigest()
        return out


class PreparedSubject(Subject):
    """A prepared set, read as the stages read it."""

    name = "prepared set"

    def make(self) -> None:
        store = StoreSubject(self.folder.with_name(f"{self.folder.name}-store"), "raw")
        self.store = Store.open(store.folder)
        self.mend()

    def mend(self) -> None:
        write_prepared(self.store, self.folder, "tests", val_fraction=0.3)

    def open(self) -> Any:
        prepare._compared.clear()  # a file that is changed twice within a tick of the clock looks unchanged
        return [prepare.load_prepared(self.folder, split) for split in prepare.SPLITS]

    def read(self, opened: Any) -> Any:
        manifest = prepare.read_manifest(self.folder)
        return [[dataset.to_dict() for dataset in opened], {k: v for k, v in manifest.items() if k != "files"}]

    @property
    def pairs(self) -> list[tuple[str, str]]:
        return [(f"train/{name}", f"val/{name}") for name in ("data-00000-of-00001.arrow", "state.json")]

    def content(self) -> dict[str, str]:
        """The rows: the files hold a random name of theirs."""
        return {"rows": digest(self.read(self.open()))}


class CheckpointSubject(Subject):
    """Two checkpoints; the newest whole one is gone on from. The older one is not read while the newest is whole."""

    name = "checkpoints"

    def make(self) -> None:
        class Engine:
            def save_checkpoint(self, root: str, tag: str, **_: Any) -> None:
                gen = torch.Generator().manual_seed(int(tag[-1]))
                for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"):
                    torch.save({"weights": torch.randn(40, generator=gen)}, Path(root) / tag / name)

        group = not torch.distributed.is_initialized()
        if group:
            torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        world = World(0, 1, torch.device("cpu"))
        for step in (1, 2):
            save_checkpoint(Engine(), self.folder, step, {"name": "tiny", "lr": 1e-05}, world, keep=2)
        if group:
            torch.distributed.destroy_process_group()

    def open(self) -> Any:
        return newest_whole(self.folder)

    def read(self, opened: Any) -> Any:
        checkpoint, notes = opened
        if checkpoint is None:
            return [None, notes]
        files = {name: (checkpoint.folder / name).read_bytes().hex() for name in sorted(checkpoint.marker["files"])}
        return [checkpoint.marker, files, notes]

    @property
    def files(self) -> list[str]:
        return [name for name in super().files if name.startswith("step-00000002/")]

    @property
    def pairs(self) -> list[tuple[str, str]]:
        across = [(f"step-00000001/{Path(name).name}", name) for name in self.files]
        return [*across, *_pairs(self.files)]

    def found(self, value: Any) -> bool:
        """A line names the checkpoint passed over; the one before is whole, and gone on from."""
        notes = value[-1]
        return bool(notes) and all(PASSED_OVER in note and "step-0" in note for note in notes)


class VocabSubject(Subject):
    """The draft vocabulary."""

    name = "draft vocabulary"

    def make(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.mend()

    def mend(self) -> None:
        counts = torch.arange(V).flip(0) % 7
        save_vocab(self.folder / "draft_vocab.safetensors", build_draft_vocab(counts, 20))

    def open(self) -> Any:
        return vars(load_vocab(self.folder / "draft_vocab.safetensors", size=20))

    def content(self) -> dict[str, str]:
        """What is read: the keys of the header stand in any order."""
        return {"vocabulary": digest(self.open())}


def _draft() -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
    rest = {"head_dim": 8, "vocab_size": V, "draft_vocab_size": 20, "num_aux": 2, "rms_norm_eps": 1e-5}
    rope = {"rope_theta": 10000.0, "rope_scaling": None}
    torch.manual_seed(0)
    draft = build_draft(DraftShape(**sizes, **rest, rope=rope, max_position_embeddings=64))
    vocab = build_draft_vocab(torch.arange(V) % 7, 20)
    draft.d2t.copy_(vocab.d2t)
    draft.t2d.copy_(vocab.t2d)
    return draft


class ServedSubject(Subject):
    """The served folder, read as eval reads it before it measures in any engine."""

    name = "served folder"

    def make(self) -> None:
        self.draft, self.embedding = _draft(), torch.randn(V, 16)
        self.mend()

    def mend(self) -> None:
        vocab = vocab_from_maps(self.draft.d2t, self.draft.t2d, "here")
        wiring = Wiring((Site(2), Site(5)), "final", "llama", 12, 16)
        save_served(self.folder, self.draft, wiring, target={"name": "tiny"}, convention_name="vllm", vocab=vocab)

    def open(self) -> Any:
        return load_served(self.folder, self.embedding, wiring=None)

    def read(self, opened: Any) -> Any:
        draft, wiring, config = opened
        return [draft.state_dict(), wiring.to_dict(), config]


class TrainedSubject(Subject):
    """Trained weights and the result that names them, as export reads them."""

    name = "trained weights"

    def make(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        weights = self.folder / "final.safetensors"
        save_tensors(weights, {name: one.contiguous() for name, one in _draft().state_dict().items()}, {"format": "pt"})
        sha = hashlib.sha256(weights.read_bytes()).hexdigest()
        result = TrainResult(2, 0, str(weights), "metrics.jsonl", {"loss": 1e-05}, {"acc": [0.25]}, 0.5, sha)
        write_checked(self.folder / "result.json", vars(result))

    def open(self) -> Any:
        result = TrainResult.read(self.folder / "result.json")
        if result.damage():
            where = result.weights
            raise IntegrityError("the trained weights are damaged", where=where, why=result.damage(), mend="train")
        return result

    def read(self, opened: Any) -> Any:
        return [vars(opened), load_file(opened.weights)]


def _answers() -> list[dict[str, Any]]:
    made = []
    for number in range(6):
        said = {"role": "assistant", "content": f"Answer {number}: " + "naïve " * number}
        messages = [{"role": "user", "content": f"Question {number}?"}, said]
        made.append({"id": f"q{number}", "messages": messages, "answer_tokens": number, "share": 1e-05})
    return made


class AnswersSubject(Subject):
    """Finished answers, read as the prepare stage reads them."""

    name = "answers.jsonl"

    def make(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "answers.jsonl").write_bytes(b"".join(map(record_line, _answers())))
        write_checked(self.folder / "report.json", {"answers": len(_answers()), "failed": 0})

    def open(self) -> Any:
        return [vars(one) for one in read_conversations([str(self.folder / "answers.jsonl")])]


class PartSubject(Subject):
    """Answers of an unfinished run: what is damaged is asked for again."""

    name = "answers.part.jsonl"
    settings: dict[str, Any] = {"temperature": 0.6, "model": "tiny"}  # noqa: RUF012

    def make(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "answers.part.jsonl"
        path.unlink(missing_ok=True)
        part = PartFile(path, self.settings)
        for record in _answers():
            part.append(record)
        part.close()

    def open(self) -> Any:
        part = PartFile(self.folder / "answers.part.jsonl", self.settings)
        kept = {one["id"]: whole_record(part.line(one["id"])) for one in _answers() if one["id"] in part}
        assert len(kept) == len(part), "a record of another name is in it"
        part.close()
        return kept

    def found(self, value: Any) -> bool:
        """Records are lacking, which are asked for again; those there are as they were written."""
        known = {one["id"]: one for one in _answers()}
        return len(value) < len(known) and all(record == known[name] for name, record in value.items())


SUBJECTS: list[Callable[[Path], Subject]] = [
    *(lambda folder, codec=codec: StoreSubject(folder, codec) for codec in ("raw", "lossless", "fp8", "int8")),
    lambda folder: StoreSubject(folder, "raw", sealed=False),
    PreparedSubject,
    CheckpointSubject,
    VocabSubject,
    ServedSubject,
    TrainedSubject,
    AnswersSubject,
    PartSubject,
]
