"""Sets in the layouts of other tools, written from what a small target really computes."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eagle3.hf_model import load_target
from eagle3.hf_states import all_site_states

H, VOCAB = 64, 320


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def target_model(tiny_llama_path: Path) -> nn.Module:
    return load_target(tiny_llama_path, "cpu", torch.float32)


@dataclass(frozen=True)
class Made:
    """A sample: ids, mask and the states of every site, bf16 as engines hand them out."""

    ids: Tensor
    mask: Tensor
    states: dict[str, Tensor]

    def pick(self, *sites: str) -> list[Tensor]:
        return [self.states[site].clone() for site in sites]


@pytest.fixture(scope="session")
def samples(target_model: nn.Module) -> list[Made]:
    generator = torch.Generator().manual_seed(3)
    made = []
    for tokens in (24, 9, 40, 17):
        ids = torch.randint(5, VOCAB, (tokens,), generator=generator)
        mask = (torch.arange(tokens) >= tokens // 3).long()
        states = {name: state.bfloat16() for name, state in all_site_states(target_model, ids).items()}
        made.append(Made(ids, mask, states))
    return made


@pytest.fixture
def write_v1(tmp_path: Path, samples: list[Made]) -> Callable[..., Path]:
    def write(*sites: str, folder: str = "v1") -> Path:
        out = tmp_path / folder
        out.mkdir()
        for i, sample in enumerate(samples):
            data = {"input_ids": sample.ids, "loss_mask": sample.mask, "hidden_states": sample.pick(*sites)}
            torch.save(data, out / f"data_{i}.pt")
        torch.save(torch.zeros(VOCAB), out / "token_freq.pt")  # the tool leaves this beside its samples
        (out / "data_config.json").write_text("{}")
        return out

    return write


@pytest.fixture
def write_v0(tmp_path: Path, samples: list[Made]) -> Callable[..., Path]:
    def write(*sites: str) -> Path:
        out = tmp_path / "v0"
        out.mkdir()
        for i, sample in enumerate(samples):
            *inputs, target = sample.pick(*sites)
            data = {
                "input_ids": sample.ids,
                "loss_mask": sample.mask,
                "hidden_state": torch.cat(inputs, dim=1),
                "target": target,
            }
            torch.save(data, out / f"data_{i}.pt")
        return out

    return write


@pytest.fixture
def write_specforge(tmp_path: Path, samples: list[Made]) -> Callable[..., Path]:
    def write(*sites: str, compressed: bool = False) -> Path:
        out = tmp_path / "specforge"
        for i, sample in enumerate(samples):
            folder = out / f"rows_{i // 2 * 2}-{i // 2 * 2 + 2}"
            folder.mkdir(parents=True, exist_ok=True)
            *aux, last = sample.pick(*sites)
            data: dict[str, Any] = {
                "input_ids": sample.ids,
                "loss_mask": sample.mask,
                "aux_hidden_state": torch.cat(aux, dim=1)[None],
                "hidden_state": last[None],
            }
            if compressed:
                with gzip.open(folder / f"data_{i}.ckpt.gz", "wb", compresslevel=1) as handle:
                    torch.save(data, handle)
            else:
                torch.save(data, folder / f"data_{i}.ckpt")
        return out

    return write


@pytest.fixture
def write_hs(tmp_path: Path, samples: list[Made]) -> Callable[..., Path]:
    def write(*sites: str, other_tokens_in: int | None = None) -> Path:
        from datasets import Dataset
        from safetensors.torch import save_file

        out = tmp_path / "rows"
        ids = [sample.ids.tolist() for sample in samples]
        if other_tokens_in is not None:
            ids[other_tokens_in] = [5, *ids[other_tokens_in][1:-1], 6]
        masks = [sample.mask.tolist() for sample in samples]
        lengths = [len(one) for one in ids]
        Dataset.from_dict({"input_ids": ids, "loss_mask": masks, "seq_len": lengths}).save_to_disk(str(out))
        (out / "hidden_states").mkdir()
        for i, sample in enumerate(samples):
            states = torch.stack(sample.pick(*sites), dim=1)  # [T, k, H]
            save_file({"hidden_states": states, "token_ids": sample.ids}, out / "hidden_states" / f"hs_{i}.safetensors")
        return out / "hidden_states"

    return write
