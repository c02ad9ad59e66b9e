"""What it costs to keep the target's states: capture and the store's writes, beside the bare forward."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.gpu.synthetic import Sizes
from benchmarks.gpu.timebox import Clock
from benchmarks.side_by_side import Pair, take_turns
from eagle3.wiring import Site, Wiring

ROUNDS, VOCABULARY = 3, 1024


def random_target(sizes: Sizes, device: torch.device) -> nn.Module:
    """A random Llama a few layers deep, as wide as the target, in the dtype that a GPU computes in."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.target_intermediate,
        num_hidden_layers=sizes.target_layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.heads,
        head_dim=sizes.head_dim,
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)
    with device:
        model: nn.Module = LlamaForCausalLM(config)
    return model.to(torch.bfloat16 if device.type == "cuda" else torch.float32).eval()


def measure(sizes: Sizes, codec: str, device: torch.device, folder: Path, clock: Clock) -> dict[str, Any]:
    """Extract the same conversations under a codec, in turns with the bare forward, for a few rounds.

    Args:
        sizes: of the target and the conversations.
        codec: of the store.
        device: where the target runs.
        folder: on the disk that is written to; the stores are removed again.
        clock: no new round once it is over.

    Returns:
        seconds of both sides in each round, tokens a second of both, times as long as the bare forward, bytes a second.
    """
    from benchmarks.extract import bare_forward, random_records
    from benchmarks.fill_store import FillStore
    from data_prep.capture.hf import HFCapture

    aux = tuple(Site(layer) for layer in range(1, sizes.target_layers))
    wiring = Wiring(aux, "final", "llama", sizes.target_layers, sizes.hidden)
    capture = HFCapture.from_model(random_target(sizes, device), wiring)
    length = sizes.packed[1]
    records = random_records(sizes.documents, length, VOCABULARY)
    budget = (4 * length, 8 * length)
    bare = bare_forward(capture, records, *budget)
    folder.mkdir(parents=True, exist_ok=True)
    rounds: list[Pair] = []
    size = 0
    with tempfile.TemporaryDirectory(prefix=".gpu-", dir=folder) as place:
        fill = FillStore(codec, capture, records, Path(place) / "store", *budget)
        fill()
        bare()
        while len(rounds) < ROUNDS and not (rounds and clock.over):
            size = fill.clear()
            rounds.append(take_turns(fill, bare, 1, device))
    pair = Pair([one.a[0] for one in rounds], [one.b[0] for one in rounds])
    tokens, (slow, fast) = sum(map(len, records["input_ids"])), pair.medians
    return {
        "codec": codec,
        "tokens": tokens,
        "layers": sizes.target_layers,
        "seconds_extract_forward": pair.to_dict(),
        "bare_tokens_per_second": tokens / fast,
        "tokens_per_second": tokens / slow,
        "times_as_long": pair.ratio,
        "extra_seconds_per_token": (slow - fast) / tokens,
        "bytes": size,
        "bytes_per_second": size / slow,
    }
