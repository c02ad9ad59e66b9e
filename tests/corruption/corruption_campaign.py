"""Damage what the product writes, at random, and see that each damage is found before anything of it is used.

    python tests/corruption/corruption_campaign.py --count 1000 --seed 0

A damage counts as found when opening or reading raises one line that names the file and how to mend it. It is harmless
only by proof: everything that is read is equal to what was written. Anything else is missed. Every tenth damage of a
store is mended as its line says, and the store compared with the whole one. Exit code 1 if any is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from corruption_damage import Damage, draw
from corruption_subjects import SUBJECTS, Subject, digest

from eagle3.errors import RedraftError, WiringError

OPEN, READ, HARMLESS, MISSED = "at open", "at read", "harmless", "missed"
MENDED_EVERY = 10


@dataclass
class Outcome:
    """What came of one damage."""

    verdict: str
    line: str = ""


@dataclass
class Table:
    """All outcomes."""

    counts: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # subject, kind, verdict
    notes: list[str] = field(default_factory=list)
    mended: int = 0

    @property
    def missed(self) -> int:
        """Damages that nothing found."""
        return sum(count for (*_, verdict), count in self.counts.items() if verdict == MISSED)

    def lines(self) -> list[str]:
        """A table, then what is to be said of single damages."""
        verdicts = (OPEN, READ, HARMLESS, MISSED)
        out = [f"{'damaged':<24}{'how':<14}{'count':>6}" + "".join(f"{one:>10}" for one in verdicts)]
        for subject, kind in sorted({key[:2] for key in self.counts}):
            row = [self.counts[subject, kind, verdict] for verdict in verdicts]
            out.append(f"{subject:<24}{kind:<14}{sum(row):>6}" + "".join(f"{one:>10}" for one in row))
        total = [sum(n for key, n in self.counts.items() if key[2] == verdict) for verdict in verdicts]
        out.append(f"{'all':<38}{sum(total):>6}" + "".join(f"{one:>10}" for one in total))
        return [*out, f"{self.mended} were mended as their line says; all was then as before", *self.notes]


def judge(subject: Subject, sound: str, damage: Damage) -> Outcome:
    """Open and read a damaged folder."""
    verdict = OPEN
    try:
        opened = subject.open()
        verdict = READ
        value = subject.read(opened)
    except RedraftError as err:
        told = tells(str(err), damage) or (isinstance(err, WiringError) and str(subject.folder) in str(err))
        return Outcome(verdict, str(err)) if told else Outcome(MISSED, f"says too little: {err}")
    except Exception:
        return Outcome(MISSED, traceback.format_exc().splitlines()[-1])
    if digest(value) == sound:
        return Outcome(HARMLESS)
    return Outcome(OPEN, "") if subject.found(value) else Outcome(MISSED, "what was read differs")


def tells(line: str, damage: Damage) -> bool:
    """Whether a line names the damaged file (or its shard), in one line, with what to do."""
    names = [Path(file).name.partition(".")[0] for file in (damage.file, damage.other) if file]
    return "\n" not in line and any(name in line for name in names) and "To mend: " in line


def campaign(count: int, seed: int, folder: Path, mended_every: int = MENDED_EVERY) -> Table:
    """`count` damages, as evenly over the subjects as it goes."""
    dice, table = random.Random(seed), Table()
    subjects = [make(folder / f"subject-{number}") for number, make in enumerate(SUBJECTS)]
    for number, subject in enumerate(subjects):
        sound, content = digest(subject.read(subject.open())), subject.content()
        keep = folder / f"keep-{number}"
        shutil.copytree(subject.folder, keep)
        for turn in range(count // len(subjects) + (number < count % len(subjects))):
            damage = draw(dice, subject.folder, subject.files, subject.pairs)
            damage.plant(subject.folder)
            outcome = judge(subject, sound, damage)
            table.counts[subject.name, damage.kind, outcome.verdict] += 1
            if outcome.verdict in (MISSED, HARMLESS):
                table.notes.append(f"{outcome.verdict}: {subject.name}: {damage.words}: {outcome.line}")
            elif turn % mended_every == 0 and mend(subject, content):
                table.mended += 1
            restore(keep, subject.folder)
    return table


def mend(subject: Subject, content: dict[str, str]) -> bool:
    """Do what the message says; False where that takes a server or a training run, which their own tests have."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            subject.mend()
    except NotImplementedError:
        return False
    after = subject.content()
    differing = sorted(name for name in {*content, *after} if content.get(name) != after.get(name))
    assert not differing, f"{subject.name} is not as it was after the mend: {differing}"
    return True


def restore(keep: Path, folder: Path) -> None:
    """Put the folder back as it was."""
    shutil.rmtree(folder)
    shutil.copytree(keep, folder)


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000, help="damages")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of damages")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="corruption-") as folder:
        table = campaign(args.count, args.seed, Path(folder))
    print("\n".join(table.lines()))
    return 1 if table.missed else 0


if __name__ == "__main__":
    sys.exit(main())
