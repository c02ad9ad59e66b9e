"""What the probe's tests plant faults in: a stand-in server, stores, and a draft that truly depends on its wiring."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import httpx
import torch
from torch import Tensor, nn

from data_prep.capture.hf import HFCapture
from data_prep.capture.sample import CapturedSample
from data_prep.extract import extract
from data_prep.store import StoreManifest
from eagle3.atomic import read_json, write_json
from eagle3.checkpoint import save_served
from eagle3.draft import DraftShape, Eagle3Draft
from eagle3.hf_states import all_site_states
from eagle3.target_weights import TargetWeights, rope_parameters
from eagle3.vocab import build_draft_vocab
from eagle3.wiring import Wiring
from eval.probe.scoring import TargetEnd

Feed = Callable[[dict[str, Tensor], list[int]], Tensor]

INFO: dict[str, Any] = {
    "version": "0.5.23",
    "tp_size": 1,
    "speculative_algorithm": None,
    "enable_return_aux_hidden_states": True,
    "aux_hidden_state_capture": "eagle3",
    "return_aux_hidden_state_layer_ids": None,
    "enable_return_hidden_states": False,
    "return_hidden_states_mode": "full",
    "disable_radix_cache": True,
    "chunked_prefill_size": -1,
}


def feed_sites(*names: str) -> Feed:
    """What a faultless server feeds: these sites, joined."""
    return lambda states, _ids: torch.cat([states[name] for name in names], dim=-1)


class FakeServer:
    """Answers as SGLang does, with states that `feed` makes of the target's own, rounded to bfloat16.

    Args:
        model: the target.
        feed: what is fed; None = the sites of the default wiring.
        info: changes to /server_info.
        edit: changes the JSON of one prompt's answer.
        batch_edit: changes the list of answers of a batch.
        raw: answers /generate with this response instead.
        decode: what is fed on generated tokens; None = as on prompts.
    """

    def __init__(
        self,
        model: nn.Module,
        feed: Feed | None = None,
        info: dict[str, Any] | None = None,
        edit: Callable[[dict[str, Any]], None] = lambda _answer: None,
        batch_edit: Callable[[list[Any]], list[Any]] = lambda answers: answers,
        raw: httpx.Response | None = None,
        decode: Feed | None = None,
    ) -> None:
        self.model, self.info = model, INFO | (info or {})
        self.feed = feed or feed_sites("layer_2", "layer_4", "layer_5")
        self.edit, self.batch_edit, self.raw = edit, batch_edit, raw
        self.decode = decode
        self.asked: list[Any] = []

    def answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/server_info":
            return httpx.Response(200, json=self.info)
        if request.url.path != "/generate":
            return httpx.Response(404, text="Not Found")
        if self.raw is not None:
            return self.raw
        body = json.loads(request.content)
        assert body["return_hidden_states"] is True
        count = body["sampling_params"]["max_new_tokens"]
        ids = body["input_ids"]
        self.asked.append(ids)
        if isinstance(ids[0], list):
            return httpx.Response(200, json=self.batch_edit([self._one(one, count) for one in ids]))
        return httpx.Response(200, json=self._one(ids, count))

    def _one(self, ids: list[int], count: int) -> dict[str, Any]:
        output = [(7 * token + 11) % 300 + 5 for token in range(count)]  # any tokens will do
        whole = [*ids, *output[:-1]]
        states = all_site_states(self.model, whole)
        rows = self.feed(states, whole)[: len(ids)].bfloat16().float().tolist()
        later = (self.decode or self.feed)(states, whole)[len(ids) :].bfloat16().float().tolist()
        meta = {"prompt_tokens": len(ids), "cached_tokens": 0, "hidden_states": [rows, *later]}
        answer = {"text": "", "output_ids": output, "meta_info": meta}
        self.edit(answer)
        return answer


def partial_sum(model: nn.Module, layer: int, ranks: int) -> Callable[[list[int]], Tensor]:
    """What rank 0 of `ranks` holds entering `layer` when the MLP before it was not yet summed over ranks: `[T, H]`."""
    mlp = model.model.layers[layer - 1].mlp  # type: ignore[union-attr]

    def states(ids: list[int]) -> Tensor:
        kept: dict[str, Tensor] = {}

        def hook(_module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
            inner = mlp.act_fn(mlp.gate_proj(args[0])) * mlp.up_proj(args[0])  # [1, T, I]
            own = inner.shape[-1] // ranks
            kept["part"] = inner[..., :own] @ mlp.down_proj.weight[:, :own].T
            kept["whole"] = out

        handle = mlp.register_forward_hook(hook)
        whole = all_site_states(model, ids)[f"layer_{layer}"]
        handle.remove()
        return whole - kept["whole"][0].detach() + kept["part"][0].detach()

    return states


def record_ids(count: int, tokens: int, vocab: int = 320) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(4, vocab, (tokens,), generator=generator).tolist() for _ in range(count)]


def make_store(
    path: Path,
    target: Path,
    model: nn.Module,
    wiring: Wiring,
    count: int = 4,
    tokens: int = 38,
    plant: Callable[[CapturedSample], CapturedSample] = lambda sample: sample,
    identity: dict[str, Any] | None = None,
    codec: str = "raw",
) -> Path:
    """A store of random conversations, extracted by the real backend; `plant` changes samples before they are kept."""
    capture = HFCapture.from_model(model, wiring)

    class Planted:
        def run(self, batch: Sequence[Any]) -> list[CapturedSample]:
            return [plant(sample) for sample in capture.run(batch)]

    prepared = datasets.Dataset.from_list(
        [
            {"record_id": f"r{n}", "input_ids": ids, "loss_mask": [0] * 4 + [1] * (tokens - 4)}
            for n, ids in enumerate(record_ids(count, tokens))
        ]
    )
    named = TargetWeights(target).identity().to_dict() | (identity or {})
    extract(prepared, Planted(), path, StoreManifest(wiring, named, "tok", "tpl", codec=codec), 512, 4096)
    return path


def make_fitted_draft(
    folder: Path,
    target: Path,
    model: nn.Module,
    trained: Wiring,
    claimed: Wiring | None = None,
    other_tool_ids: list[int] | None = None,
    slots: Sequence[int] | None = None,
    spoilt: bool = False,
) -> Path:
    """Save a draft whose `fc` was fitted, in closed form, to predict the target's choices from `trained`'s sites.

    On the conversations of `make_store` it is right at the first step under that wiring, and guesses under others.

    Args:
        folder: where to save it.
        target, model: the tiny target.
        trained: what it is fitted on.
        claimed: the wiring written beside it; None = the truth.
        other_tool_ids: save it as another tool would: these ids and no wiring.
        slots: let `fc` read only these slots.
        spoilt: replace the fitted weights by noise.
    """
    weights = TargetWeights(target)
    draft = _blank_draft(weights, len(trained.aux))
    inputs, wanted = [], []
    end = TargetEnd.read(weights, "cpu")
    for ids in record_ids(4, 38):
        states = all_site_states(model, ids)
        inputs.append(torch.cat([states[name] for name in trained.names], dim=-1)[:-2])
        wanted.append(draft.lm_head.weight[end.choices(states["final"])[1:-1]])
    x, y = torch.cat(inputs).double(), torch.cat(wanted).detach().double()  # [N, A*H], [N, H]
    width = trained.hidden_size
    for slot in range(len(trained.aux)):
        if slots is not None and slot not in slots:
            x[:, slot * width : (slot + 1) * width] = 0
    fc = torch.linalg.lstsq(x, y, driver="gelsd").solution.T.float()
    draft.fc.weight.data = torch.randn_like(fc) if spoilt else fc
    vocab = build_draft_vocab(torch.ones(weights.vocab_size, dtype=torch.int64), weights.vocab_size)
    save_served(
        folder,
        draft,
        claimed or trained,
        target=weights.identity().to_dict(),
        convention_name="sglang-0.5.23",
        vocab=vocab,
        dtype=torch.float32,
    )
    if other_tool_ids is not None:
        config = read_json(folder / "config.json")
        for key in ("redraft", "eagle_aux_hidden_state_layer_ids"):
            config.pop(key)
        config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = other_tool_ids
        write_json(folder / "config.json", config)
    return folder


def _blank_draft(weights: TargetWeights, slots: int) -> Eagle3Draft:
    """A draft that passes `fc`'s output on unchanged: its attention and MLP add nothing."""
    rope = rope_parameters(weights.text_config)
    shape = DraftShape(
        hidden_size=weights.hidden_size,
        intermediate_size=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=weights.vocab_size,
        draft_vocab_size=weights.vocab_size,
        num_aux=slots,
        rms_norm_eps=1e-6,
        rope={"rope_theta": rope["rope_theta"], "rope_scaling": None},
        max_position_embeddings=2048,
    )
    torch.manual_seed(3)
    draft = Eagle3Draft(shape)
    draft.embed_tokens.weight.data.copy_(weights.embedding())
    draft.midlayer.self_attn.o_proj.weight.data.zero_()
    draft.midlayer.mlp.down_proj.weight.data.zero_()
    draft.lm_head.weight.data.normal_()
    return draft
