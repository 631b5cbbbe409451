"""ZeRO: data parallelism without the redundant copies.  Source: Rajbhandari et al. 2020, arXiv 1910.02054.

All stages keep the fp32 parameters, the optimizer state and the average split along `embed` between steps (P bytes become P/n).
stage 1: each step starts by gathering the parameters (cast to the compute type first) and ends by scattering the summed gradients.
stage 2: as 1, but each layer's gradient is scattered as soon as it is known, so that the whole gradient never exists.
stage 3: as 2, but each layer's parameters are gathered when the layer runs, forward and again backward.
Traffic a step with m micro-batches, in units of (n-1)/n of the parameters: stage 1: 1 gather + 1 scatter; 2: 1 + m; 3: 2m + m.
Parameters without an `embed` axis (small biases) stay whole and are all-reduced.
"""

from meshloom.core.layout import Layout
from meshloom.parallel.base import Strategy, divisors

SPLIT = {"embed": ("zero",)}
TABLES = {1: ("rest",), 2: ("rest", "grad"), 3: ("rest", "grad", "step")}


def strategy(stage: int) -> Strategy:
    """ZeRO of one stage."""

    def layout(n: int) -> Layout:
        return Layout({"zero": n}, acts={"batch": ("zero",)}, **{table: SPLIT for table in TABLES[stage]})

    return Strategy(f"zero{stage}", layout, check, SUMMARY[stage])


SUMMARY = {
    1: "as data, with optimizer state and master weights split",
    2: "as zero1, with gradients split as they are made",
    3: "as zero2, with parameters gathered layer by layer",
}


def check(c, seq: int, n: int) -> None:
    """Refuses a width that n does not divide."""
    if c.embed % n:
        raise ValueError(
            f"ZeRO splits parameters along embed, and embed {c.embed} cannot be split over {n} devices. "
            f"Use one of {divisors(c.embed)} devices, or add data= for the rest."
        )
