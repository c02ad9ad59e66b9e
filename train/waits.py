"""How long training stood still for data, and what to do about it."""

from __future__ import annotations

from eagle3.state_read import Spent
from train.config import TrainConfig

ALLOWED = 0.02  # share of the time above which something should be done
BUSY = 0.8  # share of the time from which on the loader has no time left


class Waits:
    """Adds up the steps of one call; the first, which waits for the loader to start, apart."""

    def __init__(self) -> None:
        self.steps, self.seconds, self.waited, self._all = 0, 0.0, 0.0, 0.0

    def add(self, seconds: float, waited: float) -> None:
        """One more step: its seconds, and how many of them were waiting."""
        self._all += seconds
        self.steps += 1
        if self.steps > 1:
            self.seconds, self.waited = self.seconds + seconds, self.waited + waited

    @property
    def share(self) -> float:
        """Share of the time waited."""
        return self.waited / self.seconds if self.seconds else 0.0

    def advice(self, spent: Spent, workers: int, cfg: TrainConfig) -> str:
        """One line on what to raise; empty while the share is small.

        Args:
            spent: the loader's seconds in this process' part of the work.
            workers: its worker processes.
            cfg: the settings in force.
        """
        if self.share <= ALLOWED:
            return ""
        line = f"{self.share:.1%} of the time was spent waiting for data: "
        if (spent.read + spent.decode) / max(1, workers) < BUSY * self._all:
            return line + (
                "reading keeps up, but not far enough ahead; raise train.prefetch_steps "
                f"(now {cfg.prefetch_steps}) and train.prefetch_mib (now {cfg.prefetch_mib})"
            )
        rate = spent.bytes / max(spent.read + spent.decode, 1e-9) / 1e6
        line += f"a worker gives {rate:,.0f} MB/s, "
        if spent.decode > spent.read:
            return line + f"decoding takes most of it; raise train.loader_workers (now {workers})"
        return line + (
            f"the disk takes most of it; raise train.loader_workers (now {workers}), or keep the store on a faster "
            "disk or in fewer bytes (store.codec)"
        )
