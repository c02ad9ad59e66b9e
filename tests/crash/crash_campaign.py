"""Kill stages of the front door again and again, and compare the end with an uninterrupted run bit by bit.

    python tests/crash/crash_campaign.py --kills 200 --seed 0
    python tests/crash/crash_campaign.py --kills 60 --seed 1 --stages train,train-2 --record kills.jsonl

A case is a fresh folder in which a stage is killed (-9, the whole process group) one to three times in a row, then run
to its end, then compared. Half of the kills fall at a random time within the stage's duration, the others before or
after a call that moves, flushes, links, removes or writes a file, or within the write. With `--record` the cases are
kept as JSON lines, and the table sums up all that the file holds, so that a campaign can be run in pieces.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

from crash_child import WRITES, Moment
from crash_compare import compare
from crash_stages import STAGES, Whole, Workshop
from rich.console import Console
from rich.table import Table

IN_A_ROW = (1, 1, 2, 3)  # kills of one case, drawn from these


@dataclass
class Case:
    """One case: what was killed when, and what came of it.

    Args:
        stage: its name.
        kills: one entry a kill: "random time", or the name and side of the call ("os.replace before").
        places: of each kill and of what came too late: the second, or the process and the number of its call.
        late: runs that ended before their kill.
        reruns: runs that were let go to their end.
        codes: exit codes of those that were not 0, with what they said last.
        differing: files that differ from the uninterrupted run's.
    """

    stage: str
    kills: list[str] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    late: int = 0
    reruns: int = 0
    codes: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Whether it ended like the uninterrupted run."""
        return not self.codes and not self.differing


def choose_moment(chance: random.Random, whole: Whole) -> Moment:
    """A call of the uninterrupted run: first its name, so that the rare ones come as often, then which of them."""
    name = chance.choice(sorted({one for _, _, one in whole.calls}))
    process, number, _ = chance.choice([call for call in whole.calls if call[2] == name])
    sides = ["before", "after", *(["torn"] * 2 if name in WRITES else [])]
    return Moment(process, number, name, chance.choice(sides))


def run_case(shop: Workshop, name: str, chance: random.Random, kills: int) -> Case:
    """Kill a stage up to `kills` times in a row, finish it, compare."""
    whole, case = shop.whole(name), Case(name)
    root, stage = shop.fresh(name), STAGES[name]
    ended = None
    for _ in range(kills):
        if chance.random() < 0.5:
            words, after = "random time", chance.uniform(0, whole.seconds)
            case.places.append(f"{after:.3f} s")
            ended = shop.run(root, stage, kill_after=after)
        else:
            moment = choose_moment(chance, whole)
            words = f"{moment.name} {moment.how}"
            case.places.append(f"{moment.process} {moment.number}")
            ended = shop.run(root, stage, moment=moment)
        if ended.code != -9:
            case.late += 1
            break
        case.kills.append(words)
    if ended is None or ended.code == -9:
        ended = shop.run(root, stage)
    case.reruns += 1
    if ended.code != 0:
        case.codes.append(f"{ended.code}: {ended.said[-2000:]}")
    case.differing = compare(whole.root, root)
    if case.good:
        shutil.rmtree(root)
    return case


def campaign(
    shop: Workshop, names: list[str], kills: int, seed: int, record: Path | None, until: float = float("inf")
) -> list[Case]:
    """Cases until `kills` kills are done, spread evenly over the stages, or time is up."""
    chance = random.Random(seed)
    cases: list[Case] = []
    share = {name: kills // len(names) + (place < kills % len(names)) for place, name in enumerate(names)}
    for name in names:
        done = 0
        while done < share[name] and time.monotonic() < until:
            case = run_case(shop, name, chance, min(chance.choice(IN_A_ROW), share[name] - done))
            done += len(case.kills)
            cases.append(case)
            if record:
                with open(record, "a", encoding="utf-8") as out:
                    out.write(json.dumps(asdict(case)) + "\n")
    return cases


def read_record(path: Path) -> list[Case]:
    """The cases of a record."""
    return [Case(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def show(cases: list[Case], console: Console) -> None:
    """One row a stage, and the kills by moment."""
    table = Table("stage", "cases", "kills", "at a random time", "at a call", "in a write", "came late", "reruns",
                  "bad exits", "differing files")  # fmt: skip
    for name in [*STAGES, "all"]:
        mine = [case for case in cases if name in (case.stage, "all")]
        kills = Counter(kill for case in mine for kill in case.kills)
        timed, torn = kills["random time"], sum(count for kill, count in kills.items() if kill.endswith("torn"))
        row = [len(mine), kills.total(), timed, kills.total() - timed - torn, torn, sum(case.late for case in mine)]
        row += [sum(case.reruns for case in mine), sum(len(case.codes) for case in mine)]
        row.append(sum(len(case.differing) for case in mine))
        if mine:
            table.add_row(name, *map(str, row), end_section=name == "eval")
    console.print(table)
    by_call = Counter(kill for case in cases for kill in case.kills if kill != "random time")
    console.print("kills at calls: " + ", ".join(f"{name} {count}" for name, count in sorted(by_call.items())))
    for case in cases:
        for line in [*case.codes, *case.differing]:
            console.print(
                f"{case.stage}, after {'; '.join(case.kills)} ({', '.join(case.places)}): {line}",
                style="red",
                markup=False,
            )


def tiny_llama() -> Path:
    """The tests' tiny Llama, made where it is not yet."""
    from data_prep.targets import tiny_llama as maker
    from eagle3.atomic import sha256_json

    cache = Path(__file__).resolve().parents[2] / ".cache" / "targets"
    return maker.make_tiny_llama(cache / f"tiny_llama-{sha256_json(maker.recipe(0))[:16]}")


def main(arguments: list[str] | None = None) -> int:
    """Run a campaign; 1 when anything differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="in all, over all stages")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stages", default=",".join(STAGES), help=f"of {', '.join(STAGES)}")
    parser.add_argument("--record", type=Path, help="JSON lines to add the cases to; the table sums them all up")
    parser.add_argument("--minutes", type=float, default=0.0, help="begin no case after so many; 0 = no limit")
    parser.add_argument(
        "--fresh", action="store_true", help="compose by Hydra, and start training's workers as fresh Pythons: slower"
    )
    parser.add_argument("--work", type=Path, help="folder to work in, kept where something differs")
    told = parser.parse_args(arguments)
    for name, value in {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}.items():
        os.environ.setdefault(name, value)
    work = told.work or Path(tempfile.mkdtemp(prefix="crash-"))
    until = time.monotonic() + told.minutes * 60 if told.minutes else float("inf")
    shop = Workshop(work / f"seed-{told.seed}", tiny_llama(), quick=not told.fresh)
    shop.base.mkdir(parents=True)
    try:
        cases = campaign(shop, told.stages.split(","), told.kills, told.seed, told.record, until)
    finally:
        shop.close()
    good = all(case.good for case in cases)
    show(read_record(told.record) if told.record else cases, Console(width=160))
    if good:
        shutil.rmtree(work)
    else:
        print(f"what differs stands in {work}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
