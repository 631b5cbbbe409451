"""The integer program against every choice there is, on random small problems, with and without a limit of memory."""

import numpy as np
import pytest

from meshloom.auto.problem import Link, Problem, Row, Times, cost, memory
from meshloom.auto.solve import Impossible, least, search, solve


def problem(seed: int, rows: int):
    """Up to 8 nodes of up to 6 strategies, links between them (some of a node with itself), rows of memory."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(2, 9))
    sizes = [int(rng.integers(1, 7)) for _ in range(count)]
    seconds = [rng.uniform(0, 1, n) for n in sizes]
    links = []
    for first in range(count):
        for second in range(first + (rng.random() < 0.8), count):
            if rng.random() < 0.4:
                a, b = int(rng.integers(1, 4)), int(rng.integers(1, 4))
                table = rng.uniform(0, 2, (a, b)) * (rng.random((a, b)) < 0.6)
                picks = rng.integers(a, size=sizes[first]), rng.integers(b, size=sizes[second])
                links.append(Link(first, second, *picks, table, rng.uniform(0, 4, (a, b)) * (table > 0)))
    made = []
    for _ in range(rows):
        nodes = {c: rng.uniform(0, 10, sizes[c]) for c in range(count) if rng.random() < 0.7}
        made.append(Row(nodes, {i: int(rng.integers(1, 3)) for i in range(len(links)) if rng.random() < 0.5}))
    return Problem(seconds, links, made)


def tables(p: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Cost and memory of every choice, as arrays with an axis for each node."""
    n = len(p.seconds)
    along = lambda v, c: np.asarray(v).reshape([-1 if i == c else 1 for i in range(n)])

    def between(l: Link, table: np.ndarray) -> np.ndarray:
        if l.first == l.second:
            return along(table[l.rows, l.columns], l.first)
        full = table[np.ix_(l.rows, l.columns)]
        return full.reshape([full.shape[0] if i == l.first else full.shape[1] if i == l.second else 1 for i in range(n)])

    shape = [len(s) for s in p.seconds]
    costs = sum((along(s, c) for c, s in enumerate(p.seconds)), np.zeros(shape)) + sum(between(l, l.seconds) for l in p.links)
    full = [np.zeros(shape)]
    for row in p.rows:
        one = sum((along(b, c) for c, b in row.nodes.items()), np.zeros(shape))
        full.append(one + sum(count * between(p.links[i], p.links[i].bytes) for i, count in row.links.items()))
    return costs, np.max(np.stack([np.broadcast_to(f, shape) for f in full]), 0)


@pytest.mark.parametrize("seed", range(40))
def test_without_a_limit_it_is_the_best_of_all(seed: int) -> None:
    p = problem(seed, 0)
    choice, _ = solve(p, 1.0, 60, 0.0)
    costs, _ = tables(p)
    assert np.isclose(cost(p, choice), costs.min(), rtol=1e-6) and np.isclose(costs[tuple(choice)], cost(p, choice))


@pytest.mark.parametrize("seed", range(40))
def test_under_a_limit_it_is_the_best_that_fits(seed: int) -> None:
    p = problem(seed, 3)
    costs, full = tables(p)
    tight = 0
    for share in (0.05, 0.3):  # between what the leanest choice needs and what the cheapest does
        limit = full.min() + share * (full[np.unravel_index(costs.argmin(), costs.shape)] - full.min()) + 1e-4
        choice, _ = solve(p, limit, 60, 0.0)
        best = costs[full <= limit].min()
        assert np.isclose(cost(p, choice), best, rtol=1e-5)
        assert memory(p, choice) <= limit * (1 + 1e-6) and np.isclose(memory(p, choice), full[tuple(choice)])
        tight += best > costs.min()
    assert solve(p, full.min() * 0.99, 60, 0.0) is None or full.min() == 0


def timed(p: Problem) -> Times:
    """The rows of a problem as times, one after the other; links' copies are left out."""
    held = [(c, b, when, when + 1) for when, row in enumerate(p.rows) for c, b in row.nodes.items()]
    return Times(len(p.rows), held, [])


@pytest.mark.parametrize("seed", range(20))
def test_rows_that_are_added_when_they_are_broken_find_the_same(seed: int) -> None:
    p = problem(100 + seed, 6)
    p = p._replace(rows=[Row(r.nodes, {}) for r in p.rows])
    costs, full = tables(p)
    limit = full.min() * 1.1 + 1e-4
    found = search(p._replace(rows=[]), timed(p), limit, 60, 0.0)
    assert np.isclose(found.seconds, costs[full <= limit].min(), rtol=1e-5) and found.peak <= limit * (1 + 1e-6)
    assert found.gap == 0 and found.spent > 0


@pytest.mark.parametrize("seed", range(10))
def test_what_cannot_fit_says_what_it_needs(seed: int) -> None:
    p = problem(200 + seed, 4)
    p = p._replace(rows=[Row(r.nodes, {}) for r in p.rows])
    _, full = tables(p)
    if full.min() == 0:
        pytest.skip("this problem needs no memory")
    with pytest.raises(Impossible) as told:
        search(p._replace(rows=[]), timed(p), full.min() * 0.5, 60, 0.0)
    assert np.isclose(told.value.needs, full.min(), rtol=5e-3)
    assert least(p, timed(p), 0.0, 60) == pytest.approx(full.min(), rel=5e-3)


def test_no_decisions_and_no_time() -> None:
    assert solve(Problem([], [], []), 1.0, 1.0, 0.0) == ([], 0.0)
    parts = [problem(seed, 0) for seed in range(40)]
    starts = np.cumsum([0, *(len(p.seconds) for p in parts)])
    links = [l._replace(first=l.first + int(at), second=l.second + int(at)) for p, at in zip(parts, starts) for l in p.links]
    with pytest.raises(ValueError, match="No layout was found within 0 s .*Use a mesh of one axis"):
        solve(Problem([s for p in parts for s in p.seconds], links, []), 1.0, 1e-9, 0.0)
