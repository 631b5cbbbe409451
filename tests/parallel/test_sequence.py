"""Sequence parallelism by its formula, counted by hand, and what it refuses."""

import pytest

from meshloom.parallel.table import build
from meshloom.plan.cost import shapes, step_cost, wire_bytes
from meshloom.runner.run import How
from programs import config


def cost_of(spelling, remat="none"):
    model, c = config("llama_plain", head=8)
    lay = build(spelling, c, 16)
    return lay, step_cost(spelling, shapes(model, c, lay, 16, 8, 2, How("scan", remat), "float32"))


def test_a_gather_and_a_scatter_for_each_all_reduce() -> None:
    (_, plain), (_, split) = cost_of("tensor=4"), cost_of("tensor=4 sequence")
    count = lambda cost, kind: sum(x.count for x in cost if x.kind == kind and x.bytes >= 4096)
    assert count(split, "all-gather") == count(split, "reduce-scatter") == count(plain, "all-reduce") == 2 * (2 * 4 + 2)


def test_sends_the_same_bytes_but_for_the_norms() -> None:
    (lay, plain), (_, split) = cost_of("tensor=4"), cost_of("tensor=4 sequence")
    norms = next(x for x in split if x.why == "gradients, once a step")
    sent = lambda cost: sum(wire_bytes(x, lay) for x in cost)
    # the head's part before the loss is gathered, where an all-reduce was needed backward only; so is the embedding's
    assert sent(split) - wire_bytes(norms, lay) == sent(plain)
    assert norms.bytes == 4 * 32 * (2 * 2 + 1)


def test_recomputing_gathers_again() -> None:
    extra = lambda remat: {x.why: x.count for x in cost_of("tensor=4 sequence", remat)[1] if "recomputed" in x.why}
    assert extra("none") == {} and extra("selective") == {"into a layer's halves, recomputed": 8}
    assert extra("full") == {"into a layer's halves, recomputed": 8, "out of a layer's first half, recomputed": 4}


def test_refuses_a_sequence_that_does_not_divide() -> None:
    _, c = config("llama_plain", head=8)
    with pytest.raises(
        ValueError, match="A sequence of 18 tokens cannot be split over tensor=4 devices. Use data.seq that is a multiple of 4"
    ):
        build("tensor=4 sequence", c, 18)
