"""Prices of layouts: what a change of layout moves, held against a simulation with sets of elements, and closed forms."""

import itertools
import math

import numpy as np
import pytest

from auto.cases import rates
from meshloom.auto.price import WHOLE, Move, divides, parts, reshard, specs


def test_layouts_of_an_array_are_all_that_divide_it() -> None:
    assert specs((8, 6), (4,)) == [(WHOLE,), (0,)]
    found = specs((8, 6), (2, 4))
    assert found[0] == (WHOLE, WHOLE) and len(found) == len(set(found))
    brute = [s for s in itertools.product((-1, 0, 1), repeat=2) if divides(s, (8, 6), (2, 4))]
    assert set(found) == set(brute) and (0, 0) in found and (1, 1) not in found and (WHOLE, 1) not in found
    assert specs((), (2, 4)) == [(WHOLE, WHOLE)]


def held(spec: tuple, shape: tuple, mesh: tuple, device: tuple) -> set:
    """The elements that a device has."""
    own = []
    for d, size in enumerate(shape):
        axes = [x for x, e in enumerate(spec) if e == d]
        n = math.prod(mesh[x] for x in axes)
        at = 0
        for x in axes:
            at = at * mesh[x] + device[x]
        own.append(range(at * size // n, (at + 1) * size // n))
    return set(itertools.product(*own))


@pytest.mark.parametrize("mesh", [(4,), (2, 4)])
def test_nothing_moves_exactly_where_each_device_has_what_it_needs(mesh: tuple) -> None:
    shape = (8, 16)
    for have, want in itertools.product(specs(shape, mesh), repeat=2):
        devices = list(itertools.product(*(range(n) for n in mesh)))
        lacks = [len(held(want, shape, mesh, d) - held(have, shape, mesh, d)) for d in devices]
        moves = reshard(have, want, 4 * math.prod(shape), mesh)
        if not moves:
            assert not any(lacks), (have, want)
        sent = sum(m.bytes / 4 for m in moves)
        assert sent >= max(lacks), (have, want, moves)  # the larger of what goes in and comes out is at least what a device lacks


def test_a_gather_an_exchange_and_a_slice() -> None:
    assert reshard((0,), (WHOLE,), 64, (4,)) == (Move("all-gather", (0,), 64),)
    assert reshard((0,), (1,), 64, (4,)) == (Move("all-to-all", (0,), 16),)
    assert reshard((WHOLE,), (1,), 64, (4,)) == ()
    assert reshard((0, 0), (WHOLE, WHOLE), 64, (2, 4)) == (Move("all-gather", (0, 1), 64),)
    assert reshard((0, 1), (WHOLE, 1), 64, (2, 4)) == (Move("all-gather", (0,), 16),)


def test_seconds_are_a_line_over_bytes() -> None:
    r, size, n = rates(x=4), 10**6, 4
    assert np.isclose(r.moved(Move("all-gather", (0,), size)), (n - 1) * 1e-6 + (n - 1) / n * size / 1e9)
    assert np.isclose(r.moved(Move("all-reduce", (0,), size)), 2 * r.moved(Move("reduce-scatter", (0,), size)))
    assert r.computed(1e10, "float32") == 1 and r.computed(1e10, "int4") == 1 and r.touched(1e11) == 1
    assert r.devices((0,)) == 4 and parts((0, WHOLE), (2, 4)) == 2
