"""Data parallelism by its formula, counted by hand."""

from meshloom.parallel.table import build
from meshloom.plan.cost import shapes, step_cost
from meshloom.runner.run import How
from programs import config


def test_one_all_reduce_of_every_gradient() -> None:
    model, c = config("gpt2")
    for micro in (1, 2):
        lay = build("data=4", c, 16)
        gradients, sums = step_cost("data=4", shapes(model, c, lay, 16, 8, micro, How(), "bfloat16"))
        # embedding (padded to 384 rows), positions, 2 layers, last norm
        layer = 4 * 32 * 32 + 2 * 32 * 48 + (4 * 32 + 48 + 32) + 4 * 32
        elements = 384 * 32 + 64 * 32 + 2 * layer + 2 * 32
        arrays = 2 + 16 + 2
        assert (gradients.kind, gradients.axes, gradients.count, gradients.bytes) == ("all-reduce", ("data",), arrays, 4 * elements)
        assert (sums.count, sums.bytes) == (4, 16)
