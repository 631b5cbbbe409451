"""Layers to the stages of a pipeline and stages to parts of the machine, of any size each: the assignment with the shortest step, exactly.

A step of B micro-batches through stages that take t_1 ... t_S lasts t_1 + ... + t_S + (B - 1) max t. With the largest bounded by t_max, the sum is a
dynamic program from the last layer to the first, over the layers left, the devices left and, where memory binds, the number of stages behind; t_max runs
over the times that stages can have, but for those that a lower bound rules out.  Source: Alpa, Zheng et al. 2022, arXiv 2201.12023, section 5.2
(equations 2 to 5). Every device is used.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

FLYING = {
    "1f1b": lambda behind, micro: min(micro, 2 * behind + 1),
    "gpipe": lambda behind, micro: micro,
    "forward": lambda behind, micro: 1,
}
"""Schedule -> micro-batches that a stage has in flight, by the number of stages behind it; those of `parallel/schedules.py`. "forward": inference."""


class Submesh(NamedTuple):
    """A part of a machine: `each` devices on each of `nodes` nodes."""

    nodes: int
    each: int

    @property
    def devices(self) -> int:
        """How many it has."""
        return self.nodes * self.each


class Profile(NamedTuple):
    """What stages cost. All are [layers, layers, submeshes]: of layers i to k, both included, on a submesh.

    seconds: of one micro-batch, forward and backward; inf where a submesh cannot run them.  held: bytes of a device whatever is in flight.
    flight: bytes of a device for each micro-batch in flight."""

    seconds: np.ndarray
    held: np.ndarray
    flight: np.ndarray


class Task(NamedTuple):
    """What is to be assigned.  meshes: the parts of the machine that a stage may have, in the order of the profile's last axis.  nodes, each: the machine.
    memory: bytes of a device.  schedule: a row of FLYING.  micro: micro-batches of a step."""

    profile: Profile
    meshes: tuple[Submesh, ...]
    nodes: int
    each: int
    memory: int
    schedule: str
    micro: int

    @property
    def layers(self) -> int:
        """How many."""
        return len(self.profile.seconds)

    @property
    def devices(self) -> int:
        """Of the machine."""
        return self.nodes * self.each

    @property
    def flying(self) -> np.ndarray:
        """Micro-batches in flight by the number of stages behind, for as many as there can be."""
        return np.array([FLYING[self.schedule](behind, self.micro) for behind in range(min(self.layers, self.devices))])

    @property
    def ordered(self) -> bool:
        """Whether stages have to lie on consecutive devices: where the submeshes of a node are no powers of two that divide it, another order may leave
        gaps that no stage fits."""
        small = [mesh.each for mesh in self.meshes if mesh.nodes == 1]
        return self.nodes > 1 and any(n & (n - 1) or self.each % n for n in small if n < self.each)

    def fits(self, mesh: Submesh, first: int) -> bool:
        """Whether a submesh can begin with a device, where stages lie on consecutive ones."""
        inside = first % self.each
        return inside + mesh.each <= self.each if mesh.nodes == 1 else inside == 0


class Part(NamedTuple):
    """A stage: its layers first to last, both included; its submesh; its time; bytes of one of its devices; its first device."""

    first: int
    last: int
    mesh: Submesh
    seconds: float
    bytes: int
    device: int


class Assigned(NamedTuple):
    """The stages, in order.  seconds: of a step, or for inference of the slowest stage.  tried: values of t_max for which the program ran."""

    parts: tuple[Part, ...]
    seconds: float
    tried: int

    @property
    def slowest(self) -> float:
        """Seconds of the stage that all others wait for."""
        return max(part.seconds for part in self.parts)

    @property
    def said(self) -> str:
        """The stages in a line: "layers 0-6 on 1x4; ..."."""
        each = (
            f"layer{'s' * (p.last > p.first)} {f'{p.first}-' * (p.last > p.first)}{p.last} on {p.mesh.nodes}x{p.mesh.each}"
            for p in self.parts
        )
        return "; ".join(each)


def submeshes(nodes: int, each: int, every: bool = False) -> tuple[Submesh, ...]:
    """The parts of a machine that a stage may have: powers of two inside a node and whole nodes, as Alpa's; every: all sizes inside a node."""
    inside = range(1, each) if every else [2**i for i in range(each.bit_length()) if 2**i < each]
    return (*(Submesh(1, n) for n in inside), *(Submesh(n, each) for n in range(1, nodes + 1)))


def assign(task: Task, gap: float = 0.0) -> Assigned:
    """The assignment with the shortest step; for schedule "forward" that with the fastest slowest stage, of these that with the smallest sum.

    gap: how much of the best time may be missed, as a part of it; 0: exact.  Raises ValueError, each in a sentence: no layers, an unknown schedule,
    devices that no choice of submeshes adds up to, and memory that nothing fits in (by how much)."""
    _check(task)
    search = _Search(task)
    if search.best_sum(len(search.times) - 1) is None:
        raise ValueError(_unfit(task))
    found = search.slowest_first() if task.schedule == "forward" else search.shortest(gap)
    cost = task.profile
    parts, devices = [], _devices(task, [mesh for _, _, mesh in found])
    for at, ((i, k, m), device) in enumerate(zip(found, devices)):
        used = cost.held[i, k, m] + cost.flight[i, k, m] * task.flying[len(found) - 1 - at]
        parts.append(Part(i, k, task.meshes[m], float(cost.seconds[i, k, m]), int(used), device))
    slowest = max(part.seconds for part in parts)
    total = slowest if task.schedule == "forward" else sum(part.seconds for part in parts) + (task.micro - 1) * slowest
    return Assigned(tuple(parts), total, search.tried)


Stages = list[tuple[int, int, int]]
"""(first layer, last layer, number of the submesh) of each."""


class _Search:
    """The dynamic program of a task, for one bound on the slowest stage after another."""

    def __init__(self, task: Task) -> None:
        self.task, self.tried = task, 0
        cost = task.profile
        room = np.where(
            cost.flight > 0, (task.memory - cost.held) // np.maximum(cost.flight, 1), np.where(cost.held <= task.memory, 2**62, -1)
        )
        self.behind = np.searchsorted(task.flying, room, side="right") - 1
        """Stages that may follow one, so that what it has in flight fits; -1 where it never does."""
        self.seconds = np.where((self.behind >= 0) & np.triu(np.ones((task.layers,) * 2, bool))[..., None], cost.seconds, np.inf)
        self.times = np.unique(self.seconds[np.isfinite(self.seconds)])

    def best_sum(self, at: int) -> tuple[float, Stages] | None:
        """The smallest sum of times with no stage above times[at]; None where there is none. Memory is first looked at by stage alone, as if nothing
        followed: a lower bound, and the answer where it happens to fit."""
        if at < 0:
            return None
        self.tried += 1
        seconds = np.where(self.seconds <= self.times[at], self.seconds, np.inf)
        found = _suffixes(self.task, lambda i, m: seconds[None, i, i:, m], np.add, False)
        if found is None or self.roomy(found[1]):
            return found
        behind = np.arange(len(self.task.flying))[:, None]
        return _suffixes(self.task, lambda i, m: np.where(behind <= self.behind[i, i:, m], seconds[i, i:, m], np.inf), np.add, True)

    def roomy(self, stages: Stages) -> bool:
        """Whether all stages have memory for what they have in flight."""
        return all(self.behind[stage] >= len(stages) - 1 - at for at, stage in enumerate(stages))

    def shortest(self, gap: float) -> Stages:
        """The stages with the smallest sum + (B - 1) max. Between two bounds lo < hi the sum is at least that of hi and the slowest stage at least lo's:
        what that rules out is not looked at."""
        more, best, chosen = self.task.micro - 1, np.inf, []
        open_, sums = [(0.0, 0, len(self.times) - 1)], {}
        while open_:
            bound, lo, hi = heapq.heappop(open_)
            if bound >= best * (1 - gap):
                break
            at = hi if not sums else (lo + hi) // 2
            found = self.best_sum(at)
            if found is None:
                low = None
            else:
                total, stages = found
                slowest = max(self.seconds[stage] for stage in stages)
                sums[at], low = total, int(np.searchsorted(self.times, slowest)) - 1
                if total + more * slowest < best:
                    best, chosen = total + more * slowest, stages
            if low is not None and low >= lo:
                heapq.heappush(open_, (sums[at] + more * self.times[lo], lo, low))
            if at < hi:
                least = min(value for t, value in sums.items() if t > at)
                heapq.heappush(open_, (least + more * self.times[at + 1], at + 1, hi))
        return chosen

    def slowest_first(self) -> Stages:
        """The stages with the fastest slowest one."""
        lo, hi = 0, len(self.times) - 1
        while lo < hi:
            at = (lo + hi) // 2
            lo, hi = (lo, at) if self.best_sum(at) else (at + 1, hi)
        found = self.best_sum(lo)
        assert found
        return found[1]


def _suffixes(task: Task, cost: Callable[[int, int], np.ndarray], join: np.ufunc, counted: bool) -> tuple[float, Stages] | None:
    """The cheapest stages for all layers and devices; None where there are none.

    cost: (first layer i, number of a submesh) -> [stages behind, or 1; last layer i, i + 1, ...].  join: how costs of stages come together, add or maximum.
    counted: whether the cost depends on the number of stages behind."""
    layers, devices = task.layers, task.devices
    most = len(task.flying) if counted else 0
    best = np.full((most + 1, layers + 1, devices + 1), np.inf)  # [stages, first layer, devices]: of the layers from there on
    best[0, layers, 0] = 0.0
    here, behind = (slice(1, None), slice(None, -1)) if counted else (slice(None),) * 2
    allowed = _starts(task)
    for i in reversed(range(layers)):
        for m, mesh in enumerate(task.meshes):
            if (one := _windowed(cost(i, m), best[behind, i + 1 :])) is not None:
                price, rest = one
                n = mesh.devices
                found = join(price[:, :, None], rest[:, :, : devices + 1 - n]).min(1)
                found[:, ~allowed[m][n:]] = np.inf
                np.minimum(best[here, i, n:], found, out=best[here, i, n:])
    stages = int(best[:, 0, devices].argmin())
    if not np.isfinite(best[stages, 0, devices]):
        return None
    return float(best[stages, 0, devices]), list(_walk(task, cost, join, best, stages, allowed))


def _windowed(price: np.ndarray, rest: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Without the last layers that no stage can reach; None where it can reach none."""
    can = np.flatnonzero(np.isfinite(price).any(0))
    return (price[:, : can[-1] + 1], rest[:, : can[-1] + 1]) if len(can) else None


def _starts(task: Task) -> list[np.ndarray]:
    """For each submesh, by devices left: whether it can begin there."""
    left = range(task.devices + 1)
    return [np.array([not task.ordered or task.fits(mesh, task.devices - d) for d in left]) for mesh in task.meshes]


def _walk(task: Task, cost: Callable, join: np.ufunc, best: np.ndarray, stages: int, allowed: list) -> Iterator[tuple[int, int, int]]:
    """The stages behind a best value."""
    i, left, counted = 0, task.devices, len(best) > 1
    while i < task.layers:
        after = stages - 1 if counted else 0
        for m, mesh in enumerate(task.meshes):
            if mesh.devices > left or not allowed[m][left]:
                continue
            sums = join(cost(i, m)[after], best[after, i + 1 :, left - mesh.devices])
            at = int(sums.argmin())
            if sums[at] == best[stages, i, left]:
                break
        else:
            raise AssertionError("no stage leads to the best value")
        yield i, i + at, m
        i, left, stages = i + at + 1, left - mesh.devices, after


def _devices(task: Task, chosen: Sequence[int]) -> list[int]:
    """The first device of each stage: one behind the other where no stage is then cut by the border of a node, else the largest first."""
    meshes, at, starts = [task.meshes[m] for m in chosen], 0, []
    for mesh in meshes:
        starts.append(at)
        at += mesh.devices
    if all(task.fits(mesh, start) for mesh, start in zip(meshes, starts)):
        return starts
    for at, i in zip(_sizes(meshes), sorted(range(len(meshes)), key=lambda i: -meshes[i].devices)):
        starts[i] = at
    return starts


def _sizes(meshes: Sequence[Submesh]) -> Iterator[int]:
    """Starts of submeshes from the largest to the smallest: whole nodes, then powers of two that fill nodes."""
    at = 0
    for mesh in sorted(meshes, key=lambda mesh: -mesh.devices):
        yield at
        at += mesh.devices


def _check(task: Task) -> None:
    """Refuses what has no answer whatever the memory."""
    if task.schedule not in FLYING:
        raise ValueError(
            f"'{task.schedule}' is no schedule for which stages are assigned: what a stage has in flight has to follow from the stages behind it. "
            f"Choose one of {', '.join(FLYING)}."
        )
    if not task.layers:
        raise ValueError("There are no layers to assign: the model or the function is empty. Give one at least.")
    sizes = [mesh.devices for mesh in task.meshes]
    free = task._replace(profile=Profile(*(np.zeros((task.layers, task.layers, len(sizes))),) * 3), memory=1)
    if _suffixes(free, lambda i, m: np.zeros((1, task.layers - i)), np.add, False) is None:
        named = ", ".join(f"{mesh.nodes}x{mesh.each}" for mesh in task.meshes)
        raise ValueError(
            f"{task.layers} layer{'s' * (task.layers > 1)} make at most {task.layers} stage{'s' * (task.layers > 1)}, and no such number of the submeshes {named or '(none)'} "
            f"covers the machine's {task.nodes}x{task.each} devices. Allow every size (submeshes(..., every=True)), or use fewer devices."
        )


def _unfit(task: Task) -> str:
    """Why no assignment fits: what the one that needs least memory needs, or that no submesh can run the layers."""
    cost = task.profile
    need = np.where(np.isfinite(cost.seconds), cost.held + cost.flight * task.flying[:, None, None, None], np.inf)
    found = _suffixes(task, lambda i, m: need[:, i, i:, m], np.maximum, True)
    if found is None:
        return (
            "No submesh that is offered can run the layers, so that together they cover the machine: every other has no time in the profile. "
            "Offer other submeshes, or a batch that more devices can share."
        )
    from meshloom.plan.explain import size  # imports the console

    return (
        f"No assignment of {task.layers} layers to {task.devices} devices fits: the one that needs least takes {size(found[0])} on a device, which has "
        f"{size(task.memory)}: {size(found[0] - task.memory)} too little. Use more devices, smaller micro-batches, or a schedule or remat "
        "that keeps less."
    )
