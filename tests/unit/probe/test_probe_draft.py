"""The draft probe: a draft fitted on one wiring is recognised among the others, whatever its folder says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from eagle3.conventions import Shape
from eagle3.errors import WiringError
from eagle3.wiring import Site, Wiring
from eval.probe.candidates import Candidates
from eval.probe.scoring import Score, blocks_of, lead
from eval.probe.texts import continue_greedily

Probe = Callable[..., tuple[int, dict[str, Any]]]
Fitted = Callable[..., Path]
Wire = Callable[..., Wiring]


@pytest.fixture
def judge(probe: Probe, target: Path, store: Callable[..., Path], wire: Wire) -> Probe:
    def run(folder: Path, *more: Any, sites: tuple[int, ...] = (2, 4, 5)) -> tuple[int, dict[str, Any]]:
        held = store(wire(*sites))
        return probe("draft", "--draft", folder, "--target", target, "--store", held, "--steps", 2, *more)

    return run


def said(verdict: dict[str, Any]) -> str:
    return " ".join([verdict["what"], *verdict["reasons"], verdict["mend"]])


def test_true_wiring_wins_by_far(judge: Probe, fitted: Fitted, wire: Wire) -> None:
    code, verdict = judge(fitted(wire(2, 4, 6)))
    assert (code, verdict["verdict"]) == (0, "agrees")
    assert verdict["facts"]["best"] == ["layer_2", "layer_4", "layer_6"] == verdict["facts"]["claim"]
    by_name = {tuple(one["aux"]): one for one in verdict["facts"]["candidates"]}
    best = by_name["layer_2", "layer_4", "layer_6"]
    assert best["first_step"] > 0.99  # fitted in closed form: right at every first step
    assert all(one["first_step"] < 0.7 for aux, one in by_name.items() if one is not best)
    assert ("layer_4", "layer_2", "layer_6") in by_name and ("embedding", "layer_2", "layer_4") in by_name
    assert verdict["facts"]["rows"] == 4 * (38 - 5)  # rows whose two steps are both judged: mask on from token 4


def test_draft_that_was_trained_on_something_else_is_found_out(judge: Probe, fitted: Fitted, wire: Wire) -> None:
    folder = fitted(wire(0, 2, 4), claimed=wire(2, 4, 5))  # the fault of dropping the last captured tensor by position
    code, verdict = judge(folder)
    assert (code, verdict["verdict"]) == (1, "disagrees")
    assert verdict["facts"]["best"] == ["embedding", "layer_2", "layer_4"]
    assert "trained on cat(embedding, layer_2, layer_4), not on cat(layer_2, layer_4, layer_5)" in verdict["what"]
    assert "shifted by one slot" in said(verdict) and "retrain" in verdict["mend"]
    table = [row["wiring"] for row in verdict["rows"]]
    assert "layer_2, layer_4, layer_5 *" in table  # the claim is marked and never cut off


def test_off_by_one_convention_is_found_out(judge: Probe, fitted: Fitted, wire: Wire) -> None:
    code, verdict = judge(fitted(wire(3, 5, 6), claimed=wire(2, 4, 5)))
    assert code == 1 and verdict["facts"]["best"] == ["layer_3", "layer_5", "layer_6"]
    assert "one layer" in said(verdict)


def test_swapped_slots_are_found_out(judge: Probe, fitted: Fitted, wire: Wire) -> None:
    code, verdict = judge(fitted(wire(5, 4, 2), claimed=wire(2, 4, 5)))
    assert code == 1 and verdict["facts"]["best"] == ["layer_5", "layer_4", "layer_2"]


def test_expectation_goes_before_the_folders_word(judge: Probe, fitted: Fitted, wire: Wire) -> None:
    folder = fitted(wire(2, 4, 6))
    assert judge(folder, "--expect", "layer_2,layer_4,layer_6")[0] == 0
    code, verdict = judge(folder, "--expect", "native")
    assert code == 1 and verdict["facts"]["claim"] == ["layer_2", "layer_4", "layer_5"]


def test_folder_of_another_tool_gets_a_name(judge: Probe, fitted: Fitted, wire: Wire) -> None:
    folder = fitted(wire(2, 4, 6), other_tool_ids=[2, 4, 6])  # vLLM's way to count, SGLang's key
    code, verdict = judge(folder)
    assert code == 0 and verdict["facts"]["claim"] is None
    assert verdict["facts"]["best"] == ["layer_2", "layer_4", "layer_6"]
    best = next(one for one in verdict["facts"]["candidates"] if one["aux"] == verdict["facts"]["best"])
    assert any("ids [2, 4, 6] to" in reason for reason in best["why"])


def test_all_of_reaches_what_no_convention_names(judge: Probe, fitted: Fitted, wire: Wire) -> None:
    folder = fitted(wire(1, 2, 7), claimed=wire(2, 4, 5))
    assert judge(folder)[0] == 2  # under no candidate does it predict
    code, verdict = judge(folder, "--all-of", "layer_1,layer_2,layer_6,layer_7")
    assert code == 1 and verdict["facts"]["best"] == ["layer_1", "layer_2", "layer_7"]


def test_a_draft_that_learned_nothing_cannot_be_told(judge: Probe, fitted: Fitted, wire: Wire) -> None:
    code, verdict = judge(fitted(wire(2, 4, 6), spoilt=True))
    assert code == 2 and ("next to nothing" in verdict["what"] or "too close" in verdict["what"])


def test_slots_that_the_draft_ignores_cannot_be_told(judge: Probe, fitted: Fitted, wire: Wire) -> None:
    code, verdict = judge(fitted(wire(2, 4, 6), slots=[0]))  # its other slots are read with weight 0
    assert code == 2 and "too close to tell" in verdict["what"]


def test_too_little_text_is_refused(judge: Probe, fitted: Fitted, wire: Wire) -> None:
    code, verdict = judge(fitted(wire(2, 4, 6)), "--records", 1)
    assert code == 2 and "33 rows" in said(verdict)


def test_stored_states_need_no_target_in_memory(
    judge: Probe, fitted: Fitted, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    import eval.probe.commands as commands

    monkeypatch.setattr(commands, "load_target", lambda *_a, **_k: pytest.fail("the target must not be loaded"))
    folder = fitted(wire(0, 2, 4), claimed=wire(2, 4, 5))
    code, verdict = judge(folder, "--stored-states")
    assert code == 1 and verdict["facts"]["best"] == ["embedding", "layer_2", "layer_4"]
    held = {"embedding", "layer_2", "layer_4", "layer_5"}
    assert all(set(one["aux"]) <= held for one in verdict["facts"]["candidates"])


def test_prompts_are_answered_by_the_target(probe: Probe, target: Path, fitted: Fitted, wire: Wire) -> None:
    args = ("--target", target, "--records", 3, "--max-tokens", 48, "--steps", 2)
    code, verdict = probe("draft", "--draft", fitted(wire(2, 4, 6)), *args)
    assert code in (0, 1, 2) and verdict["facts"]["rows"] >= 64  # random text: only that it was scored is certain


def test_greedy_answer_is_the_models_own(model: LlamaForCausalLM) -> None:
    ids = [5, 77, 130, 9, 201]
    made = model.generate(
        torch.tensor([ids]), max_new_tokens=12, do_sample=False, attention_mask=torch.ones(1, 5, dtype=torch.int64)
    )
    assert continue_greedily(model, ids, 12) == made[0, 5:].tolist()


@pytest.mark.parametrize(("better", "clear"), [(6.0, True), (0.2, False)])
def test_lead_is_clear_only_when_it_exceeds_the_noise(better: float, clear: bool) -> None:
    random = np.random.default_rng(1)
    rows = np.full(40, 16.0)
    base = random.normal(10, 3, 40)
    wiring = Wiring((Site(1),), "final", "llama", 8, 64)
    one = Score(wiring, [], base + random.normal(better, 2, 40), base, rows)
    low, high = lead(one, Score(wiring, [], base, base, rows))
    assert low < one.tau - Score(wiring, [], base, base, rows).tau < high
    assert (low > 0) is clear


def test_blocks_keep_every_row_once() -> None:
    kept, first, rows = blocks_of([torch.tensor([0, 1, 2] * 11), torch.tensor([3])])
    assert rows.tolist() == [16, 16, 1, 1] and kept.sum() == 36 and first.sum() == 23


def test_candidates_are_distinct_and_fit_the_target() -> None:
    out = Candidates(Shape("kimi_k25", 61, 7168), 3)
    out.add_readings([2, 30, 58])
    read = {tuple(wiring.names): reasons for wiring, reasons in out}
    assert set(read) == {("layer_2", "layer_30", "layer_58"), ("layer_3", "layer_31", "layer_59")}
    out.add_mistakes((Site(58), Site(59), Site(60)), "x")
    names = [tuple(wiring.names) for wiring, _ in out]
    assert len(set(names)) == len(names) and ("embedding", "layer_58", "layer_59") in names
    assert all(wiring.aux[-1].layer <= 60 for wiring, _ in out)
    with pytest.raises(WiringError, match="too many combinations"):
        out.add_all([Site(k) for k in range(61)])


def test_model_is_not_left_with_hooks(judge: Probe, fitted: Fitted, wire: Wire, model: nn.Module) -> None:
    judge(fitted(wire(2, 4, 6)))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
