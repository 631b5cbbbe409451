"""The only functions that move anything between devices inside a layer: `dot`, `put`, and `live`.

A step is one `shard_map` over every mesh axis: a layer sees local shards, and each collective is written here, once, from the axis names. The
compiler's partitioner is given nothing to decide, so that a strategy's `cost` can be exact to the byte, and a layout cannot be wasteful in
silence. On one device the tables are empty and nothing remains but the local arithmetic.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshloom.core.compress import GATHERED, SCATTERED, Blocks, bits, gather, gather_blocks, scatter
from meshloom.core.layout import INSIDE, Layout
from meshloom.core.matmul import contract
from meshloom.core.spec import AXES
from meshloom.core.summa import Square, streamed
from meshloom.core.vary import vary


def dot(lay: Layout, eq: str, x: jax.Array, w) -> jax.Array:
    """The product of activations and a weight, e.g. "bTd,dhk->BThk". x, w: local shards. Returns the local shard of the result.

    Rows that x has split and the result has not (`B` to `b`) are gathered first. Where the contraction runs over a split axis, the partial
    results are summed (`add_up`). w: an array, or any leaf with `.dot(eq, x)` (an adapter, int8).
    """
    operands, out = eq.split("->")
    first, second = operands.split(",")
    if lay.square and "d" in second:
        return _streamed(lay, first, second, x, (w,))[0]
    if "B" in first and "b" in out and lay.inner:
        x = lax.all_gather(x, lay.inner, axis=first.index("B"), tiled=True)
    local = eq.replace("T", "t").replace("B", "b")
    y = contract(local, x, w)
    summed = tuple(a for letter in first if letter in second and letter not in out for a in lay.live.get(AXES[letter], ()))
    return add_up(lay, y, first, out, summed) if summed else y


def dots(lay: Layout, x: jax.Array, *products: tuple[str, Any]) -> Iterator[jax.Array]:
    """`dot` of one x with several weights, each (eq, w), one result after another; where products are streamed, x moves once for all of them.
    The first w may be a leaf with `.dots(equations, x)` that holds all of them, on one device (serve/forms.py)."""
    if hasattr(products[0][1], "dots"):
        yield from products[0][1].dots(tuple(eq for eq, _ in products), x)
        return
    if not lay.square:
        yield from (dot(lay, eq, x, w) for eq, w in products)
        return
    first, second = products[0][0].split("->")[0].split(",")
    yield from _streamed(lay, first, second, x, tuple(w for _, w in products))


def _streamed(lay: Layout, first: str, second: str, x: jax.Array, weights: tuple) -> list[jax.Array]:
    """Products with weights of which each device of a square holds a block, as one with their columns side by side (`core.summa`).
    second: letters of the first of them."""
    assert lay.square is not None
    n = len([letter for letter in second if letter in first])
    rows, inner = x.shape[: x.ndim - n], math.prod(x.shape[x.ndim - n :])
    y = streamed(Square(*lay.square), x.reshape(-1, inner), tuple(w.reshape(inner, -1) for w in weights), second[0] == "d")
    ends = list(itertools.accumulate(math.prod(w.shape[n:]) for w in weights))
    return [part.reshape(*rows, *w.shape[n:]) for part, w in zip(jnp.split(y, ends[:-1], 1), weights)]


def add_up(lay: Layout, y: jax.Array, before: str, out: str, summed: tuple[str, ...]) -> jax.Array:
    """Partial results summed over mesh axes.  before, out: letters of what they were made from, and of the result.

    By reduce-scatter over the mesh axes that split the result's tokens and did not split those before (`t` from `T`: Megatron's sequence
    parallelism; `B` from `b`: 3D), or the result's `d` (2D); by all-reduce over the others.
    """
    places = (("t", split_seq(lay) if "T" in before else ()), ("B", lay.inner if "b" in before else ()), ("d", split_embed(lay)))
    for letter, splits in places:
        scatter = tuple(a for a in splits if a in summed and letter in out)
        if scatter:
            y = lax.psum_scatter(y, scatter, scatter_dimension=out.index(letter), tiled=True)
            summed = tuple(a for a in summed if a not in scatter)
    return sum_over(y, summed)


def sum_over(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """x summed over mesh axes, x itself for none."""
    return lax.psum(x, axes) if axes else x


def split_seq(lay: Layout) -> tuple[str, ...]:
    """Mesh axes that split the residual stream's sequence but not a layer's inside."""
    inside = lay.acts.get("whole_seq", ())
    return tuple(a for a in lay.acts.get("seq", ()) if a not in inside)


def split_embed(lay: Layout) -> tuple[str, ...]:
    """Mesh axes that split the residual stream's embed but not the live weights': what enters a layer is gathered over them (2D)."""
    inside = lay.live.get("embed", ())
    return tuple(a for a in lay.stream if a not in inside)


def put(lay: Layout, eq: str, x: jax.Array) -> jax.Array:
    """x moved between names.

    "btd->bTd" enters a layer's work region: all-gather of the sequence, and of embed, where the residual stream alone has it split, else
    Megatron's identity whose transpose is an all-reduce. "btd->BTD" enters the head: embed becomes whole, by all-to-all with the rows where the
    live weights split it. "bT->bt", "bT->BT" keep this device's part of what is whole.
    """
    before, after = eq.split("->")
    if "t" in before and "T" in after:
        for letter, axes in (("t", split_seq(lay)), ("d", () if lay.square and "D" not in after else split_embed(lay))):
            x = lax.all_gather(x, axes, axis=before.index(letter), tiled=True) if axes and letter in before else x
        if "B" in after and lay.inner:
            x = lax.all_to_all(x, lay.inner, split_axis=before.index("b"), concat_axis=before.index("d"), tiled=True)
        return vary(x, lay.work)
    x = _part(lay, x, before.index("T"), split_seq(lay)) if "T" in before and "t" in after else x
    return _part(lay, x, before.index("b"), lay.inner) if "b" in before and "B" in after else x


def _part(lay: Layout, x: jax.Array, dim: int, axes: tuple[str, ...]) -> jax.Array:
    """This device's part of an axis that is whole on the devices of these mesh axes; x itself for none."""
    if not axes:
        return x
    size = x.shape[dim] // lay.size(axes)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * size, size, dim)


def whole_rows(lay: Layout, x: jax.Array | None) -> jax.Array | None:
    """Small facts of each token [batch, whole_seq], such as its document's number, of all tokens of the row, in the devices' order; None where
    nothing is split, or there is nothing."""
    axes = lay.acts.get("whole_seq", ())
    return lax.all_gather(x, axes, axis=1, tiled=True) if axes and x is not None else None


def live(lay: Layout, axes: tuple[str, ...], w: jax.Array, whole: jax.Array | Blocks | None, when: jax.Array) -> jax.Array:
    """A layer's weight as its layer needs it. w: as differentiated (the `grad` table). whole: the step's copy where it holds more than that
    (ZeRO-2) or holds it in blocks, else None. when: any value of this micro-batch; a compiler may not gather before it is known, and so not once for
    all micro-batches, which would keep every layer's weights. The gradient is reduce-scattered over the mesh axes that split w and not the result,
    as if nothing had been rounded. What meets the residual stream element by element (a norm's gain, a bias) is cut to this device's part of a
    split embed."""
    w = _whole(lay, axes, w, whole, when) if lay.gathered("grad", "live", axes)[1] else w
    return _part(lay, w, axes.index("embed"), split_embed(lay)) if beside_stream(axes) else w


def _whole(lay: Layout, axes: tuple[str, ...], w: jax.Array, whole: jax.Array | Blocks | None, when: jax.Array) -> jax.Array:
    """The part of `live` that gathers."""
    dim, split = lay.gathered("grad", "live", axes)
    _, gathered = lay.gathered("step", "live", axes)
    width = bits(lay, SCATTERED, split, axes)
    have = (lax.stop_gradient(w) if width else w) if whole is None else whole
    if gathered:
        have = jax.tree.map(lambda a: _after(a, when), have)
    if isinstance(have, Blocks):
        less = lay.size(lay.gathered("grad", "step", axes)[1])
        shape = (*w.shape[:dim], w.shape[dim] * less, *w.shape[dim + 1 :])
        full = gather_blocks(have, shape, gathered, dim, bits(lay, GATHERED, gathered, axes), w.dtype)
    else:
        full = gather(have, gathered, dim)
    return full if whole is None and not width else _already_whole(split, dim, width, w, full)


def whole_embed(lay: Layout, w: jax.Array) -> jax.Array:
    """The head's weight [vocab, embed], live, with its whole embed: what `put` "btd->BTD" multiplies."""
    axes = lay.live.get("embed", ())
    return lax.all_gather(w, axes, axis=1, tiled=True) if axes else w


def beside_stream(axes: tuple[str, ...]) -> bool:
    """Whether a parameter with these axes meets the residual stream element by element: norms, biases behind the matrices, learned positions."""
    return "embed" in axes and {"layer", "position", "embed"} >= set(axes)


def parts(lay: Layout, axes: tuple[str, ...]) -> tuple[str, ...]:
    """Mesh axes beside the batch's over which a parameter with these axes is whole but works on a part, so that its gradient is a part of a
    sum: in the work region (key/value heads that could not be split, q/k norms), and outside it where the sequence or embed is split (norms,
    biases). Such gradients are added up once a step, with the batch's, however many layers and micro-batches made them."""
    split = {a for name in axes for a in lay.live.get(name, ())}
    where = lay.work if INSIDE & set(axes) else (*split_seq(lay), *split_embed(lay))
    return tuple(a for a in where if a not in split)


def gathers(lay: Layout) -> frozenset[str]:
    """Mesh axes over which weights are gathered for the time that their layer runs, or their gradients scattered after it (ZeRO-2 and 3)."""
    return frozenset(a for name, axes in lay.grad.items() for a in axes if a not in lay.live.get(name, ()))


@jax.custom_vjp
def _after(w: jax.Array, when: jax.Array) -> jax.Array:
    """w, not before `when` is known."""
    return lax.optimization_barrier((w, when))[0]


_after.defvjp(lambda w, when: (_after(w, when), None), lambda _, g: (g, None))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _already_whole(axes: tuple[str, ...], dim: int, width: int, shard: jax.Array, whole: jax.Array) -> jax.Array:
    """`whole`, with the gradient of having gathered it from `shard`.  width: bits of a number of the gradient on its way, 0 for all."""
    return whole


def _already_whole_fwd(axes, dim, width, shard, whole):
    return whole, None


def _already_whole_bwd(axes, dim, width, _, g):
    return scatter(g, axes, dim, width), g * 0


_already_whole.defvjp(_already_whole_fwd, _already_whole_bwd)
