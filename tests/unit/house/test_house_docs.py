"""The pages point at what is there: modules, folders, other pages and their headings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", ROOT / "data" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TOP = "eagle3|data_prep|train|eval|scripts|tests|benchmarks|conf|docs|data"
PATH = re.compile(rf"`((?:{TOP})/[\w./-]*(?:\.py|\.md|\.sh|/))`")  # others may be a run's files
LINK = re.compile(r"\]\(([^)\s]+)\)")


def headings(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    lines = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_names_only_what_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    missing = [name for name in PATH.findall(text) if not (ROOT / name).exists()]
    for link in LINK.findall(text):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        aim = (page.parent / name) if name else page
        if not aim.exists() or (anchor and anchor not in headings(aim)):
            missing.append(link)
    assert not missing


def test_the_architecture_knows_every_ground_floor_module() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    row = re.findall(r"`([\w*/]+)`", text[text.index("## The ground floor") : text.index("## Adding to it")])
    known = [re.compile(name.rstrip("/").replace("*", r"\w*") + "$") for name in row]
    modules = [path.stem for path in (ROOT / "eagle3").iterdir() if path.stem not in ("__init__", "__pycache__")]
    assert [name for name in modules if not any(one.match(name) for one in known)] == []
