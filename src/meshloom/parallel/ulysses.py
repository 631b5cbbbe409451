"""Context parallelism by all-to-all: the sequence is split everywhere but inside attention, where heads are.  Source: Jacobs et al. 2023, arXiv 2309.14509.

Four all-to-alls a layer forward, four backward, around whatever attention there is (`ops/exchange.py`). Key heads that the devices do not share
evenly are repeated as little as makes them. With tensor parallelism heads are split by tensor first; with `context` the ring goes around outside.
Memory: every activation / n.
"""

from meshloom.core.layout import Layout
from meshloom.ops.exchange import kv_heads_inside
from meshloom.parallel.base import Asked, Collective, Shapes, Strategy, divisors, gradient_sums, merge
from meshloom.parallel.context import check_mixing, documents


def layout(n: int) -> Layout:
    """The sequence over mesh axis `ulysses`, but inside attention."""
    axes = ("ulysses",)
    return Layout({"ulysses": n}, acts={"seq": axes, "whole_seq": axes})


def check(c, seq: int, asked: Asked) -> None:
    """Refuses a sequence shorter than the devices, heads that they do not divide, and models that mix tokens by something that cannot be split."""
    n = asked.devices
    if seq < n:
        raise ValueError(
            f"A sequence of {seq} tokens is too short for ulysses={n}. Use data.seq of at least {n}, or ulysses={seq} or fewer."
        )
    _check_heads(c.heads, n, "")
    check_mixing(c, f"ulysses={n}")


def _check_heads(heads: int, n: int, whose: str) -> None:
    if heads % n:
        raise ValueError(
            f"ulysses={n} exchanges heads for sequence, and {heads} heads{whose} cannot be shared by {n} devices. "
            f"Use ulysses= one of {divisors(heads)}, and context= for the rest: a ring needs no heads."
        )


def fits(c, seq: int, lay: Layout) -> None:
    """Refuses heads that do not divide once tensor parallelism has its share."""
    tensor = lay.size(lay.acts.get("heads", ()))
    _check_heads(c.heads // tensor, lay.sizes["ulysses"], f" of each of the {tensor} tensor devices")


def cost(x: Shapes) -> tuple[Collective, ...]:
    """Each layer: q, k, v and the result of the device's own tokens, [batch, seq / n, heads, head], in an all-to-all forward and one backward; a remat
    does the forward ones again."""
    lay, c = x.layout, x.config
    axes, layers = lay.exchange, x.layers
    tensor, n = lay.size(lay.acts.get("heads", ())), lay.size(axes)
    size = (
        2 * (c.heads // tensor + n * kv_heads_inside(c.heads, c.kv_heads, lay)) * x.rows // lay.size(lay.inner) * x.seq * c.head * x.width
    )
    again = layers if x.remat != "none" else 0
    found = [
        Collective("all-to-all", axes, 4 * x.micro * times, x.micro * times * size, place, why)
        for times, place, why in (
            (layers, "layer", "heads for sequence"),
            (layers, "layer back", "heads for sequence, backward"),
            (again, "layer again", "heads for sequence, recomputed"),
        )
    ]
    return merge([*found, *([] if lay.ring else documents(x)), *gradient_sums(x, "ulysses")])


ULYSSES = Strategy("ulysses", layout, check, cost, "the sequence is split; inside attention heads are instead", fits=fits)
