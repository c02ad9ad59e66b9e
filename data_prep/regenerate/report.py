"""What came of a regeneration, in numbers: for the report file and for the terminal."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

NAMED_FAILURES = 1000  # failed records that the report names one by one; all are counted


@dataclass
class Tally:
    """Counts over answers, one `add` each."""

    answers: int = 0
    empty: int = 0
    truncated: int = 0
    looping: int = 0
    with_reasoning: int = 0
    with_tool_calls: int = 0
    with_token_ids: int = 0
    answer_tokens: int = 0
    ids_disagree: int = 0  # the server's count of tokens is not the number of ids it gave
    finish_reason: Counter[str] = field(default_factory=Counter)
    domain: Counter[str] = field(default_factory=Counter)
    language: Counter[str] = field(default_factory=Counter)
    ended_early: Counter[str] = field(default_factory=Counter)

    def add(self, record: dict[str, Any]) -> None:
        """Count one record that is kept."""
        last = record["messages"][-1]
        self.answers += 1
        self.answer_tokens += record["answer_tokens"]
        self.truncated += record["truncated"]
        self.looping += record["looping"]
        self.with_reasoning += bool(last.get("reasoning_content"))
        self.with_tool_calls += bool(last.get("tool_calls"))
        self.finish_reason[record["finish_reason"]] += 1
        for name in ("domain", "language"):
            getattr(self, name)[str(record.get(name) or "unknown")] += 1
        if record.get("ended_early"):
            self.ended_early[record["ended_early"]] += 1
        if ids := record.get("token_ids"):
            self.with_token_ids += 1
            last_turn = record["turns"][-1]["answer_tokens"] if record.get("turns") else record["answer_tokens"]
            self.ids_disagree += len(ids["answer"]) != last_turn

    def figures(self) -> dict[str, Any]:
        """All counts and shares, JSON-able."""
        share = 1 / max(self.answers, 1)
        plain = {name: value for name, value in vars(self).items() if isinstance(value, int)}
        counted = {name: dict(value.most_common()) for name, value in vars(self).items() if isinstance(value, Counter)}
        shares = {"truncated_share": self.truncated * share, "looping_share": self.looping * share}
        return {**plain, **shares, **counted}


def reasons(failures: dict[str, str]) -> dict[str, int]:
    """Failures by reason, commonest first; numbers in the reasons are set aside, but for a server's status."""
    return dict(Counter(re.sub(r"(?<!answered )(?<!\d)\d+", "N", why) for why in failures.values()).most_common(20))


def show_report(report: dict[str, Any], console: Console) -> None:
    """Print a report that `regenerate` returned."""
    table = Table(title=None, show_header=False, box=None, pad_edge=False)
    count = report["answers"]
    share = f"{report['truncated_share']:.1%} cut off, {report['looping_share']:.1%} go round in circles"
    rows = [
        ("answers", f"{count:,} of {report['records']:,} conversations ({share})"),
        ("by", f"{report['served']['model']}, {report['served']['engine']} {report['served']['version']}".rstrip()),
        ("sampling", ", ".join(f"{k} {v:g}" for k, v in report["sampling"].items())),
        ("ended by", _listed(report["finish_reason"])),
        ("domains", _listed(report["domain"])),
        ("languages", _listed(report["language"])),
        ("tokens", f"{report['answer_tokens']:,}, {report['answer_tokens'] / max(count, 1):,.0f} an answer"),
        ("token ids kept", f"{report['with_token_ids']:,} of {count:,}"),
    ]
    speed = report["this_run"]
    if speed["answers"]:
        rows.append(("speed", f"{speed['tokens_per_s']:,.0f} tokens/s over {speed['seconds']:,.0f} s"))
    if report.get("retokenized"):
        rows.append(("re-tokenized", report["retokenized"]["line"]))
    if report["empty"]:
        rows.append(("empty", f"{report['empty']:,}, {'kept' if report['keep_empty'] else 'left out'}"))
    if report["ended_early"]:
        rows.append(("ended early", _listed(report["ended_early"])))
    if report["failed"]:
        rows.append(("failed", f"{report['failed']:,}: {_listed(report['failed_reasons'])}"))
    for name, value in rows:
        table.add_row(name, value)
    console.print(table)


def _listed(counts: dict[str, int], most: int = 8) -> str:
    shown = ", ".join(f"{name} {count:,}" for name, count in list(counts.items())[:most])
    return shown + (", ..." if len(counts) > most else "")
