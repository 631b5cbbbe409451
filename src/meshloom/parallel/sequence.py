"""Sequence parallelism beside tensor parallelism: between layers' matrices the sequence is split.  Source: Korthikanti et al. 2022, arXiv 2205.05198.

Norms, residuals and dropout hold [batch, seq/n, embed].  Each all-reduce of tensor parallelism becomes a reduce-scatter behind and an
all-gather before the matrices: the same bytes, 1/n of the activation memory there.
"""

from meshloom.core.layout import Layout
from meshloom.parallel.base import Strategy, divisors


def layout(n: int) -> Layout:
    """The residual stream's sequence over mesh axis `tensor`."""
    return Layout({"tensor": n}, acts={"seq": ("tensor",)})


def check(c, seq: int, n: int) -> None:
    """Refuses a sequence length that n does not divide."""
    if seq % n:
        raise ValueError(
            f"A sequence of {seq} tokens cannot be split over tensor={n} devices. Use data.seq that is a multiple of {n}, or tensor= one of {divisors(seq)}."
        )


SEQUENCE = Strategy("sequence", layout, check, "the residual stream's sequence is split over the tensor axis")
