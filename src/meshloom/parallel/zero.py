"""ZeRO: data parallelism without the redundant copies.  Source: Rajbhandari et al. 2020, arXiv 1910.02054.

All stages keep the fp32 parameters, the optimizer state and the average split along `embed` between steps (P bytes become P/n).
stage 1: each step starts by gathering the parameters (cast to the compute type first) and ends by scattering the summed gradients.
stage 2: as 1, but each layer's gradient is scattered as soon as it is known, so that the whole gradient never exists.
stage 3: as 2, but each layer's parameters are gathered when the layer runs, forward and again backward.
Traffic a step with m micro-batches, in units of (n-1)/n of the parameters: stage 1: 1 gather + 1 scatter; 2: 1 + m; 3: 2m + m.
Parameters without an `embed` axis (small biases) stay whole and are all-reduced.
"""

from meshloom.core.compress import SCATTERED
from meshloom.core.layout import Layout
from meshloom.parallel.base import Asked, Collective, Shapes, Strategy, divisors, gradient_sums, merge, weight_moves

TABLES = {1: ("rest",), 2: ("rest", "grad"), 3: ("rest", "grad", "step")}


def strategy(stage: int) -> Strategy:
    """ZeRO of one stage."""

    axis = f"zero{stage}"

    def layout(n: int) -> Layout:
        return Layout({axis: n}, acts={"batch": (axis,)}, **{table: {"embed": (axis,)} for table in TABLES[stage]})

    return Strategy(axis, layout, check, lambda x: cost(x, axis), SUMMARY[stage], options=OPTIONS, apart=APART)


SUMMARY = {
    1: "as data, with optimizer state and master weights split",
    2: "as zero1, with gradients split as they are made",
    3: "as zero2, with parameters gathered layer by layer",
}


OPTIONS = {
    "qw8": "matrices are gathered as 8-bit blocks",
    "qg8": "gradients of matrices are scattered as 8-bit blocks",
    "qg4": "gradients of matrices are scattered as 4-bit blocks",
}
"""ZeRO++, core/compress.py. These alone change results, within bounds."""
APART = {
    "qw8": {"loss": 1e-2, "gradient": 0.15, "norm": 2e-2, "weights": 0.1},
    "qg8": {"loss": 1e-2, "gradient": 0.05, "norm": 1e-2, "weights": 0.05},
    "qg4": {"loss": 1e-2, "gradient": 0.5, "norm": 0.1, "weights": 0.2},
}
"""A number is off by 1/254 (8 bits) or 1/14 (4 bits) of the largest in its block, from each device that adds to a sum. What follows for an
element of a gradient has no bound of its own, since those sums cancel: these are twice and more what small models show."""


def check(c, seq: int, asked: Asked) -> None:
    """Refuses a width that the devices do not divide, and two widths of one gradient."""
    n = asked.devices
    if len([option for option in asked.options if option in SCATTERED]) > 1:
        raise ValueError(f"Options {', '.join(asked.options)} give one gradient two widths. Choose qg8 or qg4.")
    if c.embed % n:
        raise ValueError(
            f"ZeRO splits parameters along embed, and embed {c.embed} cannot be split over {n} devices. "
            f"Use one of {divisors(c.embed)} devices, or add data= for the rest."
        )


def cost(x: Shapes, axis: str) -> tuple[Collective, ...]:
    """What moves between the tables of the layout over this mesh axis (and inner ones), and the sums of what is not split."""
    return merge([*weight_moves(x, axis), *gradient_sums(x, axis)])
