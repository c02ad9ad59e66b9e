from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eagle3.errors import DataError, RedraftError
from eagle3.hf_model import load_target
from eagle3.hf_states import all_site_states
from eagle3.site_match import match_slots

IDS = list(range(5, 45))


def test_every_site_is_what_hugging_face_says_it_is(tiny_llama_path: Path) -> None:
    model = load_target(tiny_llama_path, "cpu", torch.float32)
    states = all_site_states(model, IDS)
    assert list(states) == ["embedding", *(f"layer_{k}" for k in range(1, 8)), "final", "final_normed"]
    with torch.no_grad():
        hidden = model.model(torch.tensor([IDS]), output_hidden_states=True).hidden_states
    for k in range(8):
        assert torch.equal(states["embedding" if k == 0 else f"layer_{k}"], hidden[k][0])
    assert torch.equal(states["final_normed"], hidden[8][0])
    assert torch.equal(model.model.norm(states["final"]), states["final_normed"])
    assert all(state.shape == (len(IDS), 64) and state.dtype == torch.float32 for state in states.values())


def test_states_of_a_bf16_run_are_matched_by_those_of_a_float32_run(tiny_llama_path: Path) -> None:
    exact = all_site_states(tiny_llama_path, IDS, device="cpu")
    rounded = all_site_states(str(tiny_llama_path), IDS, device="cpu", compute_dtype="bfloat16")
    matches = match_slots(torch.cat(list(rounded.values()), dim=1), exact, 64)
    assert [match.site for match in matches] == list(exact)
    assert all(match.sure for match in matches)


def test_hooks_are_gone_afterwards(tiny_llama_path: Path) -> None:
    model = load_target(tiny_llama_path, "cpu", torch.float32)
    all_site_states(model, IDS)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("ids", [[], [3, 320], [-1, 4], [[1, 2]]])
def test_tokens_that_the_target_does_not_know_are_refused(tiny_llama_path: Path, ids: list[int]) -> None:
    with pytest.raises(DataError, match="cannot run the target on these tokens"):
        all_site_states(tiny_llama_path, ids)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RedraftError, match="target folder not found"):
        all_site_states(tmp_path / "none", IDS)
