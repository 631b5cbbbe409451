"""Arrays of links against `plan.link` one by one; what moves against the parts of a step's time."""

import random

import numpy as np
import pytest

from meshloom.core.layout import Layout
from meshloom.plan import link
from meshloom.plan.bounds import Bounds
from meshloom.plan.hardware import read
from meshloom.plan.space import meshes, patterns
from meshloom.plan.ways import Ways, exact, on_switch, on_torus
from plan.questions import GPU, TPU, question


def cases(on: str, count: int = 60):
    """Meshes by chance over a cluster, with some of their axes."""
    cluster, pick = read(on), random.Random(on)
    q = question("llama", GPU, 16)._replace(cluster=cluster)
    every = [p for p in patterns(q.config) if len(p.axes) > 1]
    bounds = Bounds(q._replace(dtype="bfloat16"))
    for p in pick.choices(every, k=count):
        sizes = meshes(p, cluster.devices)
        if not len(next(iter(sizes.values()))):
            continue
        at = pick.randrange(len(next(iter(sizes.values()))))
        mesh = {axis: np.array([n[at]]) for axis, n in sizes.items()}
        axes = tuple(a for a in p.axes if pick.random() < 0.5) or p.axes[:1]
        lay = Layout({axis: int(n[0]) for axis, n in mesh.items()})
        yield bounds.splits(p, mesh), cluster, axes, lay


def test_a_switch_is_exact() -> None:
    for s, cluster, axes, lay in cases("h100:8x8"):
        got, way = on_switch(s, cluster, axes), link.link(cluster, lay, axes)
        assert got.rate[0] == pytest.approx(way.rate) and got.late[0] == pytest.approx(cluster.hardware.start + way.latency)
        assert got.swap[0] == pytest.approx(link.exchange(cluster, lay, axes)) and got.step[0] == link.neighbour(cluster, lay, axes).rate
        assert got.devices[0] == lay.size(axes)


@pytest.mark.parametrize("on", ["v5p:4x4x4", "v5e:16x16", "v5p:2x2x8", "v5e:2x8x8"])
def test_a_torus_is_never_slower_than_it_is(on: str) -> None:
    for s, cluster, axes, lay in cases(on):
        got, way = on_torus(s, cluster, axes), link.link(cluster, lay, axes)
        assert got.rate[0] >= way.rate * (1 - 1e-12) and got.late[0] <= cluster.hardware.start + way.latency + 1e-15
        assert got.swap[0] <= link.exchange(cluster, lay, axes) * (1 + 1e-12) and got.step[0] >= link.neighbour(cluster, lay, axes).rate


def test_one_mesh_is_asked_of_the_links_themselves() -> None:
    for s, cluster, axes, lay in cases("v5p:4x4x4", 20):
        assert exact(s, cluster, axes).rate[0] == link.link(cluster, lay, axes).rate


def test_what_moves_over_one_device_takes_no_time() -> None:
    q = question("llama", TPU, 8)
    p = next(p for p in patterns(q.config) if p.words == ("zero3",))
    w = Ways(Bounds(q).splits(p, {"zero3": np.array([8])}))
    assert w.gathered(1e9, 1, "tensor")[0] == 0 == w.swapped(1e9, 1, "ulysses")[0] == w.passed(1e9, "pipe")[0]
    assert w.summed(1e9, 1, "zero3")[0] > w.gathered(1e9, 1, "zero3")[0] > 0
