"""Pages as text: templates of `eval/pages`, filled in. Everything a page shows is inside it; it runs no script."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jinja2

from eval.table import number, percent

WORD = re.compile(r"""(?:[^\s'"\\]|'[^']*'|"(?:[^"\\]|\\.)*"|\\.)+""")  # with its quotes
LINE = 92  # characters of a command's line
TEMPLATES = Path(__file__).with_name("pages")


def render(template: str, **values: Any) -> str:
    """The page `template` with `values` in it, escaped; a name that is missing is an error."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(number=number, percent=percent, folded=folded)
    return environment.get_template(template).render(**values)


def folded(command: str, width: int = LINE) -> str:
    """A long command over several lines, which a shell reads as one: a flag stays beside its value."""
    words = WORD.findall(command)
    if len(command) <= width or " ".join(words) != command:  # short, or not what a shell would read
        return command
    lines = [""]
    for unit in _units(words):
        if lines[-1] and len(lines[-1]) + len(unit) > width - 3:
            lines.append("   ")
        lines[-1] += f" {unit}" if lines[-1] else unit
    return " \\\n".join(lines)


def _units(words: list[str]) -> list[str]:
    """Words, each flag together with the value that follows it."""
    units: list[str] = []
    for word, before in zip(words, ["", *words], strict=False):
        if before.startswith("-") and "=" not in before and not word.startswith("-"):
            units[-1] += f" {word}"
        else:
            units.append(word)
    return units
