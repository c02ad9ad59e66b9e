"""What extraction costs beside the bare forward of the target's inner model on the same batches.

    python -m benchmarks.extract [--target PATH] [--prepared PATH] [--device cuda] [--codecs raw int8] [--writers 1 2]

The bare side throws its output away. Extraction copies the named states out, checks them, encodes them, writes shards
with checksums to disk and seals the store; every round fills a new store and removes it again, off the clock. Beside
the time, the processor time of both sides is compared: where the target itself takes every core, writing can hide on
none, and the whole of it is felt.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, load_from_disk
from rich import box
from rich.table import Table
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.memory import resident, settle
from benchmarks.side_by_side import Pair, machine, machine_line, open_device, publish, take_turns
from data_prep.capture.hf import HFCapture
from data_prep.extract import Writing, extract
from data_prep.store import StoreManifest
from data_prep.units import plan_windows, window_tokens
from eagle3.command_line import Parser, one_line_errors
from eagle3.config import STATE_CODECS, require
from eagle3.errors import RedraftError
from eagle3.target_weights import TargetWeights
from eagle3.wiring import Wiring

EXAMPLES = """
python -m benchmarks.extract --threads 1 --documents 12
python -m benchmarks.extract --target TARGET --prepared RUN/prepared/train --device cuda --codecs raw int8 --writers 1 2
"""


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


def prepared_records(folder: Path, documents: int) -> dict[str, list[Any]]:
    """The first conversations of a prepared split.

    Raises:
        RedraftError: there is none.
    """
    try:
        rows = load_from_disk(str(folder))
    except (OSError, ValueError) as err:
        raise RedraftError(
            "not a prepared split", where=str(folder), why=str(err), mend="give RUN/prepared/train"
        ) from None
    taken = rows.select(range(min(documents, len(rows))))
    return {name: list(taken[name]) for name in ("record_id", "input_ids", "loss_mask")}


def bare_forward(
    capture: HFCapture, records: dict[str, list[Any]], batch_tokens: int, shard_tokens: int = 1, masked: bool = False
) -> Callable[[], None]:
    """A call that runs the inner model over extraction's own batches, padded beforehand.

    Without an attention mask, as capture runs it; or `masked`, as a plain call of a padded batch has it.
    """
    ids = [torch.tensor(tokens) for tokens in records["input_ids"]]
    batches: list[tuple[Tensor, Tensor | None]] = []
    lengths = [len(one) for one in ids]
    for window in plan_windows(lengths, range(len(ids)), batch_tokens, window_tokens(batch_tokens, shard_tokens)):
        for plan in window:
            padded = pad_sequence([ids[i] for i in plan], batch_first=True).to(capture.device)  # [B, L]
            keep = pad_sequence([torch.ones_like(ids[i]) for i in plan], batch_first=True).to(capture.device)  # [B, L]
            batches.append((padded, keep.bool() if masked else None))

    @torch.no_grad()
    def run() -> None:
        for input_ids, mask in batches:
            capture.decoder.body(input_ids=input_ids, attention_mask=mask, use_cache=False)

    return run


@dataclass(frozen=True)
class Case:
    """One way to write: a codec of the store, and how many shards are written at a time."""

    codec: str
    writers: int


class Extraction:
    """A call that fills a fresh store; `clear` removes them all.

    Args:
        capture: the loaded target.
        records: what to extract.
        folder: where the stores are made.
        batch_tokens, shard_tokens: as in the configuration.
        case: how it is written.
    """

    def __init__(
        self,
        capture: HFCapture,
        records: dict[str, list[Any]],
        folder: Path,
        batch_tokens: int,
        shard_tokens: int,
        case: Case,
    ) -> None:
        self.capture, self.prepared, self.folder = capture, Dataset.from_dict(records), folder
        self.sizes, self.writing = (batch_tokens, shard_tokens), Writing(case.writers, 1)
        self.manifest = StoreManifest(
            capture.wiring, {"name": "benchmark"}, "none", codec=case.codec, capture=capture.info
        )
        self.runs = self.bytes = 0

    def __call__(self) -> None:
        store = self.folder / f"store{self.runs}"
        self.runs += 1
        done = extract(self.prepared, self.capture, store, self.manifest, *self.sizes, writing=self.writing)
        if not done.complete or done.records != len(self.prepared):
            raise RedraftError(
                "the extraction is not whole",
                why=f"{done.records} of {len(self.prepared)} records",
                mend="run it again",
            )

    def clear(self) -> None:
        """Note the size of the last store, and remove all of them."""
        stores = sorted(self.folder.glob("store*"))
        if stores:
            self.bytes = sum(path.stat().st_size for path in stores[-1].rglob("*.safetensors"))
        for store in stores:
            shutil.rmtree(store)


@dataclass
class Clocked:
    """A side that notes the processor time of all its threads, call by call."""

    side: Callable[[], None]
    seconds: list[float] = field(default_factory=list)

    def __call__(self) -> None:
        before = time.process_time()
        self.side()
        self.seconds.append(time.process_time() - before)


@dataclass(frozen=True)
class Measured:
    """What one case gave.

    Args:
        time: seconds of extraction and of the bare forward, in turns.
        processor: the same in seconds of processor time.
        store_bytes: of the shards' data.
        peak_bytes: how far extraction raised the resident set, and how far the bare forward did.
    """

    case: Case
    time: Pair
    processor: Pair
    store_bytes: int
    peak_bytes: tuple[int, int]


def measure(capture: HFCapture, records: dict[str, list[Any]], case: Case, args: argparse.Namespace) -> Measured:
    """Extraction and bare forward in turns, after an untimed run of each, which is when memory is looked at."""
    forward = bare_forward(capture, records, args.batch_tokens, args.shard_tokens, args.masked)
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".extract-", dir=args.out) as folder:  # the disk that a run would use
        extraction = Extraction(capture, records, Path(folder), args.batch_tokens, args.shard_tokens, case)
        forward()
        peaks = (raised(extraction), raised(forward))
        sides = Clocked(extraction), Clocked(forward)
        rounds = []
        for _ in range(args.rounds):
            extraction.clear()
            rounds.append(take_turns(*sides, 1, capture.device))
        extraction.clear()
    pair = Pair([s for one in rounds for s in one.a], [s for one in rounds for s in one.b])
    return Measured(case, pair, Pair(sides[0].seconds, sides[1].seconds), extraction.bytes, peaks)


def raised(side: Callable[[], None]) -> int:
    """Bytes by which a call raises this process's resident set at its peak."""
    settle()
    before = resident("VmRSS")
    side()
    return max(0, resident("VmHWM") - before)


def as_table(result: dict[str, Any]) -> Table:
    """One line a case."""
    title = (
        f"extraction: {result['target']}, computed in {result['compute_dtype']}\n"
        f"{result['documents']} conversations, {result['tokens']:,} tokens"
        f"{'; the bare forward with an attention mask' if result['masked'] else ''}"
    )
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False)
    table.caption, table.caption_justify = machine_line(result["machine"]), "left"
    for heading in ("codec", "writers", "tok/s", "times as long", "processor time", "MiB held"):
        table.add_column(heading, justify="left" if heading == "codec" else "right", no_wrap=True)
    for one in result["cases"]:
        slow, _ = one["seconds_extract_forward"]["medians"]
        more = (one["peak_bytes"][0] - one["peak_bytes"][1]) / 2**20
        table.add_row(
            one["codec"],
            str(one["writers"]),
            f"{result['tokens'] / slow:,.0f}",
            ratio(one["seconds_extract_forward"]),
            ratio(one["processor_extract_forward"]),
            f"{max(0.0, more):.0f}",
        )
    return table


def ratio(pair: dict[str, Any]) -> str:
    """`1.021 (0.998-1.040)`."""
    low, high = pair["spread"]
    return f"{pair['ratio']:.3f} ({low:.3f}-{high:.3f})"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = Parser(
        prog="python -m benchmarks.extract",
        description=(__doc__ or "").splitlines()[0],
        examples=EXAMPLES,
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--target", type=Path, help="a Hugging Face folder; a small random Llama without it")
    parser.add_argument("--prepared", type=Path, help="a prepared split of that target; random tokens without it")
    parser.add_argument("--threads", type=int, default=0, help="threads that compute on a CPU; 0 = as torch is set")
    parser.add_argument("--codecs", nargs="+", default=list(STATE_CODECS), choices=STATE_CODECS, help="of the store")
    parser.add_argument("--writers", nargs="+", type=int, default=[1], help="shards written at a time")
    parser.add_argument("--masked", action="store_true", help="let the bare forward pass an attention mask")
    parser.add_argument("--hidden", type=int, default=256, help="width of the random Llama")
    parser.add_argument("--layers", type=int, default=8, help="layers of the random Llama")
    parser.add_argument("--vocab", type=int, default=16384, help="vocabulary of the random Llama")
    parser.add_argument("--documents", type=int, default=24, help="conversations")
    parser.add_argument("--length", type=int, default=512, help="tokens of the longest random conversations")
    parser.add_argument("--batch-tokens", type=int, default=2048, help="padded tokens a forward pass")
    parser.add_argument("--shard-tokens", type=int, default=2048, help="tokens a shard")
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder for extract.txt and extract.json")
    return parser.parse_args(argv)


def check(args: argparse.Namespace) -> None:
    """Refuse sizes that cannot be.

    Raises:
        ConfigError: naming the option.
    """
    for name in ("rounds", "documents", "batch_tokens", "shard_tokens"):
        require(getattr(args, name) > 0, f"--{name.replace('_', '-')}", getattr(args, name), "a positive integer")
    require(min(args.writers) > 0, "--writers", args.writers, "positive integers")
    require(args.threads >= 0, "--threads", args.threads, "0 or a positive integer")
    require(args.length >= 8, "--length", args.length, "at least 8")
    require(args.hidden > 0 and args.hidden % 64 == 0, "--hidden", args.hidden, "a multiple of 64")


def as_dict(measured: Sequence[Measured]) -> list[dict[str, Any]]:
    """JSON-able forms."""
    return [
        {
            "codec": one.case.codec,
            "writers": one.case.writers,
            "seconds_extract_forward": one.time.to_dict(),
            "processor_extract_forward": one.processor.to_dict(),
            "store_bytes": one.store_bytes,
            "peak_bytes": one.peak_bytes,
        }
        for one in measured
    ]


@one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 2 on an expected failure, told in one line."""
    args = parse(argv)
    check(args)
    if args.threads:
        torch.set_num_threads(args.threads)
    device = open_device(args.device)
    facts = machine(device)
    capture = open_capture(args, device)
    if args.prepared:
        records = prepared_records(args.prepared, args.documents)
    else:
        records = random_records(args.documents, args.length, capture.vocab_size)
    cases = [Case(codec, writers) for codec in args.codecs for writers in args.writers]
    measured = [measure(capture, records, case, args) for case in cases]
    result = {
        "machine": facts,
        "target": args.target.name if args.target else f"random Llama of {args.layers} layers, hidden {args.hidden}",
        "compute_dtype": capture.info["compute_dtype"],
        "sites": [site.name for site in capture.wiring.stored_sites],
        "documents": len(records["record_id"]),
        "tokens": sum(map(len, records["input_ids"])),
        "masked": args.masked,
        "batch_tokens": args.batch_tokens,
        "shard_tokens": args.shard_tokens,
        "cases": as_dict(measured),
    }
    publish(as_table(result), result, args.out, "extract")
    return 0


if __name__ == "__main__":
    sys.exit(main())
