"""Write a miniature of Kimi-K2.5: its checkpoint's layout, its architecture, its quantization, tiny widths.

`python tests/kimi/make_miniature.py OUT` trains it in about a minute on one core. 61 layers, hidden 64, four routed
experts top-2 in packed int4, MLA, yarn x64, untied bf16 head, a vision tower of random weights, the slow tokenizer with
its chat template. It has learnt the corpus of the tiny targets, with a thought before two answers of three, so that
drafts and wirings can be told apart on it. The experts are rounded to int4 before the last steps of training, which
therefore compensate for the rounding.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

if __package__ in (None, ""):  # run as a script, or loaded by a test before its folder is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kimi import int4, layout
from kimi.tokenizer import vocab_size, write_tokenizer

from data_prep.targets.corpus import CORPUS, read_corpus
from data_prep.targets.deepseek import (
    ACTIVE,
    LAYERS,
    TinyShape,
    batches,
    mean_loss,
    new_model,
    round_to_bf16,
    spread,
    train,
)
from data_prep.targets.folder import building, is_built
from eagle3.atomic import sha256_file

HERE = Path(__file__).resolve().parent
STEPS, LAST_STEPS = 400, 24  # optimizer steps of ten layers, and of all with the experts fixed in int4


def recipe(steps: int = STEPS, seed: int = 0) -> dict[str, Any]:
    """What decides the content of the folder; the key of its cache."""
    import data_prep.targets.deepseek as training

    code = [path for path in HERE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    files = {str(path.relative_to(HERE)): sha256_file(path) for path in sorted(code)}
    files |= {"deepseek.py": sha256_file(Path(str(training.__file__))), "corpus.txt": sha256_file(CORPUS)}
    return {"maker": "kimi_miniature", "steps": steps, "seed": seed, "files": files}


def make_miniature(
    path: Path, *, steps: int = STEPS, seed: int = 0, advance: Callable[[int], None] | None = None
) -> Path:
    """Train the miniature and write it to `path` unless this very recipe stands there.

    Args:
        path: the folder to write.
        steps: optimizer steps of the ten-layer phase.
        seed: of initialization and of the order of text.
        advance: called with 1 after each step.

    Returns:
        `path`.
    """
    path = Path(path)
    wanted = recipe(steps, seed)
    if is_built(path, wanted):
        return path
    tokenizer = _tokenizer()
    stream = _token_stream(tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, experts, losses = _trained(_shape(tokenizer), stream, steps, seed, advance)
    with building(path, wanted) as tmp:
        write_tokenizer(tmp)
        for file in sorted((HERE / "remote_code").glob("*.py")):
            (tmp / file.name).write_bytes(file.read_bytes())
        _write_json(tmp / "config.json", layout.config_json(model.config, _id(tokenizer, "<|media_pad|>")))
        stop = {"max_length": layout.POSITIONS, "eos_token_id": _id(tokenizer, "<|im_end|>")}
        _write_json(tmp / "generation_config.json", stop)
        _write_json(tmp / "preprocessor_config.json", layout.preprocessor_json())
        text = layout.text_tensors(model, experts)
        layout.write_shards(tmp, text | layout.vision_tensors(model.config.hidden_size, seed))
        _write_json(tmp / "training.json", losses)
    return path


def _tokenizer() -> Any:
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=True)


def _id(tokenizer: Any, token: str) -> int:
    return int(tokenizer.convert_tokens_to_ids(token))


def _shape(tokenizer: Any) -> TinyShape:
    rope = {**layout.ROPE_SCALING, "rope_type": "yarn", "rope_theta": layout.THETA}
    special = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id, "pad": tokenizer.pad_token_id}
    return TinyShape(vocab_size(), layout.POSITIONS, rope, **special, extra=layout.TEXT_TRAITS)


def _token_stream(tokenizer: Any) -> Tensor:
    """The corpus through the chat template, one conversation after another `[T]`.

    The last turn is written as the model has to write it: after the opened `<think>` with a thought, in two of three
    conversations, and after the closed one without. (The template itself leaves no thought in a finished conversation.)
    """
    ids: list[int] = []
    for number, conversation in enumerate(read_corpus()):
        *before, answer = conversation
        thinking = bool(number % 3)
        opened = tokenizer.apply_chat_template(before, tokenize=False, add_generation_prompt=True, thinking=thinking)
        asked = before[-1]["content"].split("\n")[0]
        thought = f"The user says: {asked} I will answer in the usual words.</think>" if thinking else ""
        ids += tokenizer.encode(f"{opened}{thought}{answer['content']}<|im_end|>")
    return torch.tensor(ids)


def _trained(
    shape: TinyShape, stream: Tensor, steps: int, seed: int, advance: Callable[[int], None] | None
) -> tuple[Any, dict[str, list[int4.Quantized]], dict[str, Any]]:
    """The trained text model, its experts as they will be stored, its losses."""
    shallow = new_model(shape, len(ACTIVE))
    _unbalance_router(shallow)
    losses: dict[str, Any] = {"unit": "nats a token, on the corpus", "loss_before": mean_loss(shallow, stream)}
    train(shallow, batches(stream, seed), steps, 4e-3, advance)
    model = new_model(shape, LAYERS)
    _unbalance_router(model)
    spread(shallow, model)
    names = [name for name, _ in model.named_parameters() if name.endswith(layout.EXPERTS)]
    experts = {name: _fix_in_int4(model.get_parameter(name)) for name in names}
    losses["loss_at_int4"] = mean_loss(model, stream)
    train(model, batches(stream, seed + 1), min(LAST_STEPS, steps), 5e-4, advance)
    with torch.no_grad():
        round_to_bf16(model)
        for name, quantized in experts.items():
            model.get_parameter(name).copy_(torch.stack([int4.dequantize(*one) for one in quantized]))
    losses["loss_after"] = mean_loss(model, stream)
    return model, experts, losses


def _unbalance_router(model: Any) -> None:
    """Give the router's correction bias values, as a trained one has: it decides who is chosen, not how much."""
    for layer in model.model.layers[1:]:
        layer.mlp.gate.e_score_correction_bias.normal_(0.0, 0.02)


def _fix_in_int4(weight: Tensor) -> list[int4.Quantized]:
    """Replace experts' weights `[E, out, in]` by what their int4 form stands for, and train them no further."""
    quantized = [int4.quantize(expert) for expert in weight.detach()]
    weight.requires_grad_(False)
    weight.copy_(torch.stack([int4.dequantize(*one) for one in quantized]))
    return quantized


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("path", type=Path, help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    print(make_miniature(args.path, seed=args.seed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
