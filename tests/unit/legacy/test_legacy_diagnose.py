from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from data_prep.legacy.diagnose import Diagnosis, diagnose
from data_prep.legacy.explain import explain_diagnosis
from data_prep.legacy.formats import find_files, read_record
from data_prep.legacy.judge import TableJudge, TargetJudge
from eagle3.conventions import Shape
from eagle3.errors import WiringError
from eagle3.target_weights import TargetWeights

H = 64
SHAPE = Shape("llama", 8, H)
read = partial(read_record, hidden_size=H)


def by_target(folder: Path, model: nn.Module, **options: Any) -> Diagnosis:
    return diagnose(find_files(folder), read, TargetJudge(model), **options)


def by_tables(folder: Path, target: Path) -> Diagnosis:
    return diagnose(find_files(folder), read, TableJudge.from_weights(TargetWeights(target)))


def test_the_origin_story_is_told(write_v1: Callable[..., Path], target_model: nn.Module) -> None:
    found = by_target(write_v1("embedding", "layer_2", "layer_4", "layer_6"), target_model)
    assert found.held == {"embedding": 0, "layer_2": 1, "layer_4": 2, "layer_6": 3}
    assert found.sure_in == (4, 4, 4, 4)
    assert (found.inputs, found.teacher) == (["embedding", "layer_2", "layer_4"], "layer_6")
    said = "\n".join(explain_diagnosis(found, SHAPE))
    assert "was fed embedding, layer_2, layer_4 and taught by layer_6" in said
    assert "layer_6 is not what the target's head reads" in said
    assert "Only the true final state is missing" in said
    assert "ids [-1, 1, 3] on" in said  # how SGLang is told embedding, 2, 4 on a Llama target


def test_every_site_and_both_final_states_are_told_apart(
    write_v1: Callable[..., Path], target_model: nn.Module
) -> None:
    sites = ("layer_1", "layer_7", "final_normed", "final")
    assert list(by_target(write_v1(*sites), target_model).held) == list(sites)


@pytest.mark.parametrize(
    ("writer", "teacher", "said"),
    [
        ("write_v0", "final_normed", "so it was normed twice"),
        ("write_v0", "final", "it can be converted as it is"),
        ("write_specforge", "final_normed", "it can be converted as it is"),
        ("write_specforge", "final", "so its targets were wrong"),
    ],
)
def test_a_teacher_on_the_wrong_side_of_the_norm_is_told(
    request: pytest.FixtureRequest, target_model: nn.Module, writer: str, teacher: str, said: str
) -> None:
    found = by_target(request.getfixturevalue(writer)("layer_2", "layer_4", "layer_5", teacher), target_model)
    assert found.teacher == teacher
    lines = explain_diagnosis(found, SHAPE)
    assert said in "\n".join(lines)
    assert any("normed twice" in line or "targets were wrong" in line for line in lines) == ("converted" not in said)


def test_the_tables_alone_name_the_embedding_and_the_normed_state(
    write_v1: Callable[..., Path], tiny_llama_path: Path
) -> None:
    found = by_tables(write_v1("embedding", "layer_2", "final", "final_normed"), tiny_llama_path)
    assert [slot.site for slot in found.slots] == ["embedding", None, None, "final_normed"]
    assert "the head reads the next token off it in" in found.slots[3].evidence
    said = "\n".join(explain_diagnosis(found, SHAPE))
    assert "only a run of the target can tell" in said


def test_the_head_confirms_the_normed_state_on_text_of_the_target(
    tmp_path: Path, target_model: nn.Module, tiny_llama_path: Path
) -> None:
    from eagle3.hf_states import all_site_states

    with torch.no_grad():
        ids = target_model.generate(torch.tensor([[7, 9, 11]]), max_new_tokens=40, do_sample=False)[0]  # type: ignore[operator]
    state = all_site_states(target_model, ids)["final_normed"].bfloat16()
    torch.save({"input_ids": ids, "hidden_states": [state]}, tmp_path / "data_0.pt")
    (slot,) = by_tables(tmp_path, tiny_llama_path).slots
    assert slot.site == "final_normed"
    share = int(slot.evidence.rsplit("in ", 1)[1].split("%")[0])
    assert share > 80  # all but the prompt's rows, and ties that bf16 turns


def test_an_embedding_file_alone_will_do(tmp_path: Path, write_v1: Callable[..., Path], tiny_llama_path: Path) -> None:
    from safetensors.torch import save_file

    table = TargetWeights(tiny_llama_path).embedding()
    save_file({"model.embed_tokens.weight": table, "other": torch.zeros(3)}, tmp_path / "embedding.safetensors")
    judge = TableJudge.from_file(tmp_path / "embedding.safetensors")
    found = diagnose(find_files(write_v1("layer_2", "embedding", "layer_4", "layer_6")), read, judge)
    assert [slot.site for slot in found.slots] == [None, "embedding", None, None]


def test_states_of_another_target_are_not_named(
    write_v1: Callable[..., Path], target_model: nn.Module, tmp_path: Path
) -> None:
    from data_prep.targets.tiny_llama import make_tiny_llama
    from eagle3.hf_model import load_target

    other = load_target(make_tiny_llama(tmp_path / "other", seed=1), "cpu", torch.float32)
    found = by_target(write_v1("layer_2", "layer_4", "layer_6", "final"), other)
    assert [slot.site for slot in found.slots] == [None] * 4
    assert "another target" in "\n".join(explain_diagnosis(found, SHAPE))


def test_a_file_that_disagrees_is_named(write_v1: Callable[..., Path], target_model: nn.Module, samples: Any) -> None:
    folder = write_v1("embedding", "layer_2", "layer_4", "layer_6")
    odd = {"input_ids": samples[2].ids, "loss_mask": samples[2].mask}
    torch.save(
        {**odd, "hidden_states": samples[2].pick("layer_2", "layer_4", "layer_6", "final")}, folder / "data_2.pt"
    )
    with pytest.raises(WiringError) as err:
        by_target(folder, target_model)
    assert "data_2.pt" in str(err.value)
    assert "hidden_states[0] is layer_2; in 3 of 4 samples it is embedding" in str(err.value)
    found = by_target(folder, target_model, skip_bad=True)
    assert found.held["embedding"] == 0
    assert len(found.dissent) == 1
    torch.save({**odd, "hidden_states": samples[2].pick("layer_2", "layer_4")}, folder / "data_2.pt")
    with pytest.raises(WiringError, match="a speculators-v1 file of 2 slots; most are speculators-v1 files of 4"):
        by_target(folder, target_model)


def test_states_of_other_tokens_are_a_disagreement(
    write_v1: Callable[..., Path], target_model: nn.Module, samples: Any
) -> None:
    folder = write_v1("layer_2", "layer_4", "layer_6", "final")
    data = {"input_ids": samples[1].ids.flip(0), "loss_mask": samples[1].mask}
    torch.save(
        {**data, "hidden_states": samples[1].pick("layer_2", "layer_4", "layer_6", "final")}, folder / "data_1.pt"
    )
    with pytest.raises(WiringError, match=r"data_1.pt\]: its hidden_states\[0\] is something else"):
        by_target(folder, target_model)
