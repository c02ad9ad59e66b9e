"""The language of a text, detected where nobody states it."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from eagle3.errors import ConfigError

UNDETERMINED = "und"
LOOKED_AT = 1000  # characters; each costs about a microsecond and a half
_CODE_BLOCK = re.compile(r"```.*?(```|$)", re.DOTALL)


@lru_cache(maxsize=4)
def _identifier(languages: tuple[str, ...]) -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    if languages:
        try:
            identifier.set_languages(list(languages))
        except ValueError as err:
            known = " ".join(sorted(identifier.labels))
            raise ConfigError(
                "unknown language", where="select.detect_languages", why=str(err), mend=f"choose from {known}"
            ) from None
    return identifier


def detect(text: str, confidence: float, languages: tuple[str, ...] = ()) -> tuple[str, float]:
    """(ISO 639 code or "und", confidence from 0 to 1) of a text, fenced code left out.

    Args:
        text: what the user wrote.
        confidence: below it, and for text without words, the answer is "und".
        languages: codes to choose from; empty = all 139 that py3langid knows.

    Raises:
        ConfigError: a code in `languages` is unknown.
    """
    prose = _CODE_BLOCK.sub(" ", text)[:LOOKED_AT].strip() or text[:LOOKED_AT]
    code, sure = _identifier(languages).classify(prose)
    wordless = code == "zxx" or not any(letter.isalpha() for letter in prose)
    return (UNDETERMINED if sure < confidence or wordless else str(code)), float(sure)
