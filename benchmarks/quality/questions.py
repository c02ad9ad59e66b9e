"""Questions about Python's standard library, and what its own documentation answers: text no model wrote."""

from __future__ import annotations

import importlib
import inspect
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eagle3.atomic import write_text

MODULES = (
    "os",
    "shutil",
    "json",
    "re",
    "math",
    "statistics",
    "random",
    "itertools",
    "functools",
    "collections",
    "string",
    "textwrap",
    "datetime",
    "calendar",
    "time",
    "pathlib",
    "tempfile",
    "glob",
    "fnmatch",
    "csv",
    "configparser",
    "hashlib",
    "hmac",
    "secrets",
    "struct",
    "codecs",
    "heapq",
    "bisect",
    "array",
    "weakref",
    "types",
    "copy",
    "pprint",
    "enum",
    "numbers",
    "decimal",
    "fractions",
    "operator",
    "argparse",
    "logging",
    "threading",
    "multiprocessing",
    "subprocess",
    "queue",
    "socket",
    "ssl",
    "select",
    "asyncio",
    "email",
    "html",
    "urllib.request",
    "urllib.parse",
    "http.client",
    "ftplib",
    "poplib",
    "imaplib",
    "smtplib",
    "uuid",
    "zipfile",
    "tarfile",
    "gzip",
    "bz2",
    "lzma",
    "zlib",
    "shelve",
    "sqlite3",
    "unittest",
    "doctest",
    "timeit",
    "pdb",
    "trace",
    "traceback",
    "gc",
    "inspect",
    "ast",
    "dis",
    "tokenize",
    "locale",
    "gettext",
    "ipaddress",
    "difflib",
    "contextlib",
    "abc",
    "dataclasses",
    "warnings",
    "xml.etree.ElementTree",
)
ASKS = (
    "What does `{}` do in Python?",
    "Explain Python's `{}`.",
    "Describe `{}` from the Python standard library.",
    "When would I use `{}` in Python?",
)
CHARACTERS = (220, 800)  # of an answer
_END = re.compile(r"\n\s*(?:>>>|Args:|Arguments:|Example)")


def documented() -> dict[str, str]:
    """Name of each documented function or class -> the prose of its docstring, no docstring twice."""
    found: dict[str, str] = {}
    taken: set[str] = set()
    for name, text in _docstrings():
        prose = re.sub(r"[ \t]*\n(?!\n)", " ", _END.split(text)[0].strip())
        if CHARACTERS[0] <= len(prose) <= CHARACTERS[1] and not prose.startswith("*") and prose not in taken:
            found[name] = prose
            taken.add(prose)
    return found


def _docstrings() -> Iterator[tuple[str, str]]:
    for module in MODULES:
        for name, member in sorted(vars(importlib.import_module(module)).items()):
            text = inspect.getdoc(member) if callable(member) and not name.startswith("_") else None
            if text:
                yield f"{module}.{name}", text


def write_questions(folder: Path, count: int, seed: int = 0) -> int:
    """`prompts.jsonl`, and `foreign.jsonl` with the documentation's answers, under the same ids.

    Args:
        folder: where to.
        count: how many, at most.
        seed: of their choice.

    Returns:
        how many there are; which depends on this Python's version.
    """
    texts = documented()
    names = sorted(texts)
    random.Random(seed).shuffle(names)
    prompts: list[dict[str, Any]] = []
    answered: list[dict[str, Any]] = []
    for number, name in enumerate(names[:count]):
        asked = {"role": "user", "content": ASKS[number % len(ASKS)].format(name)}
        prompts.append({"id": f"py-{number:04d}", "messages": [asked]})
        answer = {"role": "assistant", "content": texts[name]}
        answered.append({"id": f"py-{number:04d}", "messages": [asked, answer]})
    for file, records in (("prompts.jsonl", prompts), ("foreign.jsonl", answered)):
        write_text(folder / file, "".join(json.dumps(record) + "\n" for record in records))
    return len(prompts)
