"""What the worker reads by hooks, on a model that behaves as SGLang's do: fused norms that write in place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from data_prep.capture.sglang import RANK_LIMIT
from data_prep.capture.sglang_worker import worker_taps
from data_prep.capture.sglang_worker.worker_taps import Decoder, Taps, disagreement, probe

H, LAYERS = 8, 5


class FusedNorm(nn.Module):
    """Adds layer output and residual in place, then norms in place: what it was given is gone afterwards."""

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if residual is None:
            return hidden / hidden.float().square().mean(-1, keepdim=True).sqrt().to(hidden.dtype)
        residual.add_(hidden)
        hidden.copy_(residual / residual.float().square().mean(-1, keepdim=True).sqrt().to(hidden.dtype))
        return hidden, residual


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.mix = FusedNorm(), nn.Linear(H, H, bias=False)

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            residual = hidden.clone()
            normed = self.input_layernorm(hidden)
        else:
            normed, residual = self.input_layernorm(hidden, residual)
        return self.mix(normed), residual


class LogitsProcessor(nn.Module):
    def forward(self, input_ids: torch.Tensor | None, hidden: torch.Tensor, aux: list[torch.Tensor]) -> Any:
        return SimpleNamespace(hidden_states=torch.cat(aux, dim=-1))


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(32, H)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = FusedNorm()
        self.layers_to_capture: list[int] = []


class EngineLike(nn.Module):
    """Captures `hidden + residual` before the layers asked for, as SGLang's model files do."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.logits_processor = Body(), LogitsProcessor()
        self.wraps = False  # a wrapper embeds the tokens itself and gives the text model none

    def forward(self, ids: torch.Tensor) -> Any:
        hidden, residual, aux = self.model.embed_tokens(ids), None, []
        for k, layer in enumerate(self.model.layers):
            if k in self.model.layers_to_capture:
                aux.append(hidden.clone() if residual is None else hidden + residual)
            hidden, residual = layer(hidden, residual)
        hidden, _ = self.model.norm(hidden, residual)
        return self.logits_processor(None if self.wraps else ids, hidden, aux)

    def plain(self, ids: torch.Tensor) -> list[torch.Tensor]:
        """The residual stream before each layer, at the end, and its norm: LAYERS + 2 tensors [T, H]."""
        norm = FusedNorm()
        stream = self.model.embed_tokens(ids)
        out = [stream]
        for layer in self.model.layers:
            stream = stream + layer.mix(norm(stream))
            out.append(stream)
        return [*out, norm(stream)]


@pytest.fixture
def model() -> EngineLike:
    torch.manual_seed(0)
    return EngineLike().eval()


@pytest.mark.parametrize("teacher", ["final", "final_normed"])
def test_taps_read_the_aux_states_the_teacher_and_every_site(model: EngineLike, teacher: str) -> None:
    model.model.layers_to_capture = [0, 2, 4]
    ids = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
    taps = Taps(Decoder(model, LAYERS), teacher, measure=5)
    with torch.no_grad(), taps:
        model(ids)
    with torch.no_grad():
        want = model.plain(ids)
    assert taps.tokens is not None and taps.aux is not None and taps.teacher_state is not None
    assert torch.equal(taps.tokens, ids)
    torch.testing.assert_close(taps.aux, torch.cat([want[0], want[2], want[4]], dim=1))
    torch.testing.assert_close(taps.teacher_state, want[LAYERS if teacher == "final" else LAYERS + 1])
    names = ["embedding", "layer_1", "layer_2", "layer_3", "layer_4", "final", "final_normed"]
    assert sorted(taps.sites) == sorted(names)
    for name, state in zip(names, want, strict=True):
        torch.testing.assert_close(taps.sites[name], state[:5])


@pytest.mark.parametrize("wraps", [False, True])
def test_tokens_are_a_copy_for_the_engine_fills_its_own_anew(model: EngineLike, wraps: bool) -> None:
    model.model.layers_to_capture, model.wraps = [0, 2, 4], wraps
    ids = torch.tensor([3, 1, 4, 1, 5])
    taps = Taps(Decoder(model, LAYERS), "final")
    with torch.no_grad(), taps:
        model(ids)
    ids.fill_(0)
    assert taps.tokens is not None and taps.tokens.tolist() == [3, 1, 4, 1, 5]


def test_a_wrapper_that_keeps_the_tokens_to_itself_is_read_at_the_embedding(model: EngineLike) -> None:
    model.wraps, model.model.layers_to_capture = True, [1]
    taps = Taps(Decoder(model, LAYERS), "final")
    with torch.no_grad(), taps:
        model(torch.tensor([3, 1, 4]))
    assert taps.tokens is not None and taps.tokens.tolist() == [3, 1, 4]


def test_hooks_leave_with_the_block(model: EngineLike) -> None:
    model.model.layers_to_capture = [1]
    decoder = Decoder(model, LAYERS)
    first = Taps(decoder, "final")
    with torch.no_grad(), first:
        model(torch.tensor([1, 2]))
    kept = first.aux
    with torch.no_grad():
        model(torch.tensor([3, 4, 5]))
    assert first.aux is kept and not first.sites


def test_a_model_of_another_depth_is_refused(model: EngineLike) -> None:
    with pytest.raises(ValueError, match="EngineLike: found no 7 decoder layers"):
        Decoder(model, 7)


def test_ranks_that_hold_the_same_agree_and_partial_sums_do_not(model: EngineLike) -> None:
    """Two ranks whose last all-reduce is still owed: each holds the residual and half of the layer's output."""
    gen = torch.Generator().manual_seed(1)
    residual = 20 * torch.randn(40, H, generator=gen)  # the stream is far larger than what one layer adds
    parts = [torch.randn(40, H, generator=gen) for _ in range(2)]
    whole = (residual + parts[0] + parts[1]).bfloat16()
    assert disagreement(probe({"aux": whole}), probe({"aux": whole.clone()})) == {"aux": 0.0}
    halves = [(residual + part).bfloat16() for part in parts]
    assert disagreement(probe({"aux": halves[0]}), probe({"aux": halves[1]}))["aux"] > RANK_LIMIT


def test_probes_that_cannot_be_compared_differ_without_limit() -> None:
    state = torch.ones(3, H)
    nan = state.clone()
    nan[1, 2] = float("nan")
    assert disagreement(probe({"aux": state}), {}) == {"aux": float("inf")}
    assert disagreement(probe({"aux": state}), probe({"aux": nan})) == {"aux": float("inf")}
    assert disagreement(probe({"aux": state}), probe({"aux": state[:2]})) == {"aux": float("inf")}


def test_a_probe_is_small_whatever_the_batch() -> None:
    (rows,) = probe({"aux": torch.randn(5000, 2048)}).values()
    assert (len(rows), len(rows[0])) == (worker_taps.PROBE_ROWS, worker_taps.PROBE_COLUMNS)
