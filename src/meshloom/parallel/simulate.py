"""How long a schedule takes, and how much of that its stages stand idle, under three ways to run it."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from meshloom.parallel.schedules import B, F, Op, W, needs
from meshloom.parallel.slots import Table

STASH, RECOMPUTE = (1, 1, 1), (1, 2, 1)
"""Usual costs of a whole stage's forward, backward to its input and gradients of its weights: products with weights are as many in each (arXiv
2401.10241, section 2). With RECOMPUTE the backward runs the forward again."""
WAYS = {
    "uniform": "each stage does all kinds of work that any does in a tick",
    "stage": "each stage does its own work only; a tick ends when all are done",
    "asynchronous": "no stage waits for a tick to end",
}
"""Ways to run a table."""


class Simulated(NamedTuple):
    """useful: time that a stage works, the mean over stages.  wall: way to run -> time of a step.  kept, late: inputs kept from F to B, and what waits
    for a W, on each stage at most.  slots: places of the ring buffers, the same on all stages."""

    ticks: int
    useful: float
    wall: dict[str, float]
    kept: tuple[int, ...]
    late: tuple[int, ...]
    slots: Mapping[str, int]

    @property
    def bubble(self) -> dict[str, float]:
        """Way to run -> the part of the time in which a stage does nothing of use."""
        return {way: 1 - self.useful / wall for way, wall in self.wall.items()}


def simulate(table: Table, costs: tuple[float, float, float] = STASH) -> Simulated:
    """A schedule's times.  costs: of a whole stage's F, B and W on one micro-batch; a chunk takes its share, and where W is not apart, B does both."""
    s, cost = table.schedule, _costs(table, costs)
    counts = (s.ops[..., 0] >= 0).sum((0, 1)).tolist()
    lockstep = {way: _begins(table, cost, way == "uniform")[-1] for way in WAYS if way != "asynchronous"}
    wall = {**lockstep, "asynchronous": _asynchronous(table, cost)[1]}
    return Simulated(
        s.ticks, sum(n * c for n, c in zip(counts, cost)) / s.stages, wall, table.used["kept"], table.used["late"], table.slots
    )


def times(table: Table, costs: tuple[float, float, float], way: str) -> tuple[dict[Op, tuple[float, float]], float]:
    """When each operation begins and ends under a way to run the table (WAYS), and when the step is over.  costs: as for `simulate`."""
    s, cost = table.schedule, _costs(table, costs)
    if way == "asynchronous":
        return _asynchronous(table, cost)
    begins, found, active = _begins(table, cost, way == "uniform"), {}, s.ops[..., 0] >= 0
    waits = np.any(active, axis=1, keepdims=True) | active if way == "uniform" else active
    for tick, stage, op in s.each():
        start = begins[tick] + _sum(cost[: op.kind], waits[tick, stage].tolist())
        found[op] = (start, start + cost[op.kind])
    return found, begins[-1]


def _costs(table: Table, costs: tuple[float, float, float]) -> tuple[float, ...]:
    """What a chunk's F, B, W take."""
    s = table.schedule
    return tuple(c / s.chunks for c in (costs[F], costs[B] + (0 if s.splits else costs[W]), costs[W]))


def _begins(table: Table, cost: tuple[float, ...], uniform: bool) -> list[float]:
    """When each tick begins, and when the last is over: a tick begins when the one before is over on all stages.  uniform: a stage waits in it for kinds
    that only others do."""
    active = table.schedule.ops[..., 0] >= 0
    if uniform:
        takes = [_sum(cost, kinds) for kinds in np.any(active, axis=1).tolist()]
    else:
        takes = [max(_sum(cost, kinds) for kinds in {tuple(row) for row in rows}) for rows in active.tolist()]
    return list(accumulate(takes, initial=0))


def _sum(cost: Sequence[float], on: Sequence[bool]) -> float:
    return sum(c for c, here in zip(cost, on) if here)


def _asynchronous(table: Table, cost: tuple[float, ...]) -> tuple[dict[Op, tuple[float, float]], float]:
    """Each stage runs its list in order, an operation as soon as what it needs is there."""
    s, found, clock = table.schedule, {}, [0] * table.schedule.stages
    for _, stage, op in s.each():
        start = max(clock[stage], *(found[need][1] for need, _ in needs(op, s.stages * s.chunks)), 0)
        clock[stage] = start + cost[op.kind]
        found[op] = (start, clock[stage])
    return found, max(clock)
