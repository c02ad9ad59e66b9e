"""Under an outer launcher: rank 0 runs the pipeline, all other processes wait for training jobs and take part in them.

Processes that torchrun, deepspeed or srun started all run the same command. Only one may prepare, check and export,
so the others join the group and wait, hours if need be, for rank 0 to hand out a job or to say that there is no more.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch

from eagle3.errors import ConfigError, RedraftError
from train.config import TrainConfig
from train.job import TrainJob
from train.world import joined, launched

PATIENCE = timedelta(days=30)  # a follower waits as long as rank 0 prepares or extracts


def follower() -> bool:
    """Whether an outer launcher started this process as another than the first."""
    return launched() and int(os.environ["RANK"]) > 0


def check_world(cfg: TrainConfig) -> None:
    """Refuse a group of another size than the settings announce: batches and memory were checked for that one.

    Raises:
        ConfigError: `train.nodes` x `train.processes` is not the launcher's number of processes, or nodes need one.
    """
    asked = cfg.nodes * cfg.processes
    if not launched():
        if cfg.nodes > 1:
            raise ConfigError(
                "training on several nodes needs a launcher",
                where=f"train.nodes={cfg.nodes}",
                why="this process is alone: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT are not set",
                mend="start it with scripts/launch/torchrun.sh, hostfile.sh or train.sbatch (docs/multi_node.md)",
                page="multi_node",
            )
        return
    size = int(os.environ["WORLD_SIZE"])
    if asked > 1 and asked != size:
        raise ConfigError(
            "the launcher started another number of processes than the settings say",
            where="train.nodes, train.processes",
            why=f"{cfg.nodes} x {cfg.processes} = {asked} announced, {size} started",
            mend="set train.nodes and train.processes (a node's) to what is started",
            page="multi_node",
        )


class Orders:
    """What rank 0 tells the others, over a group of its own whose waiting has no practical end."""

    def __init__(self) -> None:
        self._group = torch.distributed.new_group(backend="gloo", timeout=PATIENCE)
        self.busy = False  # the others are in a job: they listen again once it has ended well

    def give(self, order: dict[str, Any]) -> None:
        """Rank 0: hand out an order, JSON-able."""
        torch.distributed.broadcast_object_list([order], src=0, group=self._group)

    def take(self) -> dict[str, Any]:
        """Every other rank: wait for the next order.

        Raises:
            RedraftError: rank 0 is gone.
        """
        box: list[Any] = [None]
        try:
            torch.distributed.broadcast_object_list(box, src=0, group=self._group)
        except RuntimeError as err:
            raise RedraftError(
                "the first process is gone", why=str(err).splitlines()[0], mend="its own words say why; run again"
            ) from None
        return box[0]


_orders: Orders | None = None


@contextlib.contextmanager
def leading() -> Iterator[None]:
    """Around rank 0's pipeline: join the group first, let the others go at the end. Without a launcher, nothing."""
    global _orders
    if not launched() or int(os.environ["WORLD_SIZE"]) == 1:
        yield
        return
    with joined():
        _orders = orders = Orders()
        try:
            yield
        finally:
            _orders = None
            if not orders.busy:  # else training failed, here and there: the others are on their own way out
                orders.give({"end": True})


@contextlib.contextmanager
def shared(job: TrainJob) -> Iterator[None]:
    """Around rank 0's part in a job, inside `leading`: the others take part. Elsewhere, nothing."""
    if _orders is None:
        yield
        return
    _orders.give({"job": asdict(job)})
    _orders.busy = True
    yield
    _orders.busy = False


def follow() -> None:
    """Every other rank: train what rank 0 hands out until it says that there is no more.

    Raises:
        RedraftError: training failed here, or rank 0 is gone.
    """
    from train.loop import Loop

    with joined() as world:
        orders = Orders()
        while "job" in (order := orders.take()):
            Loop(TrainJob.from_dict(order["job"]), world).run()
