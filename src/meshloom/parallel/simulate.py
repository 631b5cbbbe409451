"""How long a schedule takes, and how much of that its stages stand idle, under three ways to run it."""

from collections.abc import Mapping
from typing import NamedTuple

from meshloom.parallel.schedules import B, F, W, needs
from meshloom.parallel.slots import Table

STASH, RECOMPUTE = (1, 1, 1), (1, 2, 1)
"""Usual costs of a whole stage's forward, backward to its input and gradients of its weights: products with weights are as many in each (arXiv
2401.10241, section 2). With RECOMPUTE the backward runs the forward again."""
WAYS = {
    "uniform": "all stages keep step, and each does every kind of work that any does in a tick: one program",
    "stage": "all stages keep step, and each does its own work only",
    "asynchronous": "no stage waits for a tick to end: a program for each stage",
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
    s = table.schedule
    cost = (costs[F], costs[B] if s.splits else costs[B] + costs[W], costs[W])
    active = s.ops[..., 0] >= 0
    each = [int(n) for n in active.sum((0, 1))]
    useful = sum(n * c for n, c in zip(each, cost))
    uniform = sum(int(n) * c for n, c in zip(active.any(1).sum(0), cost))
    stage = sum(max(sum(c for on, c in zip(row, cost) if on) for row in tick) for tick in active.tolist())
    wall = {"uniform": uniform, "stage": stage, "asynchronous": _asynchronous(table, cost)}
    return Simulated(
        s.ticks,
        useful / s.stages / s.chunks,
        {way: t / s.chunks for way, t in wall.items()},
        table.used["kept"],
        table.used["late"],
        table.slots,
    )


def _asynchronous(table: Table, cost: tuple[float, float, float]) -> float:
    """When the last stage is done if each runs its list as soon as what it needs is there; a chunk's F, B, W take `cost`."""
    s, end, clock = table.schedule, {}, [0] * table.schedule.stages
    for _, stage, op in s.each():
        clock[stage] = end[op] = max(clock[stage], *(end[need] for need, _ in needs(op, s.stages * s.chunks)), 0) + cost[op.kind]
    return max(clock)
