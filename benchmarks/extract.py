"""What extraction costs beside the bare forward of the target's inner model on the same batches.

    python -m benchmarks.extract [--target PATH] [--device cuda]

The bare side throws its output away. Extraction copies the named states out, checks them, writes shards with checksums
to disk and seals the store; every round fills a new store and removes it again, off the clock.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from rich import box
from rich.table import Table
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.side_by_side import Pair, machine, machine_line, open_device, publish, take_turns
from data_prep.capture.hf import HFCapture
from data_prep.extract import extract, plan_batches
from data_prep.store import StoreManifest
from eagle3.config import require
from eagle3.errors import RedraftError
from eagle3.target_weights import TargetWeights
from eagle3.wiring import Wiring


def random_target(hidden: int, layers: int, vocab: int) -> nn.Module:
    """A random LlamaForCausalLM: heads of 64, an MLP of 3 H."""
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


def open_capture(args: argparse.Namespace, device: torch.device) -> HFCapture:
    """The target that the command line names, loaded, with its native wiring; bfloat16 on a GPU, else float32."""
    if args.target is None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        model = random_target(args.hidden, args.layers, args.vocab).to(device, dtype)
        return HFCapture.from_model(model, Wiring.native("llama", args.layers, args.hidden))
    weights = TargetWeights(args.target)
    wiring = Wiring.native(weights.model_type, weights.num_layers, weights.hidden_size)
    return HFCapture(args.target, wiring, str(device))


def random_records(documents: int, length: int, vocab: int) -> dict[str, list[Any]]:
    """Conversations of a quarter to the whole of `length` random tokens, all to be learnt."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(max(2, length // 4), length + 1, (documents,), generator=generator).tolist()
    return {
        "record_id": [f"record/{i}" for i in range(documents)],
        "input_ids": [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in lengths],
        "loss_mask": [[1] * n for n in lengths],
    }


def bare_forward(capture: HFCapture, records: dict[str, list[Any]], batch_tokens: int) -> Callable[[], None]:
    """A call that runs the inner model over extraction's own batches, padded beforehand."""
    ids = [torch.tensor(tokens) for tokens in records["input_ids"]]
    batches: list[tuple[Tensor, Tensor]] = []
    for plan in plan_batches([len(one) for one in ids], batch_tokens):
        padded = pad_sequence([ids[i] for i in plan], batch_first=True)  # [B, L]
        keep = pad_sequence([torch.ones_like(ids[i]) for i in plan], batch_first=True).bool()  # [B, L]
        batches.append((padded.to(capture.device), keep.to(capture.device)))

    @torch.no_grad()
    def run() -> None:
        for input_ids, keep in batches:
            capture.decoder.body(input_ids=input_ids, attention_mask=keep, use_cache=False)

    return run


class Extraction:
    """A call that fills a fresh store; `clear` removes them all.

    Args:
        capture: the loaded target.
        records: what to extract.
        folder: where the stores are made.
        batch_tokens, shard_tokens: as in the configuration.
    """

    def __init__(
        self, capture: HFCapture, records: dict[str, list[Any]], folder: Path, batch_tokens: int, shard_tokens: int
    ) -> None:
        self.capture, self.prepared, self.folder = capture, Dataset.from_dict(records), folder
        self.sizes = (batch_tokens, shard_tokens)
        self.manifest = StoreManifest(capture.wiring, {"name": "benchmark"}, "none", capture=capture.info)
        self.runs = self.bytes = 0

    def __call__(self) -> None:
        store = self.folder / f"store{self.runs}"
        self.runs += 1
        done = extract(self.prepared, self.capture, store, self.manifest, *self.sizes)
        if not done.complete or done.records != len(self.prepared):
            raise RedraftError("the extraction is not whole", why=f"{done.records} of {len(self.prepared)} records")

    def clear(self) -> None:
        """Note the size of the last store, and remove all of them."""
        stores = sorted(self.folder.glob("store*"))
        if stores:
            self.bytes = sum(path.stat().st_size for path in stores[-1].rglob("*.safetensors"))
        for store in stores:
            shutil.rmtree(store)


def measure(capture: HFCapture, records: dict[str, list[Any]], args: argparse.Namespace) -> tuple[Pair, int]:
    """Extraction and bare forward in turns, after one untimed run of each; and the bytes of a store's shards."""
    forward = bare_forward(capture, records, args.batch_tokens)
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".extract-", dir=args.out) as folder:  # the disk that a run would use
        extraction = Extraction(capture, records, Path(folder), args.batch_tokens, args.shard_tokens)
        forward()
        extraction()
        rounds = []
        for _ in range(args.rounds):
            extraction.clear()
            rounds.append(take_turns(extraction, forward, 1, capture.device))
        extraction.clear()
    return Pair([s for one in rounds for s in one.a], [s for one in rounds for s in one.b]), extraction.bytes


def as_table(result: dict[str, Any]) -> Table:
    """One line a side."""
    title = f"extraction: {result['target']}\n{result['documents']} conversations, {result['tokens']:,} tokens"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False)
    table.caption, table.caption_justify = machine_line(result["machine"]), "left"
    for heading in ("", "seconds", "tok/s", "MiB written", "times as long"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    pair = result["seconds_extract_forward"]
    extracted, bare = pair["medians"]
    low, high = pair["spread"]
    mib = result["store_bytes"] / 2**20
    rate = result["tokens"] / extracted
    table.add_row(
        "extract", f"{extracted:.3f}", f"{rate:,.0f}", f"{mib:.1f}", f"{pair['ratio']:.3f} ({low:.3f}-{high:.3f})"
    )
    table.add_row("bare forward", f"{bare:.3f}", f"{result['tokens'] / bare:,.0f}", "-", "1")
    return table


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.extract", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--target", type=Path, help="a Hugging Face folder; a small random Llama without it")
    parser.add_argument("--hidden", type=int, default=256, help="width of the random Llama")
    parser.add_argument("--layers", type=int, default=8, help="layers of the random Llama")
    parser.add_argument("--vocab", type=int, default=16384, help="vocabulary of the random Llama")
    parser.add_argument("--documents", type=int, default=32, help="conversations")
    parser.add_argument("--length", type=int, default=512, help="tokens of the longest conversations")
    parser.add_argument("--batch-tokens", type=int, default=2048, help="padded tokens a forward pass")
    parser.add_argument("--shard-tokens", type=int, default=4096, help="tokens a shard")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder for extract.txt and extract.json")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Command line; 2 on an expected failure, told in one line."""
    args = parse(argv)
    try:
        for name in ("rounds", "documents", "batch_tokens", "shard_tokens"):
            require(getattr(args, name) > 0, f"--{name.replace('_', '-')}", getattr(args, name), "a positive integer")
        require(args.length >= 8, "--length", args.length, "at least 8")
        require(args.hidden > 0 and args.hidden % 64 == 0, "--hidden", args.hidden, "a multiple of 64")
        device = open_device(args.device)
        facts = machine(device)
        capture = open_capture(args, device)
        records = random_records(args.documents, args.length, capture.vocab_size)
        pair, size = measure(capture, records, args)
    except RedraftError as err:
        print(f"error: {err}", file=sys.stderr)
        return 2
    result = {
        "machine": facts,
        "target": args.target.name if args.target else f"random Llama of {args.layers} layers, hidden {args.hidden}",
        "compute_dtype": capture.info["compute_dtype"],
        "sites": [site.name for site in capture.wiring.stored_sites],
        "documents": args.documents,
        "tokens": sum(map(len, records["input_ids"])),
        "batch_tokens": args.batch_tokens,
        "shard_tokens": args.shard_tokens,
        "store_bytes": size,
        "seconds_extract_forward": pair.to_dict(),
    }
    publish(as_table(result), result, args.out, "extract")
    return 0


if __name__ == "__main__":
    sys.exit(main())
