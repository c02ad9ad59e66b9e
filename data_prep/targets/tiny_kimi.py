"""A tiny model of Kimi-K2.5's architecture: 61 layers, MLA, mixture of experts, yarn, a Kimi-like chat template.

It answers questions in the style of `corpus.txt`, so that a draft has something to learn and a wiring something to
matter to. Training 61 layers step by step would be slow on a CPU, so ten layers are trained first as a ten-layer model,
then spread over the full depth among layers that start close to the identity, and the whole is trained a little more.
The trained layers include 2, 30 and 58: the residual stream changes between the input of layer k and of layer k + 1
just where a wiring that is off by one layer would show.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_prep.targets.corpus import CORPUS, read_corpus
from data_prep.targets.folder import building, is_built
from data_prep.targets.portable import make_portable
from data_prep.targets.tokenizer import build_tokenizer
from eagle3.atomic import sha256_file

ACTIVE = (0, 2, 9, 16, 23, 30, 37, 44, 51, 58)  # layers trained first
LAYERS = 61
STEPS = 400  # optimizer steps of the ten-layer phase
VOCAB = 1024
POSITIONS = 8192
ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 50000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 1024,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
# Keys that engines read from config.json and transformers 5 drops on saving.
ENGINE_KEYS = {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
BATCH, LENGTH = 8, 96  # sequences a step, tokens a sequence
IDENTITY_SCALE = 0.05  # output projections of the layers added last, against a trained layer's at its start


def recipe(steps: int, seed: int) -> dict[str, Any]:
    """What decides the content of the folder; the key of its cache."""
    code = sorted(Path(__file__).parent / name for name in ("tiny_kimi.py", "tokenizer.py", "corpus.py"))
    files = {path.name: sha256_file(path) for path in (*code, CORPUS)}
    return {"maker": "tiny_kimi", "steps": steps, "seed": seed, "files": files}


def make_tiny_kimi(
    path: Path, *, steps: int = STEPS, seed: int = 0, advance: Callable[[int], None] | None = None
) -> Path:
    """Train the model and write it to `path` (12 MB, fp32 holding bf16 values) unless this very recipe stands there.

    Args:
        path: the folder: config.json, safetensors, tokenizer, chat template, `training.json` with the losses.
        steps: optimizer steps of the ten-layer phase; the full depth gets a fortieth of them.
        seed: of initialization and of the order of text.
        advance: called with 1 after each step.

    Returns:
        `path`.
    """
    path = Path(path)
    wanted = recipe(steps, seed)
    if is_built(path, wanted):
        return path
    tokenizer = build_tokenizer(VOCAB, POSITIONS)
    stream = _token_stream(tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        shallow = _new_model(len(ACTIVE))
        before = _loss(shallow, stream)
        _train(shallow, _batches(stream, seed), steps, 4e-3, advance)
        model = _new_model(LAYERS)
        _spread(shallow, model)
        _train(model, _batches(stream, seed + 1), steps // 40, 5e-4, advance)
    _round_to_bf16(model)
    with building(path, wanted) as tmp:
        model.save_pretrained(tmp)
        tokenizer.save_pretrained(tmp)
        make_portable(tmp, ENGINE_KEYS)
        losses = {"loss_before": before, "loss_after": _loss(model, stream), "unit": "nats a token, on the corpus"}
        (tmp / "training.json").write_text(json.dumps(losses, indent=2) + "\n", encoding="utf-8")
    return path


def _token_stream(tokenizer: Any) -> Tensor:
    """The corpus through the chat template, one conversation after another `[T]`."""
    ids: list[int] = []
    for conversation in read_corpus():
        ids += tokenizer.apply_chat_template(conversation, return_dict=False)
    return torch.tensor(ids)


def _new_model(layers: int) -> Any:
    """A fresh DeepseekV3ForCausalLM of `layers` layers, its first one dense."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, GenerationConfig

    config = DeepseekV3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_shared_experts=1,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=32,
        max_position_embeddings=POSITIONS,
        num_mtp_layers=0,
        initializer_range=0.12,
        bos_token_id=0,
        eos_token_id=3,
        pad_token_id=2,
        tie_word_embeddings=False,
        rope_parameters=dict(ROPE),
        dtype="float32",
    )
    model = DeepseekV3ForCausalLM(config)
    model.set_experts_implementation("eager")
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=3, pad_token_id=2)
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(0.0, 0.3)
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj", "down_proj.weight")):
                weight.mul_(1.0 / math.sqrt(2 * len(ACTIVE)))
            if name.endswith("gate.weight"):
                weight.normal_(0.0, 0.12)
    return model


def _spread(shallow: Any, model: Any) -> None:
    """Copy the trained layers to their places; the layers between them start close to the identity."""
    for name in ("embed_tokens", "norm"):
        getattr(model.model, name).load_state_dict(getattr(shallow.model, name).state_dict())
    model.lm_head.load_state_dict(shallow.lm_head.state_dict())
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj", "down_proj.weight")):
                weight.mul_(IDENTITY_SCALE)
    for source, place in enumerate(ACTIVE):
        model.model.layers[place].load_state_dict(shallow.model.layers[source].state_dict())


def _batches(stream: Tensor, seed: int) -> Iterator[Tensor]:
    """Endless random windows of the stream `[BATCH, LENGTH + 1]`."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(0, len(stream) - LENGTH, (BATCH,), generator=generator).tolist()
        yield torch.stack([stream[s : s + LENGTH + 1] for s in starts])


def _train(
    model: Any, batches: Iterator[Tensor], steps: int, peak: float, advance: Callable[[int], None] | None
) -> None:
    """Plain next-token training: AdamW, ten steps of warm-up, cosine decay to a fiftieth of `peak`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    model.train()
    for step in range(steps):
        rate = peak * min(1.0, (step + 1) / 10) * (0.02 + 0.49 * (1 + math.cos(math.pi * step / steps)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        tokens = next(batches)
        logits = model(tokens[:, :-1], use_cache=False).logits  # [BATCH, LENGTH, V]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if advance:
            advance(1)
    model.eval()


@torch.no_grad()
def _loss(model: Any, stream: Tensor) -> float:
    """Mean next-token loss over a fixed part of the corpus, in nats a token."""
    windows = stream[: 16 * LENGTH].view(16, LENGTH)
    logits = model(windows[:, :-1], use_cache=False).logits
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()))


def _round_to_bf16(model: Any) -> None:
    """Round every weight to a bf16 value and keep it in fp32, so that fp32 and bf16 readers have the same model."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.to(torch.bfloat16))
