"""The search without a proof, against the one with it."""

import math

import pytest

from meshloom.plan import search as searching
from meshloom.plan.bounds import Bounds
from meshloom.plan.climb import climb, neighbours, spot
from meshloom.plan.search import search
from meshloom.plan.space import Allowed, Pattern
from plan.questions import GPU, answerable, question


@pytest.mark.parametrize("seed", range(8))
def test_an_early_end_says_how_far_the_best_may_be(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No effort at all: what is climbed to is within the gap that is told, and no better than what is proven."""
    q, _ = answerable(seed)
    proven = search(q._replace(exact=True))
    monkeypatch.setattr(searching, "EFFORT", 0.0)
    early = search(q)
    assert proven.best and early.best and proven.gap == 0.0
    assert early.best.time.total * (1 - early.gap) <= proven.best.time.total * (1 + 1e-9) <= early.best.time.total * (1 + 2e-9)
    assert ("Not proven" in early.said) == (early.gap > 0)
    assert early.space == early.priced + sum(n for why, n in early.pruned.items() if why not in (searching.INDIVISIBLE, searching.HEAVY))


def test_neighbours_have_as_many_devices() -> None:
    q, p = question("llama", GPU, 16), Pattern(("zero3", "tensor"))
    found = list(neighbours(q, p, {"zero3": 8, "tensor": 2}))
    assert found == [{"zero3": 4, "tensor": 4}]
    assert not list(neighbours(q._replace(allowed=Allowed(words="tensor=2")), p, {"zero3": 8, "tensor": 2}))


def test_climbing_ends_where_no_neighbour_is_better() -> None:
    q, p = question("llama", GPU, 16), Pattern(("zero3", "tensor"))
    bounds = Bounds(q)
    heights = {n: spot(q, bounds, p, {"zero3": n, "tensor": 16 // n}).height for n in (4, 8)}
    [top] = climb(q, bounds, [(p, {"zero3": 4, "tensor": 4})])
    assert top.height == min(heights.values()) < math.inf
