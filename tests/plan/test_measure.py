"""Measurements: each point is a time that a machine can take, and each thing that is to be measured is measured."""

import jax
import pytest

from meshloom.plan.measure import EFFORTS, KINDS, Effort, Point, clock, collective, cores, groups, plan, products, repeated, spread
from meshloom.plan.measure import mesh_of as mesh

TINY = Effort({"float32": (64,)}, (1 << 14,), (1 << 10, 1 << 14), 2, 1e-4, 2)


def test_every_kind_is_measured_for_the_fewest_and_the_most_devices():
    todo = [what for what, _ in plan(jax.devices(), TINY)]
    assert [f"{kind} of {n}" in " ".join(todo) for kind in KINDS for n in (2, 8)] == [True] * 10
    assert len(todo) == len(set(todo)) == 1 + 1 + 1 + 1 + 5 * 2 * 2
    assert groups(8, 8) == [2, 4, 8] and groups(64, 3) == [2, 32, 64] and groups(1, 8) == []


def test_points_are_times():
    for _, run in plan(jax.devices(), TINY)[:6]:
        point = run()
        assert 1e-8 < point.seconds < 1.0, point


@pytest.mark.parametrize("kind", KINDS)
def test_a_collective_of_more_bytes_takes_longer(kind):
    few, many = (collective(jax.devices(), kind, 4, size, TINY._replace(seconds=2e-3, tries=4)) for size in (1 << 10, 1 << 22))
    assert many.seconds > few.seconds


def test_a_step_is_repeated_until_the_call_does_not_count():
    """Twice the work takes about twice the time."""
    devices, effort = jax.devices()[:1], TINY._replace(seconds=0.02, tries=5)
    one, two = (products(devices, "float32", rows, effort).seconds for rows in (128, 256))
    assert 3 < two / one < 20, "8 by operations"


def test_what_is_spread_is_of_every_device():
    over = mesh(jax.devices(), 4)
    assert dict(over.shape) == {"rest": 2, "group": 4}
    given = spread(over, (4, 3))
    assert given.shape == (32, 3) and len(given.addressable_shards) == 8
    assert repeated(lambda s, _: s * 2, (given,), over, TINY) > 0


def test_clocks():
    """Simulated devices are timed by the work of the cores, others by the clock on the wall."""
    before, wall = clock("cpu"), clock("gpu")
    sum(range(10**6))
    assert clock("cpu") > before and clock("gpu") > wall and cores() >= 1
    assert Point("products", 8, 64, 1.0).dtype == "" and set(EFFORTS) == {"cpu", "quick", "other"}
