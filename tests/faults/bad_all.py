"""Every bad input, by what it is, and the page that lists them."""

from __future__ import annotations

import bad_command
import bad_config
import bad_data
import bad_server
import bad_store
import bad_target
from faults_page import Page

HEAD = """# Bad input, and the one line it gets

Each row is entered through the real command line. The answer is exit code 2 and exactly one line on standard error that
says what is wrong, where, and how to mend it; no traceback, and nothing half-written. `tests/faults` also shows that
the same command takes the sound input. Shortened here as in [the planted faults](faults.md). What a server or a library
says for itself is quoted as it was said.

Written by `python tests/faults/write_faults.py`; a test compares it with what the product prints.

| # | bad input | caught | the line |
|---|---|---|---|
"""

PAGE = Page(
    "bad_input",
    HEAD,
    [
        *bad_config.FAULTS,
        *bad_data.FAULTS,
        *bad_target.FAULTS,
        *bad_store.FAULTS,
        *bad_server.FAULTS,
        *bad_command.FAULTS,
    ],
)
