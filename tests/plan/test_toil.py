"""The least work against the parts of a step's time that devices compute in."""

import numpy as np
import pytest

from meshloom.plan.bounds import FULL, SOME, Bounds, Run
from meshloom.plan.search import Candidate, price
from meshloom.plan.space import patterns
from plan.questions import FAMILIES, GPU, question

COMPUTED = ("compute", "recompute", "memory", "optimizer", "bubble")


@pytest.mark.parametrize("remat", ["none", "selective", "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_work_is_near_what_a_step_computes_and_never_above(family: str, remat: str) -> None:
    q = question(family, GPU, 4, sequences=64)._replace(seq=64)
    bounds = Bounds(q)
    for words, mesh in ((("zero3",), {"zero3": 4}), (("zero1", "tensor"), {"zero1": 2, "tensor": 2})):
        p = next(p for p in patterns(q.config) if p.words == words)
        one = price(q, p.spell(mesh), 2, remat)
        assert isinstance(one, Candidate)
        run = Run(np.array([2.0]), 1.0, SOME[remat], FULL[remat], 0.0, 0.0, 1)
        done = bounds.toil.work(bounds.splits(p, {axis: np.array([n]) for axis, n in mesh.items()}), run)
        least = float((done.forward + done.backward + done.rest)[0])
        took = sum(part.seconds for part in one.time.parts if part.what in COMPUTED)
        assert 0.5 * took <= least <= took * (1 + 1e-9)
