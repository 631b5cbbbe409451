"""Context parallelism, as a ring: the sequence is split everywhere, and keys and values go around.  Source: Liu et al. 2023, arXiv 2310.01889.

Device r of P holds pieces r and 2P-1-r of 2P of every row, so that causal attention costs all the same (`core/order.py`); parameters are whole, and
their gradients are summed over devices as those of different samples are.  Memory: every activation / P, scores a block at a time.
Traffic a layer: keys and values P-1 times around forward, again backward, and their fp32 gradients with them (`ops/ring.py`).
"""

from meshloom.core.layout import Layout
from meshloom.ops.exchange import kv_heads_inside
from meshloom.ops.ring import steps
from meshloom.parallel.base import Asked, Collective, Shapes, Strategy, gradient_sums, merge

MIXING = ("attention",)
"""Layers that mix tokens and have a form for a sequence that is split."""


def layout(n: int) -> Layout:
    """The sequence over mesh axis `context`, inside attention too."""
    axes = ("context",)
    return Layout({"context": n}, acts={"seq": axes, "whole_seq": axes, "attend_seq": axes})


def check(c, seq: int, asked: Asked) -> None:
    """Refuses a sequence that is shorter than two tokens a device, and models that mix tokens by something that cannot be split."""
    n = asked.devices
    if seq < 2 * n:
        raise ValueError(
            f"A sequence of {seq} tokens is too short for context={n}: each device holds two pieces of it. "
            f"Use data.seq of at least {2 * n}, or context={max(1, seq // 2)} or fewer."
        )
    check_mixing(c, f"context={n}")


def check_mixing(c, asked: str) -> None:
    """Refuses a model whose layers mix tokens by something that has no form for a split sequence.  asked: the word of the layout."""
    if c.mixing not in MIXING:
        raise ValueError(
            f"{asked} splits the sequence, and this model mixes tokens by '{c.mixing}', which has no form for a sequence that is split "
            f"({', '.join(MIXING)} has). Use data=, zero3= or tensor= instead."
        )


def cost(x: Shapes) -> tuple[Collective, ...]:
    """Each layer: k and v of [batch, seq / P, kv heads, head] in each of S steps, forward and backward, and their gradients in fp32.

    S = P-1, fewer where a window hides whole steps from all devices. `full` runs the forward ring again; `selective` keeps its result. Packed
    rows: the documents' numbers, once."""
    lay, c = x.layout, x.config
    ring, many = lay.size(lay.ring), lay.size(lay.exchange)
    array = x.rows // lay.size(lay.inner) * x.seq * many * c.head * kv_heads_inside(c.heads, c.kv_heads, lay)
    half, found = x.seq * many // 2, []
    for kind in x.run:
        hops = len(steps(ring, half, kind.window))
        again = 2 * hops if x.remat == "full" else 0
        for count, width, place, why in (
            (2 * hops, x.width, "layer", "keys and values around the ring"),
            (2 * hops, x.width, "layer back", "keys and values around the ring, backward"),
            (2 * hops, 4, "layer back", "their gradients around the ring"),
            (again, x.width, "layer again", "keys and values around the ring, recomputed"),
        ):
            found.append(Collective("collective-permute", lay.ring, x.micro * count, x.micro * count * array * width, place, why))
    return merge([*found, *documents(x), *gradient_sums(x, "context")])


def documents(x: Shapes) -> list[Collective]:
    """The gather of the documents' numbers of packed rows, once a micro-batch, int32."""
    axes = x.layout.acts["whole_seq"]
    size = x.rows * x.seq * x.layout.size(axes) * 4
    return [Collective("all-gather", axes, x.micro, x.micro * size, "rows", "the documents of each row")] if x.packed else []


CONTEXT = Strategy("context", layout, check, cost, "the sequence is split; keys and values go around a ring")
