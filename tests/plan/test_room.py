"""The least memory against what a step needs."""

import numpy as np
import pytest

from meshloom.plan.bounds import FULL, SOME, Bounds, Run
from meshloom.plan.room import activations, kept, room
from meshloom.plan.search import Candidate, price
from meshloom.plan.space import patterns
from plan.questions import FAMILIES, GPU, question


@pytest.mark.parametrize("remat", ["none", "selective", "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_room_is_near_what_a_step_needs_and_never_above(family: str, remat: str) -> None:
    q = question(family, GPU, 4, sequences=64)._replace(seq=64)
    bounds = Bounds(q)
    p = next(p for p in patterns(q.config) if p.words == ("zero1", "tensor"))
    mesh = {"zero1": 2, "tensor": 2}
    one = price(q, p.spell(mesh), 2, remat)
    assert isinstance(one, Candidate)
    s = bounds.splits(p, {axis: np.array([n]) for axis, n in mesh.items()})
    run = Run(np.array([2.0]), 1.0, SOME[remat], FULL[remat], 0.0, 0.0, 1)
    least = room(s, run, bounds.toil.beside)[0]
    assert 0.1 * one.memory.total <= least <= one.memory.total
    by = {row: n[0] for row, n in kept(s, run).items()}
    assert by["none"] > by["selective"] > by["full"] == by["offload"] > 0 and activations(s, run)[0] <= one.memory.kinds["activations"]
