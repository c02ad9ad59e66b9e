"""The troubleshooting page names only lines that are printed, and errors name only pages that are there."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

from eagle3.errors import IncompleteError, RedraftError

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
FOLDERS = ("eagle3", "data_prep", "train", "eval", "scripts")
HOLE = "\0"  # what is filled in when the error is raised
MAKERS = ("_failure", "_impossible", "refuse_difference")  # these hand their words to an error


@functools.cache
def calls() -> list[tuple[Path, ast.Call]]:
    """Every call in the product."""
    return [
        (path, node)
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
    ]


def text_of(node: ast.expr) -> str:
    """A string as it stands in the source, with holes; "" for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else HOLE for part in node.values)
    return ""


def raises(node: ast.Call) -> bool:
    """Whether a call makes an error, or hands its words to what makes one."""
    name = getattr(node.func, "id", "") or getattr(node.func, "attr", "")
    return name.endswith(("Error", "Gone")) or name in MAKERS


def lines() -> set[str]:
    """How errors begin, and with what they can be filled."""
    return {text for _, node in calls() if raises(node) and node.args and (text := text_of(node.args[0]))}


def indexed() -> list[str]:
    """The first column of the page's tables."""
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    return re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)


def fits(line: str, printed: str) -> bool:
    """Whether an error's words, with its holes filled, may begin with a line of the index.

    Two words at least must stand in the source: a hole alone would fit anything.
    """
    if HOLE not in printed:
        return printed.startswith(line)
    if printed.split(HOLE)[0].startswith(line):
        return True
    pattern = ".+?".join(map(re.escape, printed.split(HOLE)))
    return len(printed.replace(HOLE, "").split()) > 1 and re.match(pattern, line) is not None


def test_every_indexed_line_is_printed_somewhere() -> None:
    known = lines()
    assert len(known) > 300 and len(indexed()) > 60
    assert [line for line in indexed() if not any(fits(line, one) for one in known)] == []
    for made_up in ("the server has gone fishing", "no served dinner", "bad weather", "another cup of tea"):
        assert not any(fits(made_up, one) for one in known)


def test_no_line_is_indexed_twice() -> None:
    assert sorted(set(indexed())) == sorted(indexed())


def test_every_page_that_an_error_names_is_there() -> None:
    named = [
        (path, keyword.value.value)
        for path, node in calls()
        for keyword in node.keywords
        if keyword.arg == "page" and isinstance(keyword.value, ast.Constant)
    ]
    assert len(named) > 30
    assert [(path, page) for path, page in named if not (DOCS / f"{page}.md").is_file()] == []


def test_links_of_the_page_lead_somewhere() -> None:
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    links = set(re.findall(r"\]\(([\w.]+)\)", page))
    assert links and [link for link in links if not (DOCS / link).is_file()] == []


def test_the_page_ends_the_line() -> None:
    err = RedraftError("no", where="here", why="since", mend="do", page="rounds")
    assert str(err) == "no [here]: since. To mend: do (docs/rounds.md)" and err.exit_code == 2
    assert str(RedraftError("no", page="rounds")) == "no (docs/rounds.md)"
    assert IncompleteError("some").exit_code == 3
