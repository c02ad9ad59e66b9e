"""`python -m data_prep.regenerate`: answers from a server that runs elsewhere."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from rich.console import Console

from data_prep.regenerate.config import RegenerateConfig
from data_prep.regenerate.report import show_report
from data_prep.regenerate.run import regenerate
from eagle3.command_line import Parser, one_line_errors
from eagle3.errors import ConfigError

EXAMPLES = """
# a server of the target alone, sampled as its generation_config.json says
python -m data_prep.regenerate --url http://gpu7:30000 --source s.jsonl --out runs/answers --max-tokens 8192

# reasoning on, every assistant turn anew, the model's folder not here
python -m data_prep.regenerate --url http://gpu7:30000 --source s.jsonl --out runs/answers --thinking true --turns all \
--temperature 1.0 --top-p 0.95 --top-k -1 --min-p 0 --repetition-penalty 1

# greedily, behind a key that stands in the environment variable SERVER_KEY
python -m data_prep.regenerate --url https://host/v1 --source s.jsonl --out answers --temperature 0 \
--repetition-penalty 1 --api-key-env SERVER_KEY
"""
AFTER = """
Stop it at any time (Ctrl-C, kill) and run the same command again: it goes on with what is missing. Start the server
with the parsers of its model, e.g. for Kimi-K2.5 in SGLang: --reasoning-parser kimi_k2 --tool-call-parser kimi_k2.

Exit codes: 0 done (records that failed within --max-failures stand in failed.jsonl), 2 bad input or server, 130
interrupted.
"""
HELP = {
    "model": "name the server answers to (default: the one it lists)",
    "api_key_env": "NAME of the environment variable that holds the API key",
    "concurrency": "conversations under way at any moment",
    "max_tokens": "of one answer, reasoning included",
    "temperature": "0 = greedy; not given = as served, and so for the next four",
    "top_p": "share of probability that tokens are drawn from",
    "min_p": "least probability of a token, as a share of the likeliest one's",
    "repetition_penalty": "1 = none",
    "top_k": "-1 = all tokens",
    "generation_config": "folder or file to read the sampling as served from (default: the server's model folder)",
    "seed": "each answer gets a seed of its own, made of this and the record's id",
    "turns": "last: the last answer alone; all: each assistant turn in order",
    "keep_empty": "keep answers in which nothing is said",
    "keep_token_ids": "keep the token ids of the last answer and its prompt, where the server gives them",
    "retries": "of one request",
    "backoff_s": "before the first retry; doubled for each further one, up to 30 s",
    "timeout_s": "of one request",
    "outage_s": "how long an unreachable server is waited for",
    "max_failures": "share of records that may fail",
}


def build_parser() -> Parser:
    """Flags of the settings, in the words of the configuration."""
    parser = Parser(
        prog="python -m data_prep.regenerate",
        description="Let the served target answer conversations itself, through an OpenAI-compatible server.",
        examples=EXAMPLES,
        epilog=AFTER,
    )
    parser.add_argument("--url", required=True, help="of the server, http://host:port")
    parser.add_argument("--source", type=Path, required=True, help="JSON lines of conversations")
    parser.add_argument("--out", type=Path, required=True, help="folder for answers.jsonl and report.json")
    parser.add_argument(
        "--tokenizer", default="", help="folder of the target's, to count texts that re-tokenize otherwise"
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run a tokenizer's own Python")
    kinds = {"int": int, "float": float, "float | None": float, "int | None": int, "str": str}
    for one in fields(RegenerateConfig):
        flag, text = "--" + one.name.replace("_", "-"), HELP.get(one.name)
        if one.name in ("url", "source", "server_args", "template_kwargs", "thinking"):
            continue
        if one.type == "bool":
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=one.default, help=text)
        else:
            default = None if one.default is MISSING else one.default
            parser.add_argument(flag, type=kinds[str(one.type)], default=default, metavar="X", help=text)
    parser.add_argument("--thinking", choices=("true", "false"), help="tell the chat template to reason, or not to")
    parser.add_argument(
        "--template-kwarg", action="append", default=[], metavar="NAME=VALUE", help="further chat template argument"
    )
    return parser


def config_from(args: argparse.Namespace) -> RegenerateConfig:
    """The configuration that the flags ask for. Raises ConfigError on an argument that is no NAME=VALUE."""
    import yaml

    names = [one.name for one in fields(RegenerateConfig) if one.name not in ("server_args", "template_kwargs")]
    given: dict[str, Any] = {name: getattr(args, name) for name in names}
    given["source"] = str(args.source)
    given["thinking"] = None if args.thinking is None else args.thinking == "true"
    kwargs = {}
    for text in args.template_kwarg:
        name, found, value = text.partition("=")
        if not found:
            raise ConfigError("bad argument", where="--template-kwarg", why=text, mend="give NAME=VALUE")
        kwargs[name] = yaml.safe_load(value)
    return RegenerateConfig(**given, template_kwargs=kwargs)


def load_tokenizer(folder: str, trust: bool) -> Any:
    """The tokenizer of a folder, or None without one. Raises ConfigError."""
    if not folder:
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust)
    except Exception as err:  # transformers and tokenizers raise a dozen kinds, a bare Exception too
        mend = "give the target's folder with its tokenizer, or leave --tokenizer out"
        raise ConfigError("cannot load the tokenizer", where=folder, why=str(err), mend=mend) from None


@one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    args = build_parser().parse_args(argv)
    console = Console(highlight=False)
    try:
        cfg = config_from(args)
        tokenizer = load_tokenizer(args.tokenizer, args.trust_remote_code)
        from data_prep.regenerate.progress import shown_progress

        with shown_progress(args.source, console) as advance:
            report = regenerate(cfg, args.source, args.out, args.url, advance, tokenizer)
    except KeyboardInterrupt:
        print(f"interrupted; finished answers are kept in {args.out}, the same command goes on", file=sys.stderr)
        return 130
    show_report(report, console)
    console.print(f"{args.out / 'answers.jsonl'}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
