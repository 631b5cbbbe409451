"""Weighted mixtures. A weight is the fraction of samples drawn from a source; the draw is a pure function of the sample number.

For every source and every number n of samples, the count differs from n times the weight by less than 1. The draw is an earliest-deadline-first
schedule: draw j of a source of weight w may come from floor((j-1)/w) on and must come before ceil(j/w); with weights that sum to one this always
succeeds.  Source: Liu and Layland 1973; Baruah et al. 1996, 'Proportionate progress'."""

import heapq
import math
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

PERIOD = 1 << 17  # longest schedule; finer weights are rounded to this many parts, a source always keeping one


class Schedule(NamedTuple):
    """One period of draws, which repeats for ever: exact, since a period holds a whole number of draws of every source."""

    source: np.ndarray  # (period,) which source
    rank: np.ndarray  # (period,) how many draws of that source came before in the period
    parts: np.ndarray  # (sources,) draws of each source in a period


def whole_parts(weights: tuple[float, ...]) -> list[int]:
    """Whole numbers in the ratio of the weights, with the least sum where that is at most PERIOD, else rounded to a sum of PERIOD."""
    total = math.fsum(weights)
    exact = [Fraction(w / total).limit_denominator(PERIOD) for w in weights]
    period = math.lcm(*(f.denominator for f in exact))
    close = all(abs(float(f) * total - w) <= 1e-12 * total for f, w in zip(exact, weights))
    if close and sum(exact) == 1 and period <= PERIOD:
        return [int(f * period) for f in exact]
    shares = [max(1.0, w / total * PERIOD) for w in weights]
    parts = [int(s) for s in shares]
    short = PERIOD - sum(parts)
    by_rest = sorted(range(len(parts)), key=lambda i: parts[i] - shares[i])
    if short < 0:  # only when many sources were raised to one part
        parts[max(range(len(parts)), key=parts.__getitem__)] += short
    for i in by_rest[: max(short, 0)]:
        parts[i] += 1
    return parts


@lru_cache(maxsize=8)
def schedule(weights: tuple[float, ...]) -> Schedule:
    """The draws of one period for these weights."""
    parts = whole_parts(weights)
    period = sum(parts)
    released: list[list[tuple[int, int, int]]] = [[] for _ in range(period)]
    for s, m in enumerate(parts):
        for j in range(m):
            released[j * period // m].append((-(-(j + 1) * period // m), s, j))  # (deadline, source, rank)
    source, rank = np.empty(period, np.int32), np.empty(period, np.int64)
    ready: list[tuple[int, int, int]] = []
    for t in range(period):
        for job in released[t]:
            heapq.heappush(ready, job)
        deadline, source[t], rank[t] = heapq.heappop(ready)
        assert deadline > t, "an earliest-deadline schedule of total weight one missed a deadline"
    return Schedule(source, rank, np.array(parts, np.int64))


class Phase(NamedTuple):
    """Weights that hold from sample number `start` on."""

    start: int
    weights: tuple[float, ...]


class Mixture:
    """Which source each sample comes from, and how many samples of that source came before it."""

    def __init__(self, phases: tuple[Phase, ...]):
        assert phases and phases[0].start == 0
        self.phases = phases

    @cached_property
    def _base(self) -> list[np.ndarray]:
        """Draws of each source before each phase begins."""
        base = [np.zeros(len(self.phases[0].weights), np.int64)]
        for phase, following in zip(self.phases, self.phases[1:]):
            base.append(base[-1] + counts(phase.weights, following.start - phase.start))
        return base

    def draw(self, number: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """number: (n,) sample numbers -> (source (n,), how many samples of it came before (n,))."""
        number = np.asarray(number, np.int64)
        starts = np.array([p.start for p in self.phases], np.int64)
        phase = np.searchsorted(starts, number, side="right") - 1
        source, count = np.empty(number.shape, np.int32), np.empty(number.shape, np.int64)
        for p in np.unique(phase):
            at = phase == p
            plan = schedule(self.phases[p].weights)
            period, slot = np.divmod(number[at] - starts[p], len(plan.source))
            s = plan.source[slot]
            source[at] = s
            count[at] = self._base[p][s] + period * plan.parts[s] + plan.rank[slot]
        return source, count

    def counts(self, number: int) -> np.ndarray:
        """Draws of each source in the first `number` samples: (sources,) int64."""
        p = max(i for i, phase in enumerate(self.phases) if phase.start <= number)
        return self._base[p] + counts(self.phases[p].weights, number - self.phases[p].start)

    def change(self, number: int, weights: tuple[float, ...]) -> "Mixture":
        """The same draws before sample `number`, these weights from it on. No sample is drawn again before its source is used up."""
        if len(weights) != len(self.phases[0].weights):
            raise ValueError(
                f"The mixture had {len(self.phases[0].weights)} sources and now has {len(weights)}. "
                "Weights may change at a resume, the list of sources may not."
            )
        if weights == self.phases[-1].weights:
            return self
        return Mixture((*(p for p in self.phases if p.start < number), Phase(number, weights)) if number else (Phase(0, weights),))


def counts(weights: tuple[float, ...], number: int) -> np.ndarray:
    """Draws of each source in the first `number` samples under constant weights: (sources,) int64."""
    plan = schedule(weights)
    period, slot = divmod(number, len(plan.source))
    return period * plan.parts + np.bincount(plan.source[:slot], minlength=len(plan.parts))


def constant(weights: tuple[float, ...]) -> Mixture:
    """A mixture whose weights never change."""
    return Mixture((Phase(0, tuple(weights)),))
