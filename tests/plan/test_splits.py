"""Arrays of splits against layouts one by one."""

import random

import numpy as np
import pytest

from meshloom.parallel.table import build
from meshloom.plan.bounds import Bounds
from meshloom.plan.space import meshes, patterns, sieve
from meshloom.plan.splits import OUTER, own
from plan.questions import FAMILIES, GPU, question


@pytest.mark.parametrize("family", FAMILIES)
def test_elements_are_those_of_the_layout(family: str) -> None:
    """Of every parameter with several axes under every table, for meshes by chance."""
    q, pick, done = question(family, GPU, 16, sequences=64), random.Random(family), 0
    bounds, every = Bounds(q), list(patterns(question(family, GPU, 16).config))
    for p in pick.sample(every, 120):
        sizes = meshes(p, 16)
        ok = np.flatnonzero(sieve(q.config, q.seq, q.sequences, p, sizes))
        if not len(ok):
            continue
        at = pick.choice(ok.tolist())
        mesh = {axis: int(n[at]) for axis, n in sizes.items()}
        try:
            lay = build(p.spell(mesh, ("1f1b",)), q.config, q.seq, "gpu")
        except ValueError:
            continue
        s = bounds.splits(p, {axis: np.array([n]) for axis, n in mesh.items()})
        for leaf in s.leaves:
            for table in OUTER:
                want = leaf.size / np.prod([lay.size(axes) for axes in lay.entries(table, leaf.axes)])
                assert s.elements(table, leaf)[0] == pytest.approx(want), (p.spell(mesh, ("1f1b",)), leaf.axes, table)
        assert s.batch_all[0] == lay.size((*lay.batch, *lay.inner)) and s.stages[0] == lay.stages
        done += 1
    assert done > 20


def test_inner_devices_and_trained_bytes() -> None:
    q = question("llama", GPU, 16)
    p = next(p for p in patterns(q.config) if p.words == ("zero1", "zero3", "tensor"))
    s = Bounds(q).splits(p, {"zero1": np.array([2]), "zero3": np.array([4]), "tensor": np.array([2])})
    assert (s.inner("zero1")[0], s.inner("zero3")[0], s.inner("tensor")[0], s.inner("pipe")[0]) == (8, 2, 1, 1)
    assert s.trained("rest", 4)[0] == s.bytes("rest", 4)[0] and not s.exact and s.exactly().exact
    assert own(s.leaves[-1]) == [name for name in s.leaves[-1].axes if name not in ("layer", "expert")]
