"""When predicted and served accept length are said to part, and when not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_server import drafted

from eval.alarm import find_alarms
from eval.results import AcceptResult, SetResult, prompt_result, summarize


def served_at(result: AcceptResult, kept: list[int], texts: int = 18, loops: int = 0) -> AcceptResult:
    """`result` with one way of serving left, whose texts kept these numbers of proposals over and over."""
    rows = []
    for place in range(texts):
        tokens = [1, 2] * 30 if place < loops else [(place * 61 + k * k) % 997 for k in range(60)]
        turned = kept[place % len(kept) :] + kept[: place % len(kept)]
        rows.append(prompt_result(f"p{place}", drafted(tokens, turned, 1.0), None))
    overall = summarize("all", rows)
    only = replace(result.served[0], sets=[SetResult(overall, "k", rows)], overall=overall, differences=[])
    return replace(result, served=[only])


@pytest.mark.parametrize(
    ("predicted", "kept", "alarms"),
    [
        # The shipped demo: served on its own wiring 78% and 93% of the predicted gain, on the wrong one 39%.
        ([0.352, 0.43], [1] * 37 + [0] * 63, 0),  # predicted 1.50, served 1.37
        ([0.293, 0.41], [1] * 38 + [0] * 62, 0),  # predicted 1.41, served 1.38
        ([0.293, 0.41], [1] * 16 + [0] * 84, 1),  # predicted 1.41, served 1.16
        # A strong draft, well and wrongly served.
        ([0.8, 0.75], [2, 2, 2, 1, 0, 1, 2], 0),  # predicted 2.40, served 2.43
        ([0.8, 0.75], [1, 1, 1, 0, 0, 1, 0, 1], 1),  # served 1.62
        ([0.3, 0.2], [2, 2, 1, 2], 1),  # far more than predicted
    ],
)
def test_the_bound_follows_the_predicted_gain(accept_result, predicted, kept, alarms) -> None:
    dice = [kept[(37 * k) % len(kept)] for k in range(len(kept))]
    result = served_at(replace(accept_result, predicted_acceptance=predicted), dice)
    found = find_alarms(result, 0.3, ["next"])
    assert len(found) == alarms, (result.predicted_tau, result.served[0].overall.tau)
    for alarm in found:
        assert alarm.commands == ["next"]
        assert ("below" in alarm.headline) == (alarm.served < alarm.predicted)


def test_no_alarm_without_a_prediction_or_a_verify(accept_result) -> None:
    assert find_alarms(served_at(replace(accept_result, predicted_acceptance=None), [0]), 0.3, []) == []
    silent = served_at(replace(accept_result, predicted_acceptance=[0.9, 0.9]), [0], texts=0)
    assert find_alarms(silent, 0.3, []) == []


def test_the_choice_of_prompts_alone_raises_no_alarm(accept_result) -> None:
    """Half the texts keep everything, half nothing: tau is far from predicted, and its interval wide."""
    result = replace(accept_result, predicted_acceptance=[0.9, 0.9])
    rows = [prompt_result(f"p{k}", drafted(list(range(60)), [2 * (k % 2)], 1.0), None) for k in range(6)]
    overall = summarize("all", rows)
    mixed = replace(result, served=[replace(result.served[0], overall=overall)])
    assert result.predicted_tau is not None and overall.tau < result.predicted_tau - 0.3 * (result.predicted_tau - 1)
    assert find_alarms(mixed, 0.3, []) == []
    (alarm,) = find_alarms(served_at(result, [1, 0]), 0.3, [])
    assert "reads the layer ids in another way" in " ".join(alarm.causes)
    assert alarm.positions == "1: 90% against 51%, 2: 90% against 0%"


def test_causes_fit_the_case(accept_result) -> None:
    loops = served_at(replace(accept_result, predicted_acceptance=[0.3, 0.2]), [2], loops=4)
    (alarm,) = find_alarms(loops, 0.3, [])
    assert alarm.causes[0].startswith("4 of 18 texts repeat themselves")
    assert find_alarms(loops, 0.3, [], tree=True) == []  # a tree keeps more than the predicted chain
    low = replace(served_at(replace(accept_result, predicted_acceptance=[0.9, 0.9]), [0]), temperature=0.7)
    low.served[0].differences = ["slot 0 was trained on layer 3; the server feeds layer 2", "this is what x feeds"]
    low.served[0].failures = {"chat/a": "timeout"}
    (alarm,) = find_alarms(low, 0.3, [], tree=True)
    assert "slot 0 was trained on layer 3" in alarm.causes[0] and "this is what" not in alarm.causes[0]
    words = " ".join(alarm.causes)
    assert "greedy decoding; this was sampled at 0.7" in words and "chat/a" in words


def test_the_local_measure_alarms_too(accept_result, tmp_path) -> None:
    """Invented results of the page's fixture: natively served, the draft keeps 1 of 4 where 1.84 was predicted."""
    found = find_alarms(accept_result, 0.3, ["python -m eval.probe draft"])
    assert [(a.mode, a.served) for a in found] == [("matched", 2.25), ("native", 1.25)]
