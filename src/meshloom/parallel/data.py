"""Data parallelism: every device holds the whole model and works on its share of the batch; gradients are summed once a step.

Memory: nothing is saved.  Traffic a step: one all-reduce of every gradient, 2 (n-1)/n of its bytes, whatever the number of micro-batches.
"""

from meshloom.core.layout import Layout
from meshloom.parallel.base import Asked, Collective, Shapes, Strategy, gradient_sums


def layout(n: int) -> Layout:
    """The batch over mesh axis `data`."""
    return Layout({"data": n}, acts={"batch": ("data",)})


def check(c, seq: int, asked: Asked) -> None:
    """Every model can be replicated."""


def cost(x: Shapes) -> tuple[Collective, ...]:
    """One all-reduce of every gradient, fp32, whatever the number of micro-batches; of the sums for the log."""
    return gradient_sums(x, "data")


DATA = Strategy("data", layout, check, cost, "the batch is split, the model is whole on each device")
