"""Tensor parallelism in three dimensions: a cube of devices.  Source: Bian et al. 2021, arXiv 2105.14450.

Mesh axes: `cube_rows` (i), `cube_embed` (j), `cube_heads` (l). Between layers a device has [batch/i, seq/l, embed/j]; inside one, whole sequences of
batch/(i j) rows and heads/l or ffn/l features. A weight rests as [embed/(j i), heads/l] and is gathered over i while its layer runs.
    into a layer:  gather x over l, multiply, reduce-scatter over j onto rows.   out of it: gather over j, multiply, reduce-scatter over l onto seq.
Each product leaves its result where the next one wants its input.  Memory: everything / (i j l).
"""

from meshloom.core.layout import INSIDE, Layout
from meshloom.parallel.base import Asked, Collective, Shapes, Strategy, divisors, merge, root
from meshloom.parallel.sequence import halves
from meshloom.parallel.tensor1d import loss
from meshloom.parallel.tensor2d import divides, moved_once, norms

I, J, L = "cube_rows", "cube_embed", "cube_heads"
WIDE = {name: (L,) for name in ("heads", "kv_heads", "ffn", "expert_ffn", "vocab")}
STORED = {"embed": (J, I), **WIDE}


def layout(i: int, j: int, l: int) -> Layout:  # the letters of the paper
    """Batch, embed and heads (ffn, vocab, between layers seq) over one mesh axis each; inside a layer the batch over embed's too."""
    acts = {"batch": (I,), "work_batch": (J,), "seq": (L,), "embed": (J,), **WIDE}
    return Layout({I: i, J: j, L: l}, rest=STORED, step=STORED, live={"embed": (J,), **WIDE}, grad=STORED, acts=acts)


def sizes(n: int) -> tuple[int, int, int]:
    """A number of devices as a cube.  Raises ValueError for one that is not."""
    if not (side := root(n, 3)):
        raise ValueError(f"tensor3d={n} is not a cube of devices. Use 8, 27 or 64 of them, or write three sizes, such as tensor3d=2x2x4.")
    return side, side, side


def check(c, seq: int, asked: Asked) -> None:
    """Refuses sizes that a side of the cube does not divide, and a side of one device."""
    i, j, l = asked.sizes
    if 1 in asked.sizes:
        raise ValueError(f"tensor3d={i}x{j}x{l} has a side of one device. Write tensor2d, or give every side at least 2.")
    divides("tensor3d", f"{i} x {j} devices of '{I}' and '{J}'", i * j, (("embed", c.embed),))
    wide = (("heads", c.heads), ("ffn", c.ffn), ("padded vocabulary rows", c.vocab_padded))
    divides("tensor3d", f"{l} devices of '{L}'", l, wide)
    if seq % l:
        raise ValueError(
            f"A sequence of {seq} tokens cannot be split over the {l} devices of '{L}' of tensor3d. Use data.seq that is a multiple of {l}, or "
            f"a cube with one of {divisors(seq)} there."
        )


def cost(x: Shapes) -> tuple[Collective, ...]:
    """For each product of M rows, K inputs, N outputs on a cube of side q: its input, its weight and its result move once forward and once
    backward, (q-1) (MK + KN + MN) / q^3 numbers received each way; products of one input share its gather."""
    stream = x.residual // x.layout.sizes[J]
    return merge(
        [
            *halves(x, (L,), stream),
            *turns(x),
            *head(x, stream),
            *norms(x, (J,), x.layout.sizes[L]),
            *loss(x, L),
            *moved_once(x, (I, J, L)),
        ]
    )


def turns(x: Shapes) -> list[Collective]:
    """Over `cube_embed`, between rows of the stream and rows of a layer's inside: results of first products are scattered onto rows, inputs of
    second products gathered from them, and the other way round backward."""
    found: list[Collective] = []
    for s in x.leaves.values():
        if s.axes[0] != "layer" or "embed" not in s.axes or not INSIDE & set(s.axes):
            continue
        layers, enters = s.shape[0], s.axes.index("embed") == 1
        features = x.layer(s) // (x.config.embed // x.layout.sizes[J])
        size = x.rows * x.seq * features * x.width
        ways = ("reduce-scatter", "all-gather") if enters else ("all-gather", "reduce-scatter")
        again = x.remat == "full" if enters else x.remat != "none"
        moves = (
            (ways[0], 1, "layer", "rows, forward"),
            (ways[1], 1, "layer back", "rows, backward"),
            (ways[0], int(again), "layer again", "rows, recomputed"),
        )
        for kind, n, place, why in moves:
            count = x.micro * layers * n
            found.append(Collective(kind, (J,), count, count * size, place, why))
    return found


def head(x: Shapes, stream: int) -> list[Collective]:
    """The head's input changes from parts of each token to whole tokens of fewer rows, and its weight is gathered along embed."""
    weight = x.width * x.config.embed * x.config.vocab_padded // x.layout.size(x.layout.acts["vocab"])
    back = x.micro * (not x.leaves.get("head", x.leaves["embed"]).frozen)
    return [
        Collective("all-to-all", (J,), x.micro, x.micro * stream, "head", "the head, embed for rows"),
        Collective("all-to-all", (J,), x.micro, x.micro * stream, "head back", "the head, embed for rows, backward"),
        Collective("all-gather", (J,), x.micro, x.micro * weight, "head", "the head's weight"),
        Collective("reduce-scatter", (J,), back, back * weight, "head back", "the head's weight, backward"),
    ]


SUMMARY = "a cube of devices: the batch, embed, and heads, MLP width and vocabulary are each split by one side"
TENSOR3D = Strategy("tensor3d", layout, check, cost, SUMMARY, sizes, 3)
