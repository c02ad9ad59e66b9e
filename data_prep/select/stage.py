"""The selection: two passes over the sources, quotas in between."""

from __future__ import annotations

import shutil
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_prep.select.candidate import Candidate, LeftOut, Reader, Ruler
from data_prep.select.config import SelectConfig
from data_prep.select.exclude import Excluded
from data_prep.select.features import Features
from data_prep.select.pick import clusters, pick, shuffled
from data_prep.select.quotas import Quota, resolve
from data_prep.select.report import Counts, refuse_shortfall, selection_report
from data_prep.select.sources import Raw, Source
from data_prep.select.write import Selection, write_selected
from eagle3.atomic import sha256_file, write_json
from eagle3.config import require
from eagle3.errors import DataError

MEASURED_TOGETHER = 256  # conversations whose lengths are measured in one call of the tokenizer
NAMED_BAD = 1000  # bad records that the report names one by one; all are counted


def select(
    cfg: SelectConfig, out: Path, tokenizer: Any, advance: Callable[[int], None] | None = None
) -> dict[str, Any]:
    """Choose conversations and write `out/selected.jsonl` and `out/report.json`, each whole or not at all.

    The same settings and records give the same bytes, whatever the order of sources, files or lines (the numbers of
    records in the provenance apart).

    Args:
        cfg: what to choose from, and how.
        out: folder to write.
        tokenizer: the target's, to measure lengths; None = lengths are estimated.
        advance: called with the number of records read, in both passes.

    Returns:
        The report.

    Raises:
        DataError: a source, or with `on_bad_record: refuse` a record, is bad; a quota falls short under
            `shortfall: refuse`; nothing is left to choose.
        ConfigError: a setting is wrong.
    """
    cfg.validate()
    require(bool(cfg.sources), "select.sources", cfg.sources, "at least one source")
    told = advance or (lambda count: None)
    sources = [Source(one) for one in cfg.sources]
    out = Path(out)
    work = out / ".work.tmp"  # one name, so that a rerun clears what a killed run left
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        first = FirstPass(cfg, tokenizer, work / "signatures")
        try:
            for number, source in enumerate(sources):
                first.read(number, source, told)
        finally:
            first.features.close()
        found = first.chosen()
        report = selection_report(cfg, first.quotas, first.counts, found, first.ruler.unit if first.measured else None)
        refuse_shortfall(cfg, report)
        write_selected(cfg, sources, found, out / "selected.jsonl", work, told)
        report["selected_sha256"] = sha256_file(out / "selected.jsonl")
        write_json(out / "report.json", report)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return report


@dataclass
class _Batch:
    """Candidates waiting to be measured together."""

    raws: list[Raw] = field(default_factory=list)
    ones: list[Candidate] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)


class FirstPass:
    """Reads all records once and keeps their features.

    Args:
        cfg: the selection's settings.
        tokenizer: see `select`.
        signatures: file for MinHash signatures.
    """

    def __init__(self, cfg: SelectConfig, tokenizer: Any, signatures: Path) -> None:
        self.cfg = cfg
        self.quotas: tuple[Quota, Quota, Quota] = resolve(cfg)
        self.features = Features(cfg, self.quotas, signatures if cfg.dedupe == "near" else None)
        self.excluded = Excluded(cfg.exclude, cfg.exclude_threshold, cfg.shingle)
        self.ruler = Ruler(tokenizer, cfg.answers, cfg.template_kwargs)
        self.measured = bool(cfg.token_bound)
        self.counts = Counts(left_out=defaultdict(Counter), bad=[], excluded=len(self.excluded))

    def read(self, number: int, source: Source, advance: Callable[[int], None]) -> None:
        """All records of one source."""
        reader = Reader(self.cfg, source.cfg, self._unwanted)
        own = self.counts.left_out[source.cfg.name]
        batch = _Batch()
        for raw in source.read():
            own["read"] += 1
            try:
                self._take(reader, raw, batch)
            except LeftOut as why:
                own[str(why)] += 1
            except DataError as err:
                self._bad(err, own)
            if len(batch.ones) == MEASURED_TOGETHER:
                self._measure(number, batch, own)
                batch = _Batch()
            advance(1)
        self._measure(number, batch, own)

    def _take(self, reader: Reader, raw: Raw, batch: _Batch) -> None:
        one = reader.read(raw)
        verdict = self.excluded.judge(one.turns)
        if verdict:
            raise LeftOut(f"evaluation prompt: {verdict}")
        text = self.ruler.render(one, raw.where) if self.measured else ""
        batch.raws.append(raw)
        batch.ones.append(one)
        batch.texts.append(text)

    def _measure(self, number: int, batch: _Batch, own: Counter[str]) -> None:
        bound = self.cfg.token_bound
        lengths = self.ruler.lengths(batch.texts) if self.measured and batch.ones else [-1] * len(batch.ones)
        for raw, one, tokens in zip(batch.raws, batch.ones, lengths, strict=True):
            if bound and tokens > bound:
                own["too long"] += 1
            else:
                self.features.add(number, raw, one, tokens)

    def _unwanted(self, domain: str, language: str) -> str | None:
        if self.quotas[0].place(domain) is None:
            return "domain without a quota"
        return "language without a quota" if self.quotas[1].place(language) is None else None

    def _bad(self, err: DataError, own: Counter[str]) -> None:
        if self.cfg.on_bad_record == "refuse":
            raise err
        own["bad"] += 1
        if len(self.counts.bad) < NAMED_BAD:
            self.counts.bad.append(str(err))

    def chosen(self) -> Selection:
        """Duplicates and quotas, over the features of all records.

        Raises:
            DataError: no record may be chosen.
        """
        rows, files = self.features.rows(), self.features.files.names
        if not len(rows):
            read = sum(own["read"] for own in self.counts.left_out.values())
            why = f"{read} records read, all left out"
            if self.counts.bad:
                why += f"; the first bad one: {self.counts.bad[0]}"
            names = ", ".join(source.name for source in self.cfg.sources)
            raise DataError("nothing to choose from", where=names, why=why, mend="check select.sources and the quotas")
        signatures = self.features.signatures.read() if self.features.signatures else None
        order = shuffled(rows, [source.name for source in self.cfg.sources], files)
        found = clusters(rows, order, signatures, self.cfg)
        return Selection(rows, files, found, pick(rows, found.kept, order, self.cfg, self.quotas))
