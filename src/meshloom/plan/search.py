"""The best layout of a model on a cluster, by the cost model: the optimum over all of `space.py`, proven by bounds.

Every mesh has a lower bound on its time and on its memory (`bounds.py`), from arrays of numbers for thousands of meshes at once. What cannot fit is thrown
out; the others are taken up in the order of their bounds, cut into their choices of schedule, micro-batches and remat, each with a bound of its own, and
priced exactly (`plan.memory`, `plan.time`) until no bound is left below the best that was found. So nothing that was never priced can be better. Ties go to
the smaller memory, then to the shorter spelling, so that every process finds the same.

Clusters of many thousand devices have too many meshes for that: after a fixed effort the search climbs from the most promising mesh of each kind instead
(`climb.py`), and says by how much one that it did not look at may be faster, at most.
"""

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from meshloom.core.layout import Layout
from meshloom.models.base import Model
from meshloom.parallel.base import Shapes
from meshloom.parallel.table import build
from meshloom.plan.bounds import Bounds, Choice
from meshloom.plan.climb import climb
from meshloom.plan.cost import shapes
from meshloom.plan.hardware import Cluster
from meshloom.plan.memory import Memory, device_memory, stored
from meshloom.plan.space import Allowed, Pattern, meshes, patterns, sieve
from meshloom.plan.stages import in_flight
from meshloom.plan.time import Time, step_time
from meshloom.runner.run import How

INDIVISIBLE, REFUSED = "meshes left out since sizes do not divide", "refused by a check"
LARGE, HEAVY, SLOW, UNSEEN = "too large by a bound", "of these too large", "slower by a bound", "not looked at"
"""Why a candidate was spared, in words."""
EFFORT, MANY, LITTLE = 3500.0, 60_000, 500.0
"""Meshes whose choices are bounded before the search climbs, where it is not asked to be exact: so many, or LITTLE where there are more than MANY in all. A
candidate priced exactly counts as PRICE of them."""
PRICE = 5.0
TRIED = 40
"""Choices of a mesh that was climbed to which are priced, the lowest bounds first."""
UNROLL_UP_TO = 32
"""Layers that are unrolled on a CPU where nobody says how they run; deeper models compile too long."""


class Question(NamedTuple):
    """What is to be planned. seq, sequences: of a step. packed: whether rows hold several documents. stored: a layout -> kind -> bytes that a device keeps
    beside the parameters (optimizer, average). refuse: (layout) -> None, or ValueError where the way of training does not admit it.
    exact: whether the answer is to be proven, however long that takes."""

    model: Model
    config: Any
    cluster: Cluster
    seq: int
    sequences: int
    dtype: str
    packed: bool
    stored: Callable[[Layout], Mapping[str, int]]
    allowed: Allowed = Allowed()
    refuse: Callable[[Layout], None] = lambda layout: None
    runner: str = "auto"
    exact: bool = False


class Candidate(NamedTuple):
    """One way to run a step, priced. micro: micro-batches."""

    spelling: str
    micro: int
    how: How
    memory: Memory
    time: Time

    @property
    def rank(self) -> tuple:
        """What the best has least of."""
        return (self.time.total, self.memory.total, len(self.spelling), self.spelling, self.micro, self.how.remat)


class Found(NamedTuple):
    """best: None where nothing fits. others: the next best, each of another kind (`Pattern.kind`). space: candidates there are. priced: those that were priced exactly.
    pruned: reason -> candidates that it spared. least: where nothing fits, the candidate with the least memory (None where the checks refuse all). gap: the
    part of the best's time by which a candidate that was not looked at may be faster, at most; 0: none is."""

    best: Candidate | None
    others: tuple[Candidate, ...]
    space: int
    priced: int
    pruned: Mapping[str, int]
    least: Candidate | None = None
    gap: float = 0.0

    @property
    def said(self) -> str:
        """What was looked at, in a sentence."""
        spared = "".join(f", {n:,} {why}" for why, n in self.pruned.items() if n and why != HEAVY)
        heavy = f" ({self.pruned[HEAVY]:,} {HEAVY})" if self.pruned.get(HEAVY) else ""
        proof = f". Not proven: what was not looked at may be up to {self.gap:.0%} faster (--exact goes on)" if self.gap else ""
        return f"{self.space:,} candidates: {self.priced:,} priced exactly{heavy}{spared}{proof}"


def runner_of(asked: str, platform: str, layers: int, remat: str) -> str:
    """How layers run: as asked, or what is best on a platform."""
    if asked != "auto":
        return asked
    # a CPU's compiler merges an unrolled layer's recomputation with the first computation, so that remat would save nothing
    return "unroll" if platform == "cpu" and layers <= UNROLL_UP_TO and remat == "none" else "scan"


def how_of(q: Question, remat: str) -> How:
    """Runner and remat of a candidate."""
    return How(runner_of(q.runner, q.cluster.hardware.platform, q.config.layers, remat), remat)


def shaped(q: Question, spelling: str, micro: int, remat: str) -> tuple[Shapes, Memory]:
    """The shapes of a candidate, and what it needs.  Raises ValueError, with the check's own sentence, where the model, the batch or the way of training
    does not admit it."""
    layout = build(spelling, q.config, q.seq, q.cluster.hardware.platform)
    q.refuse(layout)
    x = shapes(q.model, q.config, layout, q.seq, q.sequences, micro, how_of(q, remat), q.dtype, q.packed)
    held = in_flight(q.model, x)
    kept = {"parameters": stored(layout, q.model.specs(q.config)), **q.stored(layout)}
    return x, device_memory(q.model, x, kept, held)


def price(q: Question, spelling: str, micro: int, remat: str, limit: float = math.inf) -> Candidate | Memory:
    """A candidate, exactly; what it needs alone where that is more than `limit` bytes.  Raises ValueError as `shaped`."""
    x, memory = shaped(q, spelling, micro, remat)
    if memory.total > limit:
        return memory
    return Candidate(spelling, micro, how_of(q, remat), memory, step_time(q.model, spelling, x, q.cluster))


class Mesh(NamedTuple):
    """A mesh to take up: its bound, how many choices it has, its pattern and sizes."""

    bound: float
    choices: int
    pattern: Pattern
    sizes: dict[str, int]


def search(q: Question, keep: int = 6) -> Found:
    """The best candidate that fits, and the best of other kinds.  keep: how many in all.  Where nothing fits: what needs least memory."""
    bounds, tally = Bounds(q), Counter()
    order = _meshes(q, bounds, tally, "time")
    hunt = _Hunt(q, keep, tally)
    ahead = _best_first(q, bounds, order, hunt)
    ranked = sorted(hunt.found.values(), key=lambda one: one.rank)[:keep]
    least = None if ranked else leanest(q, bounds)
    space, priced = tally.pop("space", 0), tally.pop("priced", 0)
    gap = max(0.0, 1 - ahead / ranked[0].time.total) if ranked else 0.0
    return Found(ranked[0] if ranked else None, tuple(ranked[1:]), space, priced, dict(tally), least, gap)


def _meshes(q: Question, bounds: Bounds, tally: Counter, by: str) -> Sequence[Mesh]:
    """All meshes that may fit, in the order of their bounds on time or memory."""
    rows, limit = [], q.cluster.hardware.memory if by == "time" else math.inf
    for p in patterns(q.config, q.allowed):
        sizes = meshes(p, q.cluster.devices, q.allowed.words)
        ok = sieve(q.config, q.seq, q.sequences, p, sizes)
        tally[INDIVISIBLE] += int((~ok).sum())
        if not ok.any():
            continue
        sizes = {axis: n[ok] for axis, n in sizes.items()}
        found = bounds.meshes(p, sizes)
        tally["space"] += int(found.choices.sum())
        fits = found.memory <= limit
        tally[LARGE] += int(found.choices[~fits].sum())
        rows.append((np.where(fits, getattr(found, by), np.inf), found.choices, p, sizes))
    if not rows:
        return []
    key = np.concatenate([row[0] for row in rows])
    which = np.repeat(np.arange(len(rows)), [len(row[0]) for row in rows])
    at = np.concatenate([np.arange(len(row[0])) for row in rows])
    order = np.argsort(key, kind="stable")
    return _Lazy(rows, [(key[i], which[i], at[i]) for i in order[: np.isfinite(key).sum()]])


class _Hunt:
    """Candidates as they are priced. found: kind of layout -> its best. heap: choices that wait, by their bounds. done: those that were taken up."""

    def __init__(self, q: Question, keep: int, tally: Counter) -> None:
        self.q, self.keep, self.tally, self.limit = q, keep, tally, q.cluster.hardware.memory
        self.found: dict[tuple[str, ...], Candidate] = {}
        self.heap: list[tuple[float, int, Pattern, dict[str, int], Choice]] = []
        self.number, self.effort = itertools.count(), 0.0
        self.done: set[tuple[str, int, str]] = set()
        tally["priced"] = 0

    @property
    def bar(self) -> float:
        """Seconds of the last of those that are kept: what is slower need not be priced."""
        return sorted(one.time.total for one in self.found.values())[self.keep - 1] if len(self.found) >= self.keep else math.inf

    @property
    def next(self) -> float:
        """The lowest bound that waits."""
        return self.heap[0][0] if self.heap else math.inf

    def slower(self, p: Pattern, bound: float) -> bool:
        """Whether a bound is above the best of its own kind."""
        return p.kind in self.found and bound > self.found[p.kind].time.total

    def add(self, p: Pattern, sizes: dict[str, int], choices: list[Choice]) -> None:
        """Choices on a mesh, to be priced in turn; those that cannot fit are counted."""
        for choice in choices:
            if choice.memory > self.limit:
                self.tally[LARGE] += 1
            else:
                heapq.heappush(self.heap, (choice.time, next(self.number), p, sizes, choice))

    def price(self) -> None:
        """Prices the choice with the lowest bound."""
        bound, _, p, sizes, choice = heapq.heappop(self.heap)
        name = (p.spell(sizes, choice.pipe), choice.micro, choice.remat)
        if name in self.done:  # a climb comes by what was priced before
            return
        self.done.add(name)
        if self.slower(p, bound):
            self.tally[SLOW] += 1
            return
        self.effort += PRICE
        try:
            one = price(self.q, *name, self.limit)
        except ValueError:
            self.tally[REFUSED] += 1
            return
        self.tally["priced"] += 1
        if isinstance(one, Memory):
            self.tally[HEAVY] += 1
        elif p.kind not in self.found or one.rank < self.found[p.kind].rank:
            self.found[p.kind] = one


def _best_first(q: Question, bounds: Bounds, order: Sequence[Mesh], hunt: _Hunt) -> float:
    """Prices candidates in the order of their bounds, until no bound is as low as the last of those that are kept, nor as the best of its own kind; or, the
    effort used up, those near the most promising.  Returns the lowest bound of what was not looked at: above the best where that is proven."""
    taken, ahead = 0, math.inf
    most = math.inf if q.exact else EFFORT if len(order) <= MANY else LITTLE
    while hunt.effort < most:
        ahead = order[taken].bound if taken < len(order) else math.inf
        if min(ahead, hunt.next) > hunt.bar or (taken == len(order) and not hunt.heap):
            ahead = math.inf
            break
        if hunt.heap and hunt.next <= ahead:
            hunt.price()
            continue
        mesh = order[taken]
        taken += 1
        if hunt.slower(mesh.pattern, mesh.bound):
            hunt.tally[SLOW] += mesh.choices
            continue
        hunt.effort += 1
        hunt.add(mesh.pattern, mesh.sizes, bounds.choices(mesh.pattern, mesh.sizes))
    else:
        ahead = min(order[taken].bound if taken < len(order) else math.inf, hunt.next)
        hunt.heap.clear()
        for spot in climb(q, bounds, ((mesh.pattern, mesh.sizes) for mesh in order)):
            hunt.add(spot.pattern, spot.sizes, [choice for choice in spot.choices[:TRIED] if choice.memory <= hunt.limit])
        while hunt.heap and hunt.next <= hunt.bar:
            hunt.price()
    told = sum(hunt.tally[why] for why in ("priced", REFUSED, LARGE, SLOW))
    hunt.tally[SLOW if ahead > hunt.bar else UNSEEN] += max(0, hunt.tally["space"] - told)
    return ahead


def leanest(q: Question, bounds: Bounds | None = None, enough: float = 0.0) -> Candidate | None:
    """The candidate that needs least memory, whatever its time; None where the checks refuse all.  enough: the first that needs no more will do."""
    bounds = bounds or Bounds(q)
    best, key, tally = None, (math.inf, ""), Counter()
    for mesh in _meshes(q, bounds, tally, "memory"):
        if mesh.bound > key[0] or key[0] <= enough:
            break
        for choice in sorted(bounds.choices(mesh.pattern, mesh.sizes), key=lambda choice: choice.memory):
            if choice.memory > key[0]:
                break
            spelling = mesh.pattern.spell(mesh.sizes, choice.pipe)
            try:
                _, memory = shaped(q, spelling, choice.micro, choice.remat)
            except ValueError:
                continue
            if (memory.total, spelling) < key:
                best, key = (spelling, choice.micro, choice.remat), (memory.total, spelling)
    found = price(q, *best) if best else None
    assert not isinstance(found, Memory)
    return found


class _Lazy(Sequence):
    """Meshes in an order, each made when it is asked for: there may be a hundred thousand."""

    def __init__(self, rows: list, order: list) -> None:
        self.rows, self.order = rows, order

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, i: int) -> Mesh:  # type: ignore[override]
        key, which, at = self.order[i]
        _, choices, p, sizes = self.rows[which]
        return Mesh(float(key), int(choices[at]), p, {axis: int(n[at]) for axis, n in sizes.items()})
