"""The best choice of strategies under a limit of memory, as an integer program for HiGHS."""

import itertools
import time
from typing import Any, NamedTuple

import numpy as np

from meshloom.auto.problem import Link, Problem, Row, Times, cost

ROUNDS = 40
"""How often rows of memory are added before the search ends."""
SEGMENTS = 6
"""Parts of the program in each of which the time that is most over the limit becomes a row."""
SLACK = 1e-6
"""Part of the limit by which rounding may pass it."""

EVEN = 1e-5
"""What a strategy costs more than the one before it where all least costs together are 1000, so that equal choices fall the same way everywhere."""


class Solved(NamedTuple):
    """choice: a strategy for every class.  seconds: its cost.  gap: how far, at most, the best choice may lie below, as a part of the cost; 0 if it was
    proven best.  peak: bytes.  spent: seconds of the search.  rows: of memory, that took part."""

    choice: list[int]
    seconds: float
    gap: float
    peak: float
    spent: float
    rows: int


class Impossible(Exception):
    """No choice fits.  needs: bytes, at least."""

    def __init__(self, needs: float):
        super().__init__(f"needs {needs:.0f} bytes")
        self.needs = needs


def search(problem: Problem, times: Times, limit: float, seconds: float, gap: float) -> Solved:
    """The best choice whose memory stays within `limit` bytes at every time.  seconds: when to stop.  gap: part of the cost that is good enough.

    Only the times at which a choice was over the limit become rows; a choice that is best under these and within the limit everywhere is best.
    Raises Impossible if no choice fits."""
    begun, problem = time.perf_counter(), problem._replace(rows=list(problem.rows))
    for _ in range(ROUNDS):
        left = max(seconds - (time.perf_counter() - begun), 1.0)
        found = solve(problem, limit, left, gap)
        if found is None:
            raise Impossible(least(problem, times, limit, left))
        choice, open_gap = found
        over = times.over(choice, problem.links)
        if over.max() <= limit * (1 + SLACK):
            spent = time.perf_counter() - begun
            return Solved(choice, cost(problem, choice), open_gap, float(over.max()), spent, len(problem.rows))
        problem.rows.extend(times.row(t) for t in _worst(over, limit))
    raise Impossible(float(over.max()))


def _worst(over: np.ndarray, limit: float) -> list[int]:
    """The times that are most over the limit, one for each part of the program."""
    edges = np.linspace(0, len(over), SEGMENTS + 1).astype(int)
    worst = [int(a + over[a:b].argmax()) for a, b in itertools.pairwise(edges) if b > a]
    return [t for t in worst if over[t] > limit]


def least(problem: Problem, times: Times, limit: float, seconds: float) -> float:
    """The fewest bytes that any choice needs at its worst time, about (rows are added until it no longer grows)."""
    begun = time.perf_counter()
    needs = limit
    for _ in range(ROUNDS):
        found = solve(problem, None, max(seconds - (time.perf_counter() - begun), 1.0), 1e-3)
        if found is None:
            return needs
        over = times.over(found[0], problem.links)
        needs, worst = float(over.max()), [int(over.argmax())]
        bound = max((_row_bytes(row, problem, found[0]) for row in problem.rows), default=0.0)
        if needs <= bound * (1 + 1e-3):
            return needs
        problem.rows.extend(times.row(t) for t in worst)
    return needs


def _row_bytes(row: Row, problem: Problem, choice: list[int]) -> float:
    links = [(problem.links[at], n) for at, n in row.links.items()]
    copies = sum(n * float(l.bytes[l.rows[choice[l.first]], l.columns[choice[l.second]]]) for l, n in links)
    return sum(float(b[choice[c]]) for c, b in row.nodes.items()) + copies


class _Columns:
    """The variables: one for every strategy of every class, and for every link one for every pair of layouts that differ in cost."""

    def __init__(self, problem: Problem) -> None:
        self.first = np.cumsum([0, *(len(s) for s in problem.seconds)])
        self.count = int(self.first[-1])
        self.whole = self.count
        self.costs: list[np.ndarray] = [np.concatenate(problem.seconds)] if problem.seconds else []
        self.rows: list[tuple[list[int], list[float], float]] = []
        self.at: dict[int, tuple[np.ndarray, np.ndarray, int]] = {}
        for c in range(len(problem.seconds)):
            columns = list(range(self.first[c], self.first[c + 1]))
            self.rows.append((columns, [1.0] * len(columns), 1.0))

    def link(self, number: int, l: Link, needed: bool) -> None:
        """Adds a link.  needed: whether its bytes matter as well as its seconds."""
        if l.first == l.second or not (l.seconds.any() or (needed and l.bytes.any())):
            return
        rows, columns = _alike(l, 0, needed), _alike(l, 1, needed)
        a, b = rows.max() + 1, columns.max() + 1
        costs = np.zeros((a, b))
        costs[np.ix_(rows, columns)] = l.seconds
        start, self.count = self.count, self.count + a * b
        self.costs.append(costs.ravel())
        self.at[number] = (rows, columns, start)
        for i in range(a):
            own = self.first[l.first] + np.flatnonzero(rows[l.rows] == i)
            self.rows.append(([*range(start + i * b, start + i * b + b), *own], [1.0] * b + [-1.0] * len(own), 0.0))
        for j in range(b):
            own = self.first[l.second] + np.flatnonzero(columns[l.columns] == j)
            self.rows.append(([*range(start + j, start + a * b, b), *own], [1.0] * a + [-1.0] * len(own), 0.0))


def _alike(l: Link, axis: int, needed: bool) -> np.ndarray:
    """For every row (axis 0) or column of a link, the number of its kind: those that cost the same against all others are one kind."""
    table = np.concatenate([l.seconds, l.bytes], 1 - axis) if needed else l.seconds
    return np.unique(table, axis=axis, return_inverse=True)[1].ravel()


def solve(problem: Problem, limit: float | None, seconds: float, gap: float) -> tuple[list[int], float] | None:
    """The best choice under the rows of memory there are, with the gap that is left; None if none fits.  limit: None to minimise the bytes of the
    fullest row instead of the seconds."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    if not problem.seconds:
        return [], 0.0
    columns = _Columns(problem)
    for number, l in enumerate(problem.links):
        columns.link(number, l, bool(problem.rows))
    costs = np.concatenate(columns.costs)
    for l in problem.links:
        if l.first == l.second:
            costs[columns.first[l.first] : columns.first[l.first + 1]] += l.seconds[l.rows, l.columns]
    scale = 1e3 / max(sum(float(s.min()) for s in problem.seconds), 1e-12)
    n = columns.count + (limit is None)
    costs *= scale
    for a, b in itertools.pairwise(columns.first):
        costs[a:b] += EVEN * np.arange(b - a)
    costs, unit = np.concatenate([costs, np.zeros(n - columns.count)]), limit or max(map(_largest, problem.rows), default=1.0)
    if limit is None:
        costs *= 1e-6
        costs[-1] = 1.0
    table = columns.rows + [_memory(row, problem, columns, unit, limit is None) for row in problem.rows]
    where = np.repeat(np.arange(len(table)), [len(r[0]) for r in table])
    matrix = csr_array((np.concatenate([r[1] for r in table]), (where, np.concatenate([r[0] for r in table]))), shape=(len(table), n))
    right = np.array([r[2] for r in table])
    low = right.copy()
    low[len(columns.rows) :] = -np.inf
    upper = np.ones(n)
    if limit is None:
        upper[-1] = np.inf
    integral = np.zeros(n)
    integral[: columns.whole] = 1
    options = {"time_limit": seconds, "mip_rel_gap": gap}
    done: Any = milp(
        costs, integrality=integral, bounds=Bounds(0, upper), constraints=LinearConstraint(matrix, low, right), options=options
    )
    if done.x is None:
        if done.status == 2:
            return None
        raise ValueError(
            f"No layout was found within {seconds:.0f} s ({len(problem.seconds)} decisions, {n} columns). Use a mesh of one axis, or "
            "jax.lax.scan over layers, whose body is decided once."
        )
    choice = [int(done.x[a:b].argmax()) for a, b in zip(columns.first, columns.first[1:])]
    return choice, float(done.mip_gap or 0.0)


def _largest(row: Row) -> float:
    return sum(float(b.max()) for b in row.nodes.values()) or 1.0


def _memory(row: Row, problem: Problem, columns: _Columns, unit: float, free: bool) -> tuple[list[int], list[float], float]:
    """A row of memory in units of the limit; free: against the last variable, which is minimised."""
    where: list[int] = []
    values: list[float] = []
    own = {c: np.array(b, dtype=float) for c, b in row.nodes.items()}
    for at, n in row.links.items():
        l = problem.links[at]
        if l.first == l.second:
            extra = n * l.bytes[l.rows, l.columns]
            own[l.first] = own[l.first] + extra if l.first in own else extra
            continue
        if at not in columns.at:
            continue
        rows, cols, start = columns.at[at]
        size = np.zeros((rows.max() + 1, cols.max() + 1))
        size[np.ix_(rows, cols)] = l.bytes
        there = np.flatnonzero(size.ravel())
        where += [int(start + i) for i in there]
        values += list(n * size.ravel()[there] / unit)
    for c, b in own.items():
        where += [int(i) for i in range(columns.first[c], columns.first[c + 1])]
        values += list(b / unit)
    if free:
        where.append(columns.count)
        values.append(-1.0)
    return where, values, 0.0 if free else 1.0
