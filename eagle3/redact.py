"""Keys and passwords stay in the environment: no file, message or report shows one, and no setting may hold one."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence

LAST = ("key", "apikey", "token", "secret", "password", "passwd", "passphrase", "pwd", "auth", "credential")
ANYWHERE = ("secret", "password", "passphrase", "credential", "credentials")
FOLDERS = ("PWD", "OLDPWD")  # the shell's variables for where it is
SHORTEST = 8  # characters of a variable's value that is looked for: shorter ones stand in any text
HIDDEN = "..."
_USER = re.compile(r"(?<=://)[^/\s@'\"]+@")


def is_secret_name(name: str) -> bool:
    """Whether a variable, flag or setting of this name holds a key: HF_TOKEN and --api-key do, --token-map does not."""
    words = [word.lower() for word in re.split(r"[^A-Za-z0-9]+", name) if word]
    return bool(words) and name not in FOLDERS and (words[-1] in LAST or any(word in ANYWHERE for word in words))


def hidden(text: str) -> str:
    """`text` without the user and password of any URL, and without the value of any variable that holds a key."""
    text = _USER.sub(f"{HIDDEN}@", text)
    for name, value in os.environ.items():
        if len(value) >= SHORTEST and value in text and is_secret_name(name):
            text = text.replace(value, f"({name})")
    return text


def hidden_words(command: Sequence[str]) -> list[str]:
    """A command line without what follows a flag, or the `=` of a setting, whose name is that of a key."""
    out: list[str] = []
    for word in command:
        before = out[-1] if out else ""
        name, equals, _ = word.partition("=")
        if before.startswith("--") and "=" not in before and is_secret_name(before):
            out.append(HIDDEN)
        else:
            out.append(f"{name}={HIDDEN}" if equals and is_secret_name(name) else hidden(word))
    return out


def first_secret(names: Iterable[str]) -> str:
    """The first variable or flag among `names` that holds a key; "" when none does."""
    return next((name.partition("=")[0] for name in names if is_secret_name(name.partition("=")[0])), "")
