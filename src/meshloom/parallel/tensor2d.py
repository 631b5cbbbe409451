"""Tensor parallelism in two dimensions: a mesh of rows x cols holds [K/rows, N/cols] of every matrix.  Source: Xu et al. 2021, arXiv 2104.05343.

The batch is split over `rows`, the residual stream's embed over `cols`.  A weight is gathered over rows while its layer runs, what it multiplies
over cols; the partial sums of a layer's second product are reduce-scattered over cols onto embed.  Memory: everything / (rows x cols).
"""

from meshloom.core.layout import Layout
from meshloom.parallel.base import Asked, Collective, Shapes, Strategy, divisors, gradient_sums, merge, weight_moves
from meshloom.parallel.sequence import halves
from meshloom.parallel.tensor1d import loss

COLS = {"heads": ("cols",), "kv_heads": ("cols",), "ffn": ("cols",), "expert_ffn": ("cols",), "vocab": ("cols",)}
STORED = {"embed": ("rows",), **COLS}
STATISTICS = {"norm": 1, "centred norm": 2}
"""Numbers of each token that a norm whose gain has this role takes."""


def layout(rows: int, cols: int) -> Layout:
    """Matrices over mesh axes `rows` (embed) and `cols` (heads, ffn, vocab); the batch over rows, the residual stream's embed over cols."""
    acts = {"batch": ("rows",), "embed": ("cols",), **COLS}
    return Layout({"rows": rows, "cols": cols}, rest=STORED, step=STORED, live=COLS, grad=STORED, acts=acts)


def sizes(n: int) -> tuple[int, int]:
    """A number of devices as a square.  Raises ValueError for one that is not."""
    side = round(n**0.5)
    if side * side != n:
        raise ValueError(f"tensor2d={n} is not a square number of devices. Write rows x columns, such as tensor2d=2x{max(n // 2, 1)}.")
    return side, side


def check(c, seq: int, asked: Asked) -> None:
    """Refuses sizes that the rows or the columns do not divide, and a mesh of one row or column."""
    rows, cols = asked.sizes
    if 1 in asked.sizes:
        other = f"tensor={cols}" if rows == 1 else f"zero3={rows}"
        raise ValueError(f"tensor2d={rows}x{cols} splits one way only. Write {other}, or give it at least 2 rows and 2 columns.")
    divides("tensor2d", f"{rows} rows", rows, (("embed", c.embed),))
    divides("tensor2d", f"{cols} columns", cols, across(c))


def across(c) -> tuple[tuple[str, int], ...]:
    """What columns split: name and size."""
    return (("embed", c.embed), ("heads", c.heads), ("ffn", c.ffn), ("padded vocabulary rows", c.vocab_padded))


def divides(strategy: str, said: str, n: int, names: tuple[tuple[str, int], ...]) -> None:
    """Refuses the first of these sizes that n does not divide.  said: what there are n of."""
    for name, size in names:
        if size % n:
            raise ValueError(
                f"{name} {size} cannot be split over the {said} of {strategy}. Use a number of them that divides it: {divisors(size)}."
            )


def cost(x: Shapes) -> tuple[Collective, ...]:
    """Weights as under ZeRO-3, over rows; activations as under sequence parallelism, over cols and along embed; numbers of each token for the
    norms and for the loss, over cols.  A linear layer of M rows (of the whole batch), K inputs, N outputs: (rows-1) KN / rc received for each
    gather or scatter of its weight, (cols-1) M min(K, N) / rc for each of the two of its activations."""
    return merge([*halves(x, ("cols",), x.residual), *norms(x, ("cols",)), *loss(x, ("cols",)), *moved_once(x, ("rows", "cols"))])


def moved_once(x: Shapes, owners: tuple[str, ...]) -> list[Collective]:
    """Weights and gradients by collectives whose outermost mesh axis is one of these."""
    return [c for owner in owners for c in (*weight_moves(x, owner), *gradient_sums(x, owner))]


def norms(x: Shapes, axes: tuple[str, ...], split: int = 1) -> list[Collective]:
    """One fp32 number a token for each statistic of each norm of the residual stream, forward and backward; again where `full` computes a layer
    again. Norms of parallel halves read the same input: their statistics are summed once.  axes: that split embed.  split: devices over which
    one device's rows of the stream are split besides."""
    each = [(s.axes[0] == "layer", STATISTICS.get(s.role, 0), s.shape[0]) for s in x.leaves.values() if "embed" in s.axes]
    inside = sum(n * layers for stacked, n, layers in each if stacked)
    outside = sum(n for stacked, n, _ in each if not stacked)
    forward = inside // 2 if x.parallel else inside
    size = 4 * x.rows * x.seq // split
    rows = (
        (outside + forward, "statistics of norms"),
        (outside + inside, "statistics of norms, backward"),
        (forward if x.remat == "full" else 0, "statistics of norms, recomputed"),
    )
    return [Collective("all-reduce", axes, x.micro * n, x.micro * n * size, why) for n, why in rows]


SUMMARY = "matrices are split both ways: embed over rows, heads, MLP width and vocabulary over columns"
TENSOR2D = Strategy("tensor2d", layout, check, cost, SUMMARY, sizes, 2)
