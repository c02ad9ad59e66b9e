"""The one error type a user sees: what is wrong, where, why, and how to mend it."""

from __future__ import annotations

from eagle3.redact import hidden

LONGEST = 4000  # characters of a line


class RedraftError(Exception):
    """An expected failure, printed as one line and turned into exit code 2 by every entry point; shows no key.

    Args:
        what: what is wrong, as a short clause ("target folder not found").
        where: file, field or record it concerns ("data/train.jsonl, record 17").
        why: what was found against what was expected.
        mend: what the user should do.
        page: name of the page in docs/ that says more ("rounds"), where a line is too short for it.
    """

    exit_code = 2

    def __init__(self, what: str, *, where: str = "", why: str = "", mend: str = "", page: str = "") -> None:
        self.what, self.where, self.why, self.mend = (hidden(text) for text in (what, where, why, mend))
        self.page = page
        super().__init__(str(self))

    def __str__(self) -> str:
        line = self.what
        if self.where:
            line += f" [{self.where}]"
        if self.why:
            line += f": {self.why}"
        if line.endswith(".") and not line.endswith(".."):  # a library's own sentence
            line = line[:-1]
        if self.mend:
            line += f". To mend: {self.mend}"
        if self.page:
            line += f" (docs/{self.page}.md)"
        return " ".join(_shown(line).split())


def _shown(text: str) -> str:
    """A text fit for a terminal: what foreign data holds can neither move the cursor nor fill the screen."""
    plain = "".join(sign if sign.isprintable() or sign.isspace() else "\N{REPLACEMENT CHARACTER}" for sign in text)
    if len(plain) <= LONGEST:
        return plain
    return f"{plain[: LONGEST // 2]} [... {len(plain) - LONGEST} characters ...] {plain[-LONGEST // 2 :]}"


class IncompleteError(RedraftError):
    """Results were written, and the line says what is missing from them."""

    exit_code = 3


class ConfigError(RedraftError):
    """A wrong configuration key, type or value; `where` names the field."""


class WiringError(RedraftError):
    """Two stages disagree about which tensors feed the draft, or a convention cannot express them."""


class DataError(RedraftError):
    """Bad input data; `where` names the file and record."""


class IntegrityError(RedraftError):
    """A file is truncated, corrupt or was not written completely."""
