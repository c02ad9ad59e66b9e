"""The report of a selection for a terminal."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

MOST_LENGTHS = 4  # columns of lengths that 80 columns of a terminal hold
SHOWN_BAD = 3  # bad records printed; the report names them all
KNOWN = ("read", "exact duplicates", "near duplicates", "to choose from", "selected")


def show_selection(report: dict[str, Any], console: Console) -> None:
    """Print what was wanted and got, and where records went."""
    console.print(f"      selected {report['selected']:,} of {report['wanted']:,} conversations", highlight=False)
    console.print(quota_table(report))
    console.print(source_table(report))
    for name, own in report["sources"].items():
        rest = ", ".join(f"{why} {count:,}" for why, count in sorted(own.items()) if why not in KNOWN and count)
        if rest:
            console.print(f"      left out of {name}: {rest}", markup=False)
    for one in report["shortfalls"]:
        name = f"{one['kind']} {one['name']}".strip()
        line = f"      short: {name}: {one['got']:,} of {one['wanted']:,}; {one['why']}"
        console.print(line, style="yellow", markup=False)
    if report["moved_between_quotas"]:
        console.print(f"      {report['moved_between_quotas']:,} conversations stand in for quotas that fell short")
    bad = report["bad_records"]
    for line in bad[:SHOWN_BAD]:
        console.print(f"      bad record: {line}", markup=False)
    if len(bad) > SHOWN_BAD:
        console.print(f"      and {len(bad) - SHOWN_BAD} more bad records, all in report.json")


def quota_table(report: dict[str, Any]) -> Table:
    """Domain by language by length: got of supply, and the sums against the quotas."""
    names = {kind: [one["name"] for one in lines] for kind, lines in report["quotas"].items()}
    lengths = names["length"] if 1 < len(names["length"]) <= MOST_LENGTHS else []
    table = _table("got of what there was, by domain and language")
    table.add_column("domain, language", overflow="fold")
    for heading in ("got", "supply", *lengths):
        table.add_column(heading, justify="right", no_wrap=True)
    for domain in names["domain"]:
        for language in names["language"]:
            own = [one for one in report["cells"] if (one["domain"], one["language"]) == (domain, language)]
            if own:
                by_length = [sum(one["got"] for one in own if one["length"] == name) for name in lengths]
                sums = [sum(one[key] for one in own) for key in ("got", "supply")]
                table.add_row(escape(f"{domain}, {language}"), *(f"{value:,}" for value in (*sums, *by_length)))
    table.add_section()
    for kind, lines in report["quotas"].items():
        for one in lines:
            if len(lines) > 1:
                got = f"{one['got']:,} of {one['wanted']:,}"
                table.add_row(escape(f"{kind} {one['name']}"), got, f"{one['supply']:,}", *[""] * len(lengths))
    return table


def source_table(report: dict[str, Any]) -> Table:
    """Where each source's records went."""
    table = _table("records by source")
    table.add_column("source", overflow="fold")
    for heading in ("read", "exact dup.", "near dup.", "to choose from", "selected"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, own in report["sources"].items():
        table.add_row(escape(name), *(f"{own.get(key, 0):,}" for key in KNOWN))
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0, show_edge=False)
