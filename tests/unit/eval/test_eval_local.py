"""The local engine against plain decoding, a cache-free reference, and drafts whose verdicts are known beforehand."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from eval_models import make_target, make_wiring
from safetensors.torch import load_file, save_file

from eagle3.draft import DraftCache
from eagle3.errors import DataError, IntegrityError, RedraftError, WiringError
from eagle3.hf_model import load_target
from eagle3.wiring import Wiring
from eval.engines.local import LocalEngine

PROMPTS = [[1, 2, 3, 4, 5], [6], [0, 0, 3, 1, 4, 1, 5, 2, 6, 5, 3, 5]]


@torch.inference_mode()
def reference(target, draft, wiring: Wiring, prompt: list[int], max_new: int, steps: int):
    """Greedy chain speculation with no cache at all: everything is recomputed over the whole text each time."""

    def states(ids):
        out = target(input_ids=torch.tensor([ids]), output_hidden_states=True)
        hidden = torch.cat([out.hidden_states[site.layer][0] for site in wiring.aux], dim=-1)
        return out.logits[0].argmax(-1).tolist(), hidden

    text = [*prompt, states(prompt)[0][-1]]
    histogram = [0] * (steps + 1)
    while len(text) - len(prompt) < max_new:
        _, features = states(text[:-1])
        rows, ids, proposals = draft.fuse(features), text[1:], []
        for _ in range(steps):
            tokens, places = torch.tensor(ids), torch.arange(len(ids))
            last = draft.serve_step(rows, tokens, places, DraftCache())[-1:]
            choice = draft.logits(last).argmax(-1)
            proposals.append(int(choice + draft.d2t[choice]))
            rows, ids = torch.cat([rows, last]), [*ids, proposals[-1]]
        wanted = states([*text, *proposals])[0][len(text) - 1 :]
        kept = next((k for k in range(steps) if proposals[k] != wanted[k]), steps)
        histogram[kept] += 1
        text += [*proposals[:kept], wanted[kept]]
    return text[len(prompt) : len(prompt) + max_new], histogram


@pytest.mark.parametrize("layers", [(0, 4, 2), (2, 4, 5), (7, 3, 1)])
@pytest.mark.parametrize("steps", [1, 4])
def test_equals_a_cache_free_reference(target, draft, layers, steps) -> None:
    wiring = make_wiring(*layers)
    engine = LocalEngine(target, draft, wiring)
    kept = 0
    for prompt in PROMPTS[::2]:
        made = engine.generate(prompt, 16, steps)
        tokens, histogram = reference(target, draft, wiring, prompt, 16, steps)
        assert made.tokens == tokens
        assert made.correct_histogram == histogram
        kept += made.correct
    assert kept > 0  # otherwise cropping and re-reading were never exercised


def test_wiring_reaches_the_draft(target, draft) -> None:
    """Serving other sites, or the same in another order, must change what the draft proposes."""
    seen = {
        tuple(
            tuple(LocalEngine(target, draft, make_wiring(*layers)).generate(p, 40, 3).correct_histogram)
            for p in PROMPTS
        )
        for layers in [(0, 4, 2), (4, 2, 0), (1, 4, 2)]
    }
    assert len(seen) == 3


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_greedy_text_is_that_of_plain_decoding(target, draft, wiring, steps) -> None:
    engine = LocalEngine(target, draft, wiring)
    for prompt in PROMPTS:
        assert engine.generate(prompt, 30, steps).tokens == engine.baseline(prompt, 30).tokens


def test_plain_decoding_is_the_targets_own_greedy(target, draft, wiring) -> None:
    engine = LocalEngine(target, draft, wiring)
    for prompt in PROMPTS:
        out = target.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)[0, len(prompt) :].tolist()
        assert engine.baseline(prompt, 20).tokens == out


def test_a_draft_that_knows_the_text_is_kept_whole(target, wiring, told) -> None:
    prompt = PROMPTS[0]
    plain = LocalEngine(target, told(target, []), wiring).baseline(prompt, 60).tokens
    made = LocalEngine(target, told(target, prompt + plain), wiring).generate(prompt, 41, 3)
    assert made.tokens == plain[:41]
    assert (made.verifies, made.correct, made.proposed) == (10, 30, 30)
    assert made.correct_histogram == [0, 0, 0, 10]
    assert made.tau == 4.0


def test_counts_of_known_errors(target, wiring, told) -> None:
    """The draft is wrong at generated tokens 2 and 4.

    Token 0 is the prefill's. Verify 1 proposes 1, 2, 3 and yields 1, 2; verify 2 proposes 3, 4, 5 and yields 3, 4;
    verify 3 proposes 5, 6, 7 and yields 5 to 8.
    """
    prompt = PROMPTS[0]
    plain = LocalEngine(target, told(target, []), wiring).baseline(prompt, 60).tokens
    draft = told(target, prompt + plain, wrong={len(prompt) + 2, len(prompt) + 4})
    made = LocalEngine(target, draft, wiring).generate(prompt, 9, 3)
    assert made.correct_histogram == [0, 2, 0, 1]
    assert made.tried == [3, 3, 1]
    assert made.right == [3, 1, 1]
    assert made.tau == pytest.approx(1 + 5 / 3)
    assert made.tokens == plain[:9]


@pytest.mark.parametrize("steps", [1, 3, 4])
def test_stops_at_the_end_token(wiring, told, steps) -> None:
    """An end token inside a kept chain ends the text there, and what stood behind it is not held against the draft."""
    prompt = PROMPTS[0]
    free = make_target(64)
    plain = LocalEngine(free, told(free, []), wiring).baseline(prompt, 40).tokens
    place = next(k for k in range(3, 40) if plain[k] not in plain[:k])
    ending = make_target(64, eos=plain[place])
    draft = told(ending, prompt + plain)
    engine = LocalEngine(ending, draft, wiring)
    made = engine.generate(prompt, 40, steps)
    assert made.tokens == plain[: place + 1] == engine.baseline(prompt, 40).tokens
    assert made.ended
    assert made.right == made.tried  # never refused
    assert made.correct == sum(made.right)


def test_the_limit_is_kept(target, wiring, told) -> None:
    prompt = PROMPTS[0]
    plain = LocalEngine(target, told(target, []), wiring).baseline(prompt, 30).tokens
    engine = LocalEngine(target, told(target, prompt + plain), wiring)
    for limit in (1, 2, 5, 6):
        made = engine.generate(prompt, limit, 3)
        assert made.tokens == plain[:limit]
        assert not made.ended
    assert engine.generate(prompt, 1, 3).tau == 1.0


def test_two_engines_share_a_target_without_touching_each_other(target, draft) -> None:
    first, second = (LocalEngine(target, draft, make_wiring(*layers)) for layers in [(0, 4, 2), (2, 4, 5)])
    before = first.generate(PROMPTS[2], 30, 3)
    second.generate(PROMPTS[2], 30, 3)
    assert first.generate(PROMPTS[2], 30, 3).correct_histogram == before.correct_histogram
    assert not any(layer._forward_pre_hooks for layer in first.layers)  # no hook outlives its text


def test_top_gap(target, draft, wiring) -> None:
    logits = target(torch.tensor([PROMPTS[0]])).logits[0, -1].detach().topk(2).values
    gap = LocalEngine(target, draft, wiring).top_gap(PROMPTS[0])
    assert gap == pytest.approx(float(logits[0] - logits[1]), abs=1e-5)


def test_a_served_folder_target_loads(tmp_path, target, draft, wiring) -> None:
    target.save_pretrained(tmp_path)
    made = LocalEngine(tmp_path, draft, wiring, dtype=torch.float64).generate(PROMPTS[0], 12, 3)
    assert made.tokens == LocalEngine(target, draft, wiring).generate(PROMPTS[0], 12, 3).tokens


def test_refusals_are_one_line(tmp_path, target, draft, wiring) -> None:
    with pytest.raises(WiringError, match="4 sites of width 16 make 64; fc takes 48"):
        LocalEngine(target, draft, make_wiring(0, 1, 2, 3))
    with pytest.raises(WiringError, match="another number of decoder layers"):
        LocalEngine(target, draft, Wiring(wiring.aux, "final", "llama", 9, 16))
    engine = LocalEngine(target, draft, wiring)
    with pytest.raises(DataError, match="does not fit"):
        engine.generate([1] * 250, 10, 3)
    with pytest.raises(DataError, match="empty"):
        engine.baseline([], 10)
    with pytest.raises(RedraftError, match="not found"):
        load_target(tmp_path / "none", "cpu", torch.float32)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(RedraftError, match="cannot load the target") as error:
        load_target(tmp_path, "cpu", torch.float32)
    assert "\n" not in str(error.value)


def test_a_target_without_its_head_is_not_served(tiny_llama_path: Path, tmp_path: Path) -> None:
    """transformers would fill the head with random numbers; capture, which never runs it, may go on."""
    folder = tmp_path / "headless"
    shutil.copytree(tiny_llama_path, folder)
    tensors = load_file(folder / "model.safetensors")
    assert tensors.pop("lm_head.weight", None) is not None
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(IntegrityError, match="lm_head"):
        load_target(folder, "cpu", torch.float32, with_head=True)
    load_target(folder, "cpu", torch.float32)
