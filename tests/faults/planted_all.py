"""Every planted fault, in the order in which a user would meet them, and the page that lists them."""

from __future__ import annotations

import planted_config
import planted_draft
import planted_engine
import planted_foreign
import planted_store
from faults_page import Page

HEAD = """# Faults planted, and where each is caught

Each row plants one fault in otherwise right inputs and calls what a user would call next; `tests/faults` also shows
that the same inputs without the fault pass. All are caught before training or serving. Shortened here: paths, ports,
hashes, measured decimals (`N`), and lists of conventions. A verdict of several lines is joined into one.

Written by `python tests/faults/write_faults.py`; a test compares it with what the product prints.

| # | fault | caught | the line |
|---|---|---|---|
"""

PAGE = Page(
    "faults",
    HEAD,
    [
        *planted_config.FAULTS,
        *planted_foreign.FOREIGN,
        *planted_foreign.CAPTURE,
        *planted_store.FAULTS,
        *planted_draft.FAULTS,
        *planted_engine.FAULTS,
    ],
)
