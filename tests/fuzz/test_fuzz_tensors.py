"""Tensor files of any bytes: safetensors, GGUF, indexes, stores and served folders."""

from __future__ import annotations

import json
import shutil
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_values import changed, damaged, taken_or_refused, values
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from data_prep.legacy.formats import find_files, read_record
from data_prep.store import Store
from eagle3.checkpoint import load_served
from eagle3.errors import IntegrityError, RedraftError
from eagle3.gguf_weights import GGUFTensors, read_gguf_config
from eagle3.safetensors_files import SafetensorsTensors, read_all, read_header
from eagle3.shard_file import Shard, ShardFile
from eagle3.state_read import StateReader
from eagle3.target_weights import TargetWeights, rope_parameters
from eagle3.vocab import DraftVocab, build_draft_vocab, load_vocab, save_vocab
from eval.probe.dump import Dump, load_dump, save_dump

UNIT = Path(__file__).resolve().parents[1] / "unit"
for area in ("train", "targets"):
    sys.path.append(str(UNIT / area))
from loader_store import make_store  # noqa: E402
from test_targets_gguf import write_gguf  # noqa: E402

TENSORS = {"a": torch.arange(6).float().reshape(2, 3), "b": torch.zeros(2, dtype=torch.bfloat16)}
HEADER = {"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, "__metadata__": {"format": "pt"}}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 4,
    "vocab_size": 6,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "quantization_config": {"quant_method": "fp8", "config_groups": {"g": {"weights": {"num_bits": 8}}}},
    "text_config": {"hidden_size": 4, "tie_word_embeddings": False},
}


def _written(path: Path, raw: bytes) -> Path:
    path.write_bytes(raw)
    return path


def _with_header(header: Any) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(24)


@given(raw=damaged(save(TENSORS)) | changed(HEADER).map(_with_header) | st.binary(max_size=30))
@example(raw=_with_header({"a": {"data_offsets": [0]}}))
@example(raw=_with_header({"a": {"data_offsets": [-5, -1], "dtype": "F32", "shape": [1]}}))
@example(raw=_with_header({"a": {"data_offsets": ["0", "8"], "dtype": "F32", "shape": [2]}}))
@example(raw=struct.pack("<Q", 200_000) + b"[" * 200_000)
@example(raw=struct.pack("<Q", 2**63) + b"{}")
def test_safetensors_of_any_bytes_are_read_or_refused(raw: bytes, tmp_path: Path) -> None:
    path = _written(tmp_path / "model.safetensors", raw)
    taken_or_refused(lambda: read_header(path))
    found = taken_or_refused(lambda: read_all(path))
    assert found is None or all(isinstance(one, torch.Tensor) for one in found.values())
    files = taken_or_refused(lambda: SafetensorsTensors(tmp_path))
    if files is not None:
        taken_or_refused(files.fingerprint)
        for name in files.names:
            taken_or_refused(lambda name=name: files.read(name))
    taken_or_refused(lambda: load_dump(path))
    taken_or_refused(lambda: load_vocab(path))
    for one in taken_or_refused(lambda: find_files(tmp_path)) or []:
        taken_or_refused(lambda one=one: read_record(one, 4))


@given(weight_map=changed({"a": "model.safetensors", "b": "model.safetensors"}))
@example(weight_map={"a": "../model.safetensors"})
@example(weight_map={"a": 5})
@example(weight_map={"a": ""})
def test_an_index_of_any_shape_is_read_or_refused(weight_map: Any, tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    files = taken_or_refused(lambda: SafetensorsTensors(tmp_path))
    for name in files.names if files else ():
        taken_or_refused(lambda name=name: files.read(name))


@given(config=changed(CONFIG) | values(tuple(CONFIG)))
@example(config=[])
@example(config={**CONFIG, "num_hidden_layers": "many"})
@example(config={**CONFIG, "architectures": 5})
@example(config={**CONFIG, "quantization_config": "fp8"})
@example(config={**CONFIG, "text_config": {**CONFIG, "rms_norm_eps": [None]}})
def test_a_config_of_any_shape_names_a_target_or_is_refused(config: Any, tmp_path: Path) -> None:
    save_file(
        {"model.embed_tokens.weight": torch.zeros(6, 4), "model.norm.weight": torch.ones(4)}, tmp_path / "m.safetensors"
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = taken_or_refused(lambda: TargetWeights(tmp_path))
    if weights is None:
        return
    for ask in (weights.identity, weights.embedding, weights.final_norm, weights.head, weights.last_layer):
        taken_or_refused(ask)
    taken_or_refused(lambda: rope_parameters(weights.text_config))


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    write_gguf(path, tied=False)
    return path.read_bytes()


@given(data=st.data())
def test_a_gguf_of_any_bytes_is_read_or_refused(data: st.DataObject, gguf: bytes, tmp_path: Path) -> None:
    raw = data.draw(damaged(gguf[:600]))
    files = GGUFTensors(_written(tmp_path / "m.gguf", raw + gguf[600:]))
    taken_or_refused(lambda: read_gguf_config(files))
    for name in taken_or_refused(lambda: files.names) or ():
        taken_or_refused(lambda name=name: files.read(name))
    taken_or_refused(files.fingerprint)


def test_a_gguf_whose_architecture_is_no_text_is_refused(gguf: bytes, tmp_path: Path) -> None:
    at = gguf.index(b"llama", gguf.index(b"general.architecture"))
    files = GGUFTensors(_written(tmp_path / "m.gguf", gguf[:at] + b"\x8a" + gguf[at + 1 :]))
    with pytest.raises(IntegrityError, match=r"GGUF file truncated or corrupt.*utf-8"):
        read_gguf_config(files)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("store") / "store", "lossless")


def _read_all(folder: Path) -> None:
    """Everything that a reader of a store does."""
    opened = Store.open(folder, unfinished=True)
    for index in range(len(opened)):
        taken_or_refused(lambda index=index: opened[index])
        taken_or_refused(lambda index=index: opened.tokens_and_mask(index))
    for shard in opened.shards:
        taken_or_refused(shard.verify)


@given(data=st.data())
def test_a_store_of_any_json_is_read_or_refused(data: st.DataObject, store: Path, tmp_path: Path) -> None:
    """Without checksums, as older stores are: nothing but the readers' own care is left."""
    folder = tmp_path / "store"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(store, folder)
    (folder / "complete.json").unlink()
    path = folder / data.draw(st.sampled_from(sorted(p.name for p in folder.glob("*.json"))))
    told = json.loads(path.read_text())
    told.pop("checksum", None)
    path.write_text(json.dumps(data.draw(changed(told))))
    taken_or_refused(lambda: _read_all(folder))


@given(data=st.data())
def test_a_shard_of_any_bytes_is_read_or_refused(data: st.DataObject, store: Path, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(store, folder)
    path = sorted(folder.glob("*.safetensors"))[0]
    path.write_bytes(data.draw(damaged(path.read_bytes())))
    taken_or_refused(lambda: _read_all(folder))
    shard = Shard.read(sorted(folder.glob("shard-*.json"))[0])
    file = taken_or_refused(lambda: ShardFile(shard))
    place = taken_or_refused(lambda: file.place(0)) if file else None
    if place is not None:
        reader, out = StateReader(), torch.zeros(place.tokens, place.width, dtype=getattr(torch, place.dtype))
        with_it = [("final", out, 0)]
        taken_or_refused(lambda: reader.read(place, with_it))
        reader.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A served folder of a tiny draft, with its target's embedding inside."""
    from eagle3.checkpoint import save_served
    from eagle3.draft_build import build_draft
    from eagle3.draft_shape import DraftShape
    from eagle3.wiring import Site, Wiring

    sizes = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
    }
    shape = DraftShape(
        **sizes, vocab_size=12, draft_vocab_size=6, num_aux=3, rms_norm_eps=1e-5,
        rope={"rope_theta": 10000.0, "rope_scaling": None}, max_position_embeddings=64,
    )  # fmt: skip
    draft, vocab = build_draft(shape), build_draft_vocab(torch.arange(12), 6)
    draft.d2t.copy_(vocab.d2t)
    draft.t2d.copy_(vocab.t2d)
    folder = tmp_path_factory.mktemp("served") / "served"
    wiring = Wiring((Site(1), Site(2), Site(4)), "final", "llama", 6, 8)
    facts = {"target": {"name": "x"}, "convention_name": "sglang-0.5.23", "vocab": vocab, "with_embedding": True}
    save_served(folder, draft, wiring, **facts)
    return folder


@given(data=st.data())
def test_a_served_folder_of_any_shape_is_loaded_or_refused(data: st.DataObject, served: Path, tmp_path: Path) -> None:
    folder = tmp_path / "served"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(served, folder)
    config = json.loads((folder / "config.json").read_text())
    for key in ("checksum", "weights_sha256"):
        config["redraft"].pop(key, None)
    if data.draw(st.booleans()):
        weights = folder / "model.safetensors"
        weights.write_bytes(data.draw(damaged(weights.read_bytes())))
    else:
        config = data.draw(changed(config))
    (folder / "config.json").write_text(json.dumps(config))
    taken_or_refused(lambda: load_served(folder))


@given(data=st.data(), size=st.integers(1, 5))
def test_a_vocabulary_of_any_bytes_is_loaded_or_refused(data: st.DataObject, size: int, tmp_path: Path) -> None:
    path = tmp_path / "v.safetensors"
    save_vocab(path, build_draft_vocab(torch.arange(6), size))
    path.write_bytes(data.draw(damaged(path.read_bytes())))
    found: DraftVocab | None = taken_or_refused(lambda: load_vocab(path))
    assert found is None or int(found.target_ids.max()) < len(found.t2d)


@given(data=st.data())
def test_a_dump_of_any_bytes_is_loaded_or_refused(data: st.DataObject, tmp_path: Path) -> None:
    path = tmp_path / "d.safetensors"
    save_dump(path, Dump("x", 1, "0.5.23", 4, [torch.arange(3)], [torch.zeros(3, 12)]))
    path.write_bytes(data.draw(damaged(path.read_bytes())))
    taken_or_refused(lambda: load_dump(path))


class TwoLinesError(RedraftError):
    def __str__(self) -> str:
        return "two\nlines"


def test_the_rule_is_one_that_can_be_broken() -> None:
    def refuse_in_two_lines() -> None:
        raise TwoLinesError("x")

    with pytest.raises(KeyError):
        taken_or_refused(lambda: {}["x"])
    with pytest.raises(AssertionError):
        taken_or_refused(refuse_in_two_lines)
