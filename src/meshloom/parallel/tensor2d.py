"""Tensor parallelism in two dimensions: a mesh of rows x cols holds [K/rows, N/cols] of every matrix.  Source: Xu et al. 2021, arXiv 2104.05343.

The batch is split over `rows`, the residual stream's embed over `cols`.  A weight is gathered over rows while its layer runs, what it multiplies
over cols; the partial sums of a layer's second product are reduce-scattered over cols onto embed.  Memory: everything / (rows x cols).
"""

from meshloom.core.layout import INSIDE, Layout
from meshloom.parallel.base import Asked, Collective, Shapes, Strategy, divisors, gradient_sums, merge, root, weight_moves
from meshloom.parallel.sequence import ends, halves
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
    if not (side := root(n, 2)):
        raise ValueError(f"tensor2d={n} is not a square number of devices. Write rows x columns, such as tensor2d=2x{max(n // 2, 1)}.")
    return side, side


def check(c, seq: int, asked: Asked) -> None:
    """Refuses sizes that the rows or the columns do not divide, and a mesh of one row or column."""
    rows, cols = asked.sizes
    if 1 in asked.sizes:
        other = f"tensor={cols}" if rows == 1 else f"zero3={rows}"
        raise ValueError(f"tensor2d={rows}x{cols} splits one way only. Write {other}, or give it at least 2 rows and 2 columns.")
    if "stream" in asked.options and rows != cols:
        raise ValueError(
            f"Streamed products need as many rows as columns, and {rows}x{cols} is not a square. Use {cols}x{cols}, or leave out ':stream'."
        )
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
    return merge([*activations(x), *norms(x, ("cols",)), *loss(x, "cols"), *moved_once(x, ("rows", "cols"))])


def activations(x: Shapes) -> list[Collective]:
    """What moves into and out of layers, the embedding and the head over cols; where products are streamed, also the weights over rows."""
    return streams(x) if x.layout.square else halves(x, ("cols",), x.residual)


def streams(x: Shapes) -> list[Collective]:
    """Panels, sent straight from where they lie and sums straight to where they belong; each of q steps moves those of all devices but one row's.

    Of a first product (its matrices side by side) input and weight move forward; input, weight and their gradients backward. Of a second one weight
    and result forward; the result's gradient, the weight and its gradient backward (the result's gradient is one for parallel halves).
    """
    assert x.layout.square
    q, layers = x.layout.square[2], x.layers
    tokens = x.residual // x.layout.sizes["cols"]
    weights = {True: 0, False: 0}
    first, second = 0, 0  # of these, those that end a layer's first half and begin its second
    for s in x.leaves.values():
        if s.axes[0] == "layer" and "embed" in s.axes and INSIDE & set(s.axes):
            enters, size = s.axes[1] == "embed", x.layer(s) * x.width
            weights[enters] += size
            first += 0 if enters or "ffn" in s.axes else size
            second += size if enters and "ffn" in s.axes else 0
    full = x.remat == "full"
    once, first_half = full and not x.parallel, int(not x.parallel)
    rows = (
        # mesh axis, products a layer, bytes of their panels in all, place, why
        ("cols", 2, 2 * tokens, "layer", "into a layer's halves, panels"),
        ("rows", 2, weights[True], "layer", "into a layer's halves, panels"),
        ("cols", 4, 4 * tokens, "layer back", "into a layer's halves, panels, backward"),
        ("rows", 4, 2 * weights[True], "layer back", "into a layer's halves, panels, backward"),
        ("cols", first_half, first_half * tokens, "layer", "out of a layer's halves, panels"),
        ("rows", first_half, first_half * first, "layer", "out of a layer's halves, panels"),
        ("cols", 2 - first_half, (2 - first_half) * tokens, "layer end", "out of a layer's halves, panels"),
        ("rows", 2 - first_half, weights[False] - first_half * first, "layer end", "out of a layer's halves, panels"),
        ("cols", *((1, tokens) if x.twins else (2, 2 * tokens)), "layer back", "out of a layer's halves, panels, backward"),
        ("rows", 4, 2 * weights[False], "layer back", "out of a layer's halves, panels, backward"),
        ("cols", 2 * full, 2 * tokens * full, "layer again", "into a layer's halves, panels, recomputed"),
        ("rows", 2 * full, weights[True] * full, "layer again", "into a layer's halves, panels, recomputed"),
        ("cols", 1 * once, tokens * once, "layer again", "out of a layer's first half, panels, recomputed"),
        ("rows", 1 * once, first * once, "layer again", "out of a layer's first half, panels, recomputed"),
    )
    times = x.micro * layers
    panels = [
        Collective("collective-permute", (axis,), times * n * q, times * size * (q - 1), place, why) for axis, n, size, place, why in rows
    ]
    # a CPU's compiler that sees both computations of a layer takes the panels of the second half's weights from the first of them
    there = -x.micro * x.merged * full
    size, why = there * second * (q - 1), "into a layer's halves, panels, recomputed"
    panels.append(Collective("collective-permute", ("rows",), there * q, size, "layer again", why))
    return [*panels, *ends(x, ("cols",), x.residual)]


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
        (forward, "layer", "statistics of norms"),
        (outside, "head", "statistics of norms"),
        (outside, "head back", "statistics of norms, backward"),
        (forward if x.remat == "full" else 0, "layer again", "statistics of norms, recomputed"),
        (inside, "layer back", "statistics of norms, backward"),
    )
    return [Collective("all-reduce", axes, x.micro * n, x.micro * n * size, place, why) for n, place, why in rows]


OPTIONS = {"stream": "matrices and activations pass by panel by panel, so that none is ever gathered; needs a square"}
SUMMARY = "matrices are split both ways: embed over rows, heads, MLP width and vocabulary over columns"
TENSOR2D = Strategy("tensor2d", layout, check, cost, SUMMARY, sizes, 2, OPTIONS)
