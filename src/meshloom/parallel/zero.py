"""ZeRO: data parallelism without the redundant copies.  Source: Rajbhandari et al. 2020, arXiv 1910.02054.

All stages keep the fp32 parameters, the optimizer state and the average split along `embed` between steps (P bytes become P/n).
stage 1: each step starts by gathering the parameters (cast to the compute type first) and ends by scattering the summed gradients.
stage 2: as 1, but each layer's gradient is scattered as soon as it is known, so that the whole gradient never exists.
stage 3: as 2, but each layer's parameters are gathered when the layer runs, forward and again backward.
Traffic a step with m micro-batches, in units of (n-1)/n of the parameters: stage 1: 1 gather + 1 scatter; 2: 1 + m; 3: 2m + m.
Parameters without an `embed` axis (small biases) stay whole and are all-reduced.
"""

from meshloom.core.layout import Layout
from meshloom.core.spec import Spec
from meshloom.parallel.base import Asked, Collective, Shapes, Strategy, divisors, gradient_sums, merge, moved

TABLES = {1: ("rest",), 2: ("rest", "grad"), 3: ("rest", "grad", "step")}


def strategy(stage: int) -> Strategy:
    """ZeRO of one stage."""

    axis = f"zero{stage}"

    def layout(n: int) -> Layout:
        return Layout({axis: n}, acts={"batch": (axis,)}, **{table: {"embed": (axis,)} for table in TABLES[stage]})

    return Strategy(axis, layout, check, lambda x: cost(x, axis), SUMMARY[stage])


SUMMARY = {
    1: "as data, with optimizer state and master weights split",
    2: "as zero1, with gradients split as they are made",
    3: "as zero2, with parameters gathered layer by layer",
}


def check(c, seq: int, asked: Asked) -> None:
    """Refuses a width that the devices do not divide."""
    n = asked.devices
    if c.embed % n:
        raise ValueError(
            f"ZeRO splits parameters along embed, and embed {c.embed} cannot be split over {n} devices. "
            f"Use one of {divisors(c.embed)} devices, or add data= for the rest."
        )


def cost(x: Shapes, axis: str) -> tuple[Collective, ...]:
    """Parameters with an `embed` axis, m micro-batches:

    stage 1: one gather, one scatter of fp32 gradients. stage 2: one gather, m scatters. stage 3: m scatters, and m gathers forward; layers'
    parameters m gathers backward too (those outside the layers are used once). Stages 2 and 3 move one array a layer, in the type of the arithmetic.
    Where a layer's halves are parallel, the biases of both outputs have the same gradient, and one is scattered.
    """
    found: list[Collective] = []
    for s in x.leaves.values():
        inside = s.axes[0] == "layer"
        times = x.micro * (s.shape[0] if inside else 1)
        array = x.elements("live", s) // (s.shape[0] if inside else 1) * x.width_of(s)
        if axes := moved(x.layout, "rest", "step", s):
            found.append(Collective("all-gather", axes, 1, x.elements("step", s) * x.width_of(s), "parameters, once a step"))
        if axes := moved(x.layout, "rest", "grad", s):
            found.append(Collective("reduce-scatter", axes, 1, x.elements("grad", s) * 4, "gradients, once a step"))
        if (axes := moved(x.layout, "grad", "live", s)) and not (x.twins and s.role == "ends first half"):
            found.append(Collective("reduce-scatter", axes, times, times * array, "gradients, every micro-batch"))
        if axes := moved(x.layout, "step", "live", s):
            found.append(Collective("all-gather", axes, times, times * array, "parameters, every micro-batch"))
            again = x.micro * (s.shape[0] - x.merged) if inside and needed_again(s, x) else 0
            found.append(Collective("all-gather", axes, again, again * array, "parameters, every micro-batch, backward"))
    return merge([*found, *gradient_sums(x, axis)])


def needed_again(s: Spec, x: Shapes) -> bool:
    """Whether the backward pass of a layer needs a parameter again: all but biases, which are only added; and of these, where the layer is
    computed again, all that something comes after."""
    again = {
        "factor": True,
        "added": x.remat != "none",
        "ends first half": x.remat != "none" and not x.parallel,
        "ends layer": False,
    }
    return again[s.role]
