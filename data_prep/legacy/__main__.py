"""Other tools' sample files: say which tensor is which site of the target, and convert what can be trusted.

  python -m data_prep.legacy diagnose FOLDER --target TARGET
  python -m data_prep.legacy convert FOLDER --target TARGET --store STORE

Exit codes: 0 done; 1 refused (slots that are no site of this target, a mixed set, a site that is missing, states that
the target does not give); 2 unreadable files or wrong arguments.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from data_prep.capture.hf import HFCapture
from data_prep.legacy.convert import Converted, Converter
from data_prep.legacy.diagnose import diagnose
from data_prep.legacy.explain import explain_diagnosis
from data_prep.legacy.formats import LegacyFile, LegacyRecord, find_files, find_rows, read_record
from data_prep.legacy.judge import TableJudge, TargetJudge
from data_prep.legacy.plan import Plan, plan_conversion
from data_prep.legacy.prepared import write_prepared
from data_prep.render import tokenizer_hash
from data_prep.store import Store, StoreManifest
from eagle3.atomic import write_json
from eagle3.command_line import Parser, positive
from eagle3.conventions import Shape
from eagle3.errors import RedraftError, WiringError
from eagle3.hf_model import choose_device, choose_dtype, load_target
from eagle3.target_weights import TargetWeights

DONE, REFUSED, UNREADABLE = 0, 1, 2
REPORT = "legacy.json"


def main(argv: list[str] | None = None) -> int:
    """Entry point; an expected failure is one line on stderr."""
    try:
        args = build_parser().parse_args(argv)
        return int(args.run(args))
    except RedraftError as err:
        sys.stdout.flush()  # in a log, the lines keep their order
        print(f"error: {err}", file=sys.stderr)
        return REFUSED if isinstance(err, WiringError) else UNREADABLE
    except KeyboardInterrupt:
        print("stopped; what was written is kept: run the same command to go on", file=sys.stderr)
        return 130


def build_parser() -> Parser:
    """The command line."""
    parser = Parser(
        prog="python -m data_prep.legacy",
        description=__doc__,
        examples="""
        python -m data_prep.legacy diagnose old_samples --target TARGET --json diagnosis.json
        python -m data_prep.legacy convert old_samples --target TARGET --store RUN/store --prepared RUN/prepared
        """,
    )
    commands = parser.add_subparsers(required=True, metavar="diagnose|convert")
    shared = Parser(add_help=False)
    shared.add_argument("folder", type=Path, help="folder of sample files (or one file)")
    shared.add_argument("--samples", type=positive, default=5, help="files judged, spread over the set (5)")
    shared.add_argument("--rows", type=Path, help="saved dataset with the masks of hs_<i>.safetensors")
    shared.add_argument("--max-file-gib", type=float, default=16.0, help="largest content read from one file (16)")
    shared.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:<n>")
    dtypes = ("auto", "float32", "bfloat16", "float16")
    shared.add_argument(
        "--compute-dtype",
        default="auto",
        choices=dtypes,
        metavar="DTYPE",
        help=f"to run the target in: {', '.join(dtypes)}",
    )
    shared.add_argument("--trust-remote-code", action="store_true", help="run Python shipped in the target's folder")

    one = commands.add_parser(
        "diagnose",
        parents=[shared],
        help="say what the files hold",
        description="Say which tensor of the files is which site of the target.",
        examples="python -m data_prep.legacy diagnose old_samples --target TARGET",
    )
    one.add_argument("--target", type=Path, help="the target's folder")
    one.add_argument("--tables-only", action="store_true", help="do not run the target: read its tables alone")
    one.add_argument("--embedding", type=Path, help="instead of a target: a safetensors file with its embedding")
    one.add_argument("--json", type=Path, help="write the diagnosis here as well")
    one.set_defaults(run=run_diagnose)

    two = commands.add_parser(
        "convert",
        parents=[shared],
        help="write a hidden-state store",
        description="Write those samples that can be trusted into a hidden-state store.",
        examples="python -m data_prep.legacy convert old_samples --target TARGET --store RUN/store",
    )
    two.add_argument("--target", type=Path, required=True, help="the target's folder")
    two.add_argument("--store", type=_folder, required=True, help="store to write, or to go on with; a local folder")
    two.add_argument("--prepared", type=Path, help="also write the tokens and masks that training reads, here")
    two.add_argument("--aux", default="", help="wanted sites, e.g. layer_3,layer_31,layer_59 (the layers found)")
    two.add_argument("--teacher", default="", choices=["", "final", "final_normed"], help="(the one found, or final)")
    two.add_argument("--dtype", default="", choices=["", "bfloat16", "float16", "float32"], help="(as the files)")
    two.add_argument("--skip-bad", action="store_true", help="go on without bad files, and list them")
    two.add_argument("--verify-all", action="store_true", help="compare every record with the target, not samples only")
    two.add_argument("--batch-tokens", type=positive, default=4096, help="padded tokens a run of the target (4096)")
    two.add_argument("--shard-tokens", type=positive, default=16384, help="tokens a shard (16384)")
    two.add_argument("--val-fraction", type=float, default=0.05, help="share held out in --prepared (0.05)")
    two.add_argument("--seed", type=int, default=0, help="of that split (0)")
    two.set_defaults(run=run_convert)
    return parser


def _folder(text: str) -> Path:
    if "://" in text:
        raise argparse.ArgumentTypeError("a local folder, not a URL: convert here, then copy the folder")
    return Path(text)


def run_diagnose(args: argparse.Namespace) -> int:
    """The `diagnose` command."""
    if (args.target is None) == (args.embedding is None):
        raise RedraftError("nothing to compare with", mend="give --target, or --embedding alone")
    if args.embedding is not None:
        judge: Any = TableJudge.from_file(args.embedding)
        shape = Shape("unknown", 0, judge.embedding.shape[1])
    else:
        weights = TargetWeights(args.target)
        shape = shape_of(weights)
        judge = TableJudge.from_weights(weights) if args.tables_only else TargetJudge(load_model(args))
    files = find_files(args.folder)
    found = diagnose(files, reader(args, shape.hidden_size), judge, args.samples)
    print("\n".join(explain_diagnosis(found, shape)))
    if args.json:
        write_json(args.json, found.to_dict())
    return DONE if found.whole or not found.ran_target else REFUSED


def run_convert(args: argparse.Namespace) -> int:
    """The `convert` command."""
    weights = TargetWeights(args.target)
    shape, model = shape_of(weights), load_model(args)
    files, read = find_files(args.folder), reader(args, weights.hidden_size)
    found = diagnose(files, read, TargetJudge(model), args.samples, args.skip_bad)
    print("\n".join(explain_diagnosis(found, shape)))
    plan = plan_conversion(found, shape, [name for name in args.aux.split(",") if name], args.teacher)
    dtype = args.dtype or found.dtype
    print(describe(plan, dtype))
    if found.dissent and not (plan.needs_target or args.verify_all):
        raise WiringError(
            "samples of the set are not of one kind, and the files between them were not looked at",
            where=str(args.folder),
            why=found.dissent[0],
            mend="add --verify-all, which compares every record with the target",
        )
    capture = None
    if plan.needs_target or args.verify_all:
        capture = HFCapture.from_model(model, plan.wiring, torch.float32)
    manifest = StoreManifest(
        wiring=plan.wiring,
        target=weights.identity().to_dict(),
        tokenizer_hash=tokenizer_hash(load_tokenizer(args)),
        dtype=dtype,
        capture={
            "backend": "legacy",
            "format": found.format.name,
            "compute_dtype": "as found",
            "teacher": f"hf {capture.info['compute_dtype']}" if plan.needs_target and capture else "as found",
        },
    )
    converter = Converter(plan, read, weights.embedding(), capture, args.batch_tokens, args.skip_bad)
    with progress(len(files)) as advance:
        done = converter.run(files, len(found.slots), args.store, manifest, args.shard_tokens, advance)
    write_json(args.store / REPORT, {"source": str(args.folder), "diagnosis": found.to_dict(), "left_out": done.bad})
    report(done, args.store)
    if args.prepared:
        write_prepared(Store.open(args.store), args.prepared, str(args.folder), args.val_fraction, args.seed)
        print(f"Tokens and masks in {args.prepared}.")
    return DONE


def describe(plan: Plan, dtype: str) -> str:
    """What the conversion will do, in a sentence."""
    wiring = plan.wiring
    teacher = f"{wiring.teacher} computed with the target" if plan.needs_target else f"{wiring.teacher} as found"
    return f"Converting to aux {', '.join(wiring.names)}, teacher {teacher}, dtype {dtype}."


def report(done: Converted, store: Path) -> None:
    """Print what a conversion did."""
    print(f"{done.records} records, {done.tokens:,} tokens written to {store}; {done.found_done} were there.")
    if done.last_masked:
        print(f"In {done.last_masked} of the records written the last token is masked off, as found.")
    if done.bad:
        print(f"Left out, {len(done.bad)} in all:")
        print("\n".join(f"  {line}" for line in done.bad))


def reader(args: argparse.Namespace, hidden_size: int) -> Callable[[LegacyFile], LegacyRecord]:
    """Reads one file of the set."""
    rows = find_rows(args.folder if args.folder.is_dir() else args.folder.parent, args.rows)
    return partial(read_record, hidden_size=hidden_size, rows=rows, max_bytes=int(args.max_file_gib * 2**30))


def load_model(args: argparse.Namespace) -> nn.Module:
    """The target, run by transformers."""
    device = choose_device(args.device)
    return load_target(args.target, device, choose_dtype(args.compute_dtype, device), args.trust_remote_code)


def load_tokenizer(args: argparse.Namespace) -> Any:
    """The target's tokenizer: the store says that these tokens are its.

    Raises:
        RedraftError: it cannot be loaded.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            args.target, trust_remote_code=args.trust_remote_code, local_files_only=True
        )
    except (OSError, ValueError, KeyError, ImportError) as err:
        mend = "put the tokenizer's files there; where it ships Python that you trust, add --trust-remote-code"
        raise RedraftError("cannot load the tokenizer", where=str(args.target), why=str(err), mend=mend) from None


def shape_of(weights: TargetWeights) -> Shape:
    """What ids and wirings are read against."""
    return Shape(weights.model_type, weights.num_layers, weights.hidden_size)


def progress(total: int) -> Any:
    """A bar where there is a terminal to show it; yields `advance(n)` either way."""
    import contextlib

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    @contextlib.contextmanager
    def shown() -> Any:
        columns = (TextColumn("files"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True)) as bars:
            task = bars.add_task("files", total=total)
            yield lambda n: bars.advance(task, n)

    return shown() if sys.stderr.isatty() else contextlib.nullcontext(lambda _n: None)


if __name__ == "__main__":
    sys.exit(main())
