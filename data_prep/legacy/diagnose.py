"""Diagnose a set: judge a few samples spread over it, and insist that they agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from data_prep.legacy.formats import TEACHER, LegacyFile, LegacyFormat, LegacyRecord, spread
from data_prep.legacy.judge import Judge, SlotFinding
from eagle3.errors import DataError, IntegrityError, WiringError


@dataclass(frozen=True)
class Diagnosis:
    """What the slots of a set are.

    Args:
        format: the files' layout.
        slots: one finding a slot; its evidence is from the first sample.
        sure_in: for each slot, in how many samples its site was certain.
        samples: files that were judged.
        files: files in the set.
        ran_target: whether the target was run, without which layers cannot be told apart.
        dtype: of the states in the first sample, e.g. `bfloat16`.
        dissent: a line for each file that was judged and left out: unreadable, or not of the kind of the others.
    """

    format: LegacyFormat
    slots: tuple[SlotFinding, ...]
    sure_in: tuple[int, ...]
    samples: tuple[str, ...]
    files: int
    ran_target: bool
    dtype: str
    dissent: tuple[str, ...] = ()

    @property
    def held(self) -> dict[str, int]:
        """Site name -> index of the slot that holds it; of two that hold one site, the first."""
        out: dict[str, int] = {}
        for index, slot in enumerate(self.slots):
            if slot.site is not None:
                out.setdefault(slot.site, index)
        return out

    @property
    def inputs(self) -> list[str | None]:
        """Sites that the tool's training joins, in order; None where not known."""
        return [slot.site for slot in self.slots if slot.role != TEACHER]

    @property
    def teacher(self) -> str | None:
        """Site that the tool's training takes as the final state; None where not known or absent."""
        return next((slot.site for slot in self.slots if slot.role == TEACHER), None)

    @property
    def whole(self) -> bool:
        """Every slot has a name."""
        return all(slot.site is not None for slot in self.slots)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able form."""
        return {**asdict(self), "format": self.format.name, "held": self.held}


def diagnose(
    files: Sequence[LegacyFile],
    read: Callable[[LegacyFile], LegacyRecord],
    judge: Judge,
    samples: int = 5,
    skip_bad: bool = False,
) -> Diagnosis:
    """Judge `samples` files spread over the set.

    Args:
        files: the set.
        read: reads a file, as `read_record`.
        judge: names the slots of a sample.
        samples: how many are judged.
        skip_bad: leave out samples that cannot be read or dissent from the majority, and list them.

    Raises:
        WiringError: two samples hold different sites in one slot, or are of different layouts; names the file.
        DataError, IntegrityError: a sample cannot be read.
    """
    chosen, dissent = spread(files, samples), list[str]()
    judged: list[Judged] = []
    for file in chosen:
        try:
            record = read(file)
            dtype = str(record.slots[0].state.dtype).removeprefix("torch.")
            judged.append(Judged(file, record.format, dtype, judge.judge(record)))
        except (DataError, IntegrityError) as err:
            if not skip_bad:
                raise
            dissent.append(str(err))
    if not judged:
        raise DataError("no sample of the set can be read", why=dissent[0], mend="see that the files are whole")
    dissenters = _dissenters(judged)
    if dissenters and not skip_bad:
        raise next(iter(dissenters.values()))
    dissent += [str(problem) for problem in dissenters.values()]
    agreed = [one for at, one in enumerate(judged) if at not in dissenters]
    merged = [_merge([one.findings[i] for one in agreed]) for i in range(len(agreed[0].findings))]
    return Diagnosis(
        format=agreed[0].kind,
        slots=tuple(slot for slot, _ in merged),
        sure_in=tuple(count for _, count in merged),
        samples=tuple(str(one.file.path) for one in agreed),
        files=len(files),
        ran_target=judge.runs_target,
        dtype=agreed[0].dtype,
        dissent=tuple(dissent),
    )


@dataclass(frozen=True)
class Judged:
    """A sample with what was found in its slots."""

    file: LegacyFile
    kind: LegacyFormat
    dtype: str
    findings: list[SlotFinding]


def _dissenters(judged: list[Judged]) -> dict[int, WiringError]:
    """Samples that are not of the kind most are: another layout, or another site in some slot; by their places."""
    kind, count = Counter((one.kind.name, len(one.findings)) for one in judged).most_common(1)[0][0]
    same = [one for one in judged if (one.kind.name, len(one.findings)) == (kind, count)]
    sites = [_majority([one.findings[i] for one in same]) for i in range(count)]
    out: dict[int, WiringError] = {}
    for at, one in enumerate(judged):
        if (one.kind.name, len(one.findings)) != (kind, count):
            why = f"it is a {one.kind.name} file of {len(one.findings)} slots; most are {kind} files of {count}"
            out[at] = _mixed(one.file, why)
            continue
        for finding, (site, votes) in zip(one.findings, sites, strict=True):
            # An unsure sample is no dissent while the same site is its best guess: a short one can be unsure.
            if site is not None and site not in (finding.site, finding.nearest):
                other = finding.site or f"something else ({finding.evidence})"
                why = f"its {finding.label} is {other}; in {votes} of {len(same)} samples it is {site}"
                out[at] = _mixed(one.file, why)
                break
    return out


def _majority(findings: list[SlotFinding]) -> tuple[str | None, int]:
    """The site that most samples are sure of, and how many; None when none is sure."""
    sure = Counter(finding.site for finding in findings if finding.site is not None)
    return sure.most_common(1)[0] if sure else (None, 0)


def _merge(findings: list[SlotFinding]) -> tuple[SlotFinding, int]:
    """What stands for a slot over all samples that agree, and how many are sure."""
    site, votes = _majority(findings)
    return next(finding for finding in findings if finding.site == site), votes


def _mixed(file: LegacyFile, why: str) -> WiringError:
    return WiringError(
        "the set is not of one kind",
        where=str(file.path),
        why=why,
        mend="put the files of each extraction into a folder of their own, and diagnose each",
        page="legacy",
    )
