"""Sequence parallelism beside tensor parallelism: between layers' matrices the sequence is split.  Source: Korthikanti et al. 2022, arXiv 2205.05198.

Norms, residuals and dropout hold [batch, seq/n, embed].  Each all-reduce of tensor parallelism becomes a reduce-scatter behind and an
all-gather before the matrices: the same bytes, 1/n of the activation memory there.
"""

from meshloom.core.layout import Layout
from meshloom.parallel.base import Asked, Collective, Shapes, Strategy, divisors, merge


def layout(n: int) -> Layout:
    """The residual stream's sequence over mesh axis `tensor`."""
    return Layout({"tensor": n}, acts={"seq": ("tensor",)})


def check(c, seq: int, asked: Asked) -> None:
    """Refuses a sequence length that the devices do not divide."""
    n = asked.devices
    if seq % n:
        raise ValueError(
            f"A sequence of {seq} tokens cannot be split over tensor={n} devices. Use data.seq that is a multiple of {n}, or tensor= one of {divisors(seq)}."
        )


def cost(x: Shapes) -> tuple[Collective, ...]:
    """In place of tensor parallelism's all-reduces of the residual stream: gathered before and scattered behind each of a layer's two halves."""
    return merge(halves(x, ("tensor",), x.residual))


def halves(x: Shapes, axes: tuple[str, ...], size: int) -> list[Collective]:
    """The residual stream, `size` bytes where it is whole, gathered before and scattered behind each of a layer's two halves, the embedding
    and the head, and the other way round backward.

    A remat gathers both halves' inputs again, and `full` scatters the first half's result again. Parallel halves get the same gradient back,
    which is gathered once, and neither's result is needed to compute the other again.
    """
    layers = x.layers
    again = layers if x.remat != "none" else 0
    scattered = again if x.remat == "full" and not x.parallel else 0
    return [
        Collective(kind, axes, x.micro * n, x.micro * n * size, place, why)
        for kind, n, place, why in (
            ("all-gather", 2 * layers, "layer", "into a layer's halves"),
            ("reduce-scatter", (not x.parallel) * layers, "layer", "out of a layer's halves"),
            ("reduce-scatter", (1 + x.parallel) * layers, "layer end", "out of a layer's halves"),
            ("reduce-scatter", 2 * layers, "layer back", "into a layer's halves, backward"),
            ("all-gather", layers if x.twins else 2 * layers, "layer back", "out of a layer's halves, backward"),
            ("all-gather", 2 * again, "layer again", "into a layer's halves, recomputed"),
            ("reduce-scatter", scattered, "layer again", "out of a layer's first half, recomputed"),
        )
    ] + ends(x, axes, size)


def ends(x: Shapes, axes: tuple[str, ...], size: int) -> list[Collective]:
    """The residual stream, `size` bytes where it is whole, scattered behind the embedding and gathered before the head, and back."""
    each = (
        ("reduce-scatter", "embed", "the embedding"),
        ("all-gather", "embed back", "the embedding, backward"),
        ("all-gather", "head", "the head"),
        ("reduce-scatter", "head back", "the head, backward"),
    )
    return [Collective(kind, axes, x.micro, x.micro * size, place, why) for kind, place, why in each]


SEQUENCE = Strategy("sequence", layout, check, cost, "the residual stream's sequence is split over the tensor axis", beside="tensor")
