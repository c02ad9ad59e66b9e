"""Turn data/prompt_topics.txt into data/demo_prompts.jsonl: `python scripts/make_prompts.py [TOPICS] [OUT]`.

Deterministic: the same topics give the same file, byte for byte. One line is
`{"id": "howto-012", "messages": [{"role": "user", "content": "..."}]}`; lines are ordered by a hash of the id, so that
any first part of the file is a fair mix of the kinds.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from eagle3.atomic import write_text
from eagle3.command_line import Parser, one_line_errors
from eagle3.errors import DataError

DATA = Path(__file__).resolve().parent.parent / "data"

# Name of the prompt's kind -> (group of topics, phrasings). The n-th topic takes the (n mod number)-th phrasing.
KINDS: dict[str, tuple[str, list[str]]] = {
    "explain": (
        "concept",
        [
            "Explain {x} in simple terms.",
            "Can you explain {x} to a ten-year-old?",
            "What should a beginner know about {x}?",
            "Give a clear explanation of {x} with one example.",
            "I am curious about {x}. Can you tell me the main ideas?",
        ],
    ),
    "facts": (
        "concept",
        [
            "Give me five interesting facts about {x}.",
            "List three common misunderstandings about {x} and correct them.",
            "Write four quiz questions about {x}, with answers.",
            "List the most important terms someone needs in order to talk about {x}.",
        ],
    ),
    "essay": (
        "concept",
        [
            "Write a short paragraph on why {x} is worth learning about.",
            "How does {x} touch everyday life?",
            "Write the introduction of a school report about {x}.",
            "How has our understanding of {x} changed over time?",
            "Describe {x} in three sentences, then give an analogy.",
        ],
    ),
    "howworks": ("howworks", ["{x}"]),
    "list": ("list", ["{x}"]),
    "howto": (
        "howto",
        [
            "How do I {x}?",
            "Give me step-by-step instructions to {x}.",
            "What is a good way to {x}?",
            "I want to {x}. Where do I start?",
            "Please write a short guide on how to {x}.",
        ],
    ),
    "compare": (
        "compare",
        [
            "What is the difference between {x}?",
            "Compare {x}.",
            "What do {x} have in common, and how do they differ?",
            "Compare {x} in a short list of points.",
        ],
    ),
    "story": (
        "story",
        [
            "Write a short story about {x}.",
            "Tell me a story about {x}.",
            "Write a bedtime story about {x}.",
            "Write the opening of a tale about {x}.",
        ],
    ),
    "question": ("question", ["{x}"]),
    "write": ("write", ["{x}"]),
    "code": ("code", ["{x}"]),
    "advice": ("advice", ["{x}"]),
    "summarize": (
        "passage",
        [
            "Summarize the following text in one sentence.\n\n{x}",
            "What are the main points of this text?\n\n{x}",
            "Rewrite this text for a young child:\n\n{x}",
            "Give this text a title and explain your choice.\n\n{x}",
        ],
    ),
}


def read_topics(path: Path) -> dict[str, list[str]]:
    """Read `[group]` headed lines; `#` starts a comment line. Raises DataError naming the line."""
    groups: dict[str, list[str]] = {}
    topics: list[str] | None = None
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as err:
        raise DataError("cannot read the topics", where=str(path), why=str(err), mend="give a text file") from None
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        if text.startswith("[") and text.endswith("]"):
            topics = groups.setdefault(text[1:-1], [])
        elif topics is None:
            raise DataError("topic before any group", where=f"{path}, line {number}", mend="put a [group] line first")
        else:
            topics.append(text)
    lacking = sorted({group for group, _ in KINDS.values()} - set(groups))
    if lacking:
        raise DataError("a group of topics is missing", where=str(path), why=", ".join(lacking), mend="add its [group]")
    return groups


def build_prompts(groups: dict[str, list[str]]) -> list[dict]:
    """One prompt per kind and topic, no text twice, ordered by a hash of the id."""
    prompts, seen = [], set()
    for kind, (group, phrasings) in KINDS.items():
        for n, topic in enumerate(groups[group]):
            content = phrasings[n % len(phrasings)].format(x=topic)
            if content in seen:
                mend = "change or drop one of the topics"
                raise DataError("the same prompt stands twice", where=f"[{group}]", why=repr(content), mend=mend)
            seen.add(content)
            prompts.append({"id": f"{kind}-{n:03d}", "messages": [{"role": "user", "content": content}]})
    return sorted(prompts, key=lambda p: hashlib.sha256(p["id"].encode()).hexdigest())


@one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry."""
    parser = Parser(
        prog="python scripts/make_prompts.py",
        description=(__doc__ or "").partition("\n\n")[2],
        examples="python scripts/make_prompts.py",
    )
    parser.add_argument("topics", nargs="?", type=Path, default=DATA / "prompt_topics.txt", help="topics by group")
    parser.add_argument("out", nargs="?", type=Path, default=DATA / "demo_prompts.jsonl", help="JSON lines to write")
    args = parser.parse_args(argv)
    prompts = build_prompts(read_topics(args.topics))
    write_text(args.out, "".join(json.dumps(p, ensure_ascii=False) + "\n" for p in prompts))
    print(f"{args.out}: {len(prompts)} prompts")
    return 0


if __name__ == "__main__":
    sys.exit(main())
