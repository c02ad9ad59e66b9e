"""Which tensors does it really mean: `python -m eval.probe static|live|draft|store|ranks`.

Exit code 0: as expected; 1: not as expected; 2: could not tell, or bad input.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from eagle3.command_line import Parser, one_line_errors, positive
from eagle3.errors import RedraftError
from eval.probe import commands
from eval.probe.verdict import Verdict, cannot_tell, show

Command = Callable[[argparse.Namespace], Verdict]


@one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Entry point: parse, probe, print the verdict, return its exit code."""
    args = _parser().parse_args(argv)
    try:
        verdict: Verdict = args.command(args)
    except RedraftError as err:
        if not args.json:
            raise
        return show(cannot_tell(err.what, [part for part in (err.where, err.why) if part], err.mend), True)
    return show(verdict, args.json)


def _parser() -> Parser:
    parser = Parser(
        prog="python -m eval.probe",
        description=__doc__,
        examples="python -m eval.probe store runs/x/store --target models/llama",
        epilog="`python -m eval.probe PROBE --help` has an example of each.",
    )
    subs = parser.add_subparsers(metavar="PROBE", required=True)
    _static(subs)
    _live(subs)
    _draft(subs)
    _store(subs)
    _ranks(subs)
    return parser


def _add(subs: argparse._SubParsersAction, name: str, command: Command, words: str, example: str) -> Parser:
    one: Parser = subs.add_parser(
        name,
        help=words,
        description=words,
        examples=f"python -m eval.probe {example}",
        epilog="exit code: 0 agrees, 1 disagrees, 2 could not tell",
    )
    one.set_defaults(command=command)
    one.add_argument("--json", action="store_true", help="print one JSON object")
    return one


def _target(one: Parser, required: bool = True) -> None:
    one.add_argument("--target", type=Path, required=required, metavar="FOLDER", help="the target's folder")
    one.add_argument("--device", default="auto", help="where to run it: auto, cpu, cuda, cuda:N (default: %(default)s)")
    one.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16 (default: %(default)s)")
    one.add_argument("--trust-remote-code", action="store_true", help="run Python shipped in the target's folder")


def _tokens(one: Parser, prompts: int, max_tokens: int) -> None:
    one.add_argument("--prompts", type=positive, default=prompts, metavar="N", help="how many (default: %(default)s)")
    one.add_argument(
        "--max-tokens", type=positive, default=max_tokens, metavar="N", help="cut each to N (default: %(default)s)"
    )
    one.add_argument("--random-tokens", action="store_true", help="random token ids: no tokenizer is needed")
    one.add_argument("--timeout", type=float, default=600.0, metavar="S", help="seconds a request may take")


def _static(subs: argparse._SubParsersAction) -> None:
    one = _add(
        subs,
        "static",
        commands.run_static,
        "read an SGLang tree (or a Python that has one) without starting it: which ids make it feed a wiring",
        "static .venv/bin/python --model-type kimi_k25 --num-layers 61 --wiring layer_3,layer_31,layer_59",
    )
    one.add_argument("tree", type=Path, help="folder of SGLang's source, of an installed package, or an interpreter")
    one.add_argument("--model-type", default="", metavar="TYPE", help="the target's: llama, deepseek_v3, kimi_k25, ...")
    one.add_argument("--architecture", default="", metavar="CLASS", help="the target's class, where it is unusual")
    one.add_argument("--draft", type=Path, metavar="FOLDER", help="served folder: the wiring it was trained on")
    one.add_argument("--wiring", metavar="SITES", help="what must be fed, e.g. layer_3,layer_31,layer_59 or native")
    one.add_argument("--target", type=Path, metavar="FOLDER", help="takes model type and depth from the target")
    one.add_argument("--num-layers", type=positive, default=0, metavar="N", help="the target's decoder layers")
    one.add_argument("--disable-cuda-graph", action="store_true", help="the server will run without CUDA graphs")


def _live(subs: argparse._SubParsersAction) -> None:
    one = _add(
        subs,
        "live",
        commands.run_live,
        "name the site in every slot that a running SGLang server feeds (vLLM hands out no hidden states over HTTP)",
        "live --url http://127.0.0.1:30000 --target models/llama --draft runs/x/served",
    )
    one.add_argument("--url", required=True, help="the server's address")
    _target(one)
    one.add_argument("--draft", type=Path, metavar="FOLDER", help="served folder: what it expects is compared")
    one.add_argument("--wiring", metavar="SITES", help="what is expected, e.g. layer_2,layer_15,layer_27 or native")
    one.add_argument("--store", metavar="FOLDER", help="take tokens and states from a store; run no target")
    one.add_argument(
        "--new-tokens",
        type=positive,
        default=8,
        metavar="N",
        help="generate N tokens, to see whether they are fed as prompts are (default: %(default)s)",
    )
    one.add_argument("--save", type=Path, metavar="FILE", help="keep the server's states for the ranks probe")
    _tokens(one, prompts=4, max_tokens=64)


def _draft(subs: argparse._SubParsersAction) -> None:
    one = _add(
        subs,
        "draft",
        commands.run_draft,
        "name the wiring that a draft was trained on, by its standalone accuracy under every candidate",
        "draft --draft runs/x/served --target models/llama --store runs/x/store --records 16",
    )
    one.add_argument("--draft", type=Path, required=True, metavar="FOLDER", help="the served folder")
    _target(one)
    one.add_argument("--expect", metavar="SITES", help="what it should be; default: what the folder says")
    source = one.add_mutually_exclusive_group()
    source.add_argument("--store", metavar="FOLDER", help="take tokens from a store (held-out, at best)")
    source.add_argument("--prompts", type=Path, metavar="FILE", help="JSONL prompts that the target answers itself")
    one.add_argument("--stored-states", action="store_true", help="use the store's states; try only sites it holds")
    one.add_argument("--all-of", metavar="SITES", help="also try every choice of these sites, in layer order")
    one.add_argument("--records", type=positive, default=32, metavar="N", help="how many (default: %(default)s)")
    one.add_argument(
        "--max-tokens",
        type=positive,
        default=256,
        metavar="N",
        help="a record's or an answer's (default: %(default)s)",
    )
    one.add_argument("--steps", type=positive, default=3, metavar="K", help="unrolled steps (default: %(default)s)")
    one.add_argument("--top", type=positive, default=10, metavar="N", help="rows to print (default: %(default)s)")


def _store(subs: argparse._SubParsersAction) -> None:
    one = _add(
        subs,
        "store",
        commands.run_store_probe,
        "name what each tensor of a hidden-state store truly is, by computing a few records again",
        "store runs/x/store --target models/llama",
    )
    one.add_argument("store", help="the store's folder, or its URL")
    _target(one)
    one.add_argument("--records", type=positive, default=3, metavar="N", help="how many (default: %(default)s)")
    one.add_argument("--max-tokens", type=positive, default=256, metavar="N", help="cut each (default: %(default)s)")


def _ranks(subs: argparse._SubParsersAction) -> None:
    one = _add(
        subs,
        "ranks",
        commands.run_ranks,
        "compare one target's aux states on 1 and on n tensor-parallel ranks (two servers, or dumps of live --save)",
        "ranks --dump tp1.safetensors --dump tp8.safetensors",
    )
    one.add_argument("--dump", type=Path, action="append", default=[], metavar="FILE", help="what live --save wrote")
    one.add_argument("--url", action="append", default=[], help="a running server's address")
    _target(one, required=False)
    _tokens(one, prompts=4, max_tokens=64)


if __name__ == "__main__":
    sys.exit(main())
