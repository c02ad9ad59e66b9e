"""Every wiring that a draft may have been trained on, with the reason to suspect it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from eagle3.conventions import CONVENTIONS, TargetShape
from eagle3.errors import WiringError
from eagle3.wiring import EMBEDDING, Site, Wiring

MAX_ALL = 5000  # more combinations than this would run for days


class Candidates:
    """Wirings of one width, each once, with every reason for which it was added; iterates over the pairs.

    Args:
        shape: the target's.
        slots: how many sites the draft's `fc` takes.
    """

    def __init__(self, shape: TargetShape, slots: int) -> None:
        self._shape, self._slots = shape, slots
        self._found: dict[tuple[Site, ...], tuple[Wiring, list[str]]] = {}

    def __len__(self) -> int:
        return len(self._found)

    def __iter__(self) -> Iterator[tuple[Wiring, list[str]]]:
        return iter(self._found.values())

    @property
    def sites(self) -> list[Site]:
        """Every site that some candidate names, by layer."""
        return sorted({site for aux in self._found for site in aux})

    def within(self, sites: Sequence[Site]) -> Candidates:
        """Only the candidates that need no other sites than these.

        Raises:
            WiringError: none is left.
        """
        out = Candidates(self._shape, self._slots)
        out._found = {aux: kept for aux, kept in self._found.items() if set(aux) <= set(sites)}
        if not out._found:
            raise WiringError(
                "no candidate wiring can be made of the store's own states",
                why=f"it holds {', '.join(site.name for site in sites)}",
                mend="leave --stored-states out, so that the target is run",
            )
        return out

    def add(self, aux: Sequence[Site], reason: str) -> None:
        """Add a wiring; one that this target or draft cannot have is left out."""
        aux = tuple(aux)
        if len(aux) != self._slots:
            return
        if aux not in self._found:
            try:
                wiring = Wiring(aux, "final", self._shape.model_type, self._shape.num_layers, self._shape.hidden_size)
            except WiringError:
                return
            self._found[aux] = (wiring, [])
        self._found[aux][1].append(reason)

    def add_readings(self, ids: Sequence[int] | None) -> None:
        """What `ids` (None = no ids) mean to each program whose rule is known."""
        given = "no ids" if ids is None else f"ids {list(ids)}"
        readers: dict[tuple[Site, ...], list[str]] = {}
        for name, one in CONVENTIONS.items():
            try:
                readers.setdefault(one.parse_like(ids, self._shape).aux, []).append(name)
            except WiringError:
                continue
        for aux, names in readers.items():
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            self.add(aux, f"{given} to {names[-1]}{more}")

    def add_mistakes(self, aux: Sequence[Site], name: str) -> None:
        """The known ways of feeding something else than `aux`."""
        for step, words in ((1, "one layer later"), (-1, "one layer earlier")):
            if all(0 <= site.layer + step < self._shape.num_layers for site in aux):
                self.add([Site(site.layer + step) for site in aux], f"{name}, {words}")
        if EMBEDDING not in aux:
            self.add([EMBEDDING, *aux[:-1]], f"{name}, shifted by one slot: embedding first, last dropped")
            self.add([*aux[:-1], EMBEDDING], f"{name}, embedding in the last slot")
        else:
            rest = [site for site in aux if site != EMBEDDING]
            for last in (self._shape.num_layers - 3, self._shape.num_layers - 2):  # engines' and trainers' defaults
                self.add([*rest, Site(max(last, 0))], f"{name}, shifted by one slot: embedding dropped")
        for order in itertools.permutations(aux):
            if tuple(order) != tuple(aux):
                self.add(order, f"{name}, reordered")

    def add_all(self, sites: Sequence[Site]) -> None:
        """Every choice of sites in layer order.

        Raises:
            WiringError: there are too many.
        """
        choices = list(itertools.islice(itertools.combinations(sorted(set(sites)), self._slots), MAX_ALL + 1))
        if len(choices) > MAX_ALL:
            raise WiringError(
                "too many combinations to try", why=f"{len(set(sites))} sites", mend="name fewer sites in --all-of"
            )
        for aux in choices:
            self.add(aux, "one of all combinations")
