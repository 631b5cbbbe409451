"""The only file of this folder in which anything moves between devices: what stands here is decided by comparing layouts, never by a compiler.

All functions see one device's part. A value that all devices of a mesh axis share is known as such to JAX (it does not vary over the axis), so
the gradient of each move is the right one: that of a sum is free, that of a gather is a scatter.
"""

import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax

from meshloom.core.layout import Layout
from meshloom.core.vary import vary, varying

Axes = tuple[str, ...]
Split = Sequence[Axes]


def add_up(x: Array, axes: frozenset[str]) -> Array:
    """Partial sums added over mesh axes: an all-reduce."""
    return lax.psum(vary(x, axes), tuple(sorted(axes))) if axes else x


def gathered(x: Array, gathers: Sequence[tuple[int, Axes]], over: frozenset[str]) -> Array:
    """x with the axes of `gathers` made whole. over: mesh axes over which what it meets varies: there, each device's gradient differs, and the
    gradient of the gather is a reduce-scatter; elsewhere all devices have the same gradient, and each takes its own part for nothing."""
    for dim, axes in gathers:
        to = "varying" if set(axes) <= over else "invarying"
        x = lax.all_gather(x, axes, axis=dim, tiled=True, to=to)
    return x


def own(lay: Layout, x: Array, dim: int, axes: Axes) -> Array:
    """This device's part of x along an axis that was whole. Moves nothing."""
    if not axes:
        return x
    part = x.shape[dim] // lay.size(axes)
    return lax.dynamic_slice_in_dim(vary(x, axes), lax.axis_index(axes) * part, part, dim)


def start(lay: Layout, axes: Axes, part: int) -> Array | int:
    """Where this device's part of a split axis begins. part: its size."""
    return lax.axis_index(axes) * part if axes else 0


def relayout(
    lay: Layout, x: Array, have: Split, want: Split, pending: frozenset[str]
) -> tuple[Array, tuple[tuple[int, Axes], ...], frozenset[str]]:
    """x from one way of being split to another. have, want: the mesh axes of each axis of x. pending: mesh axes over which x is a part of a sum.

    | a mesh axis | moves |
    |---|---|
    | leaves one axis of x and comes to another | all-to-all |
    | over which x is part of a sum comes to an axis | reduce-scatter |
    | comes to an axis | nothing: each device keeps its part |
    | leaves an axis | all-gather |

    Returns x, the gathers left to do (`gathered` does them, once it is known what x meets), and the mesh axes still pending."""
    same = [_common(h, w) for h, w in zip(have, want)]
    drop, add = [h[n:] for h, n in zip(have, same)], [w[n:] for w, n in zip(want, same)]
    for i in range(len(drop)):
        j = next((j for j in range(len(add)) if drop[i] and add[j] == drop[i] and not drop[j] and not add[i]), None)
        if j is not None:
            x = lax.all_to_all(x, drop[i], split_axis=j, concat_axis=i, tiled=True)
            drop[i] = add[j] = ()
    for dim in range(len(add)):
        if add[dim] and not drop[dim] and set(add[dim]) <= pending:
            x = lax.psum_scatter(vary(x, add[dim]), add[dim], scatter_dimension=dim, tiled=True)
            pending, add[dim] = pending - set(add[dim]), ()
    if late := pending & {a for axes in add for a in axes}:
        x, pending = add_up(x, late), pending - late
    # an axis that gives up some mesh axes for others is made whole first; mesh axes that it takes must not be held by another axis
    for dim in sorted(range(len(add)), key=lambda d: not drop[d]):
        if add[dim] and (drop[dim] or any(set(add[dim]) & set(d) for d in drop)):
            for other, axes in enumerate(drop):
                if axes and (other == dim or set(axes) & set(add[dim])):
                    x, drop[other] = lax.all_gather(x, axes, axis=other, tiled=True, to="invarying"), ()
        x = own(lay, x, dim, add[dim])
    return x, tuple((dim, axes) for dim, axes in enumerate(drop) if axes), pending


def _common(a: Axes, b: Axes) -> int:
    """How many of the first entries are the same."""
    return next((n for n, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def largest(x: Array, axes: frozenset[str]) -> Array:
    """The largest of all devices' values, element by element. Has no gradient."""
    return lax.pmax(vary(lax.stop_gradient(x), axes), tuple(sorted(axes))) if axes else lax.stop_gradient(x)


def smallest(x: Array, axes: frozenset[str]) -> Array:
    """The smallest of all devices' values, element by element. Has no gradient."""
    return lax.pmin(vary(lax.stop_gradient(x), axes), tuple(sorted(axes))) if axes else lax.stop_gradient(x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def top(x: Array, dims: tuple[int, ...], axes: frozenset[str]) -> Array:
    """The largest value along some axes of x, over all devices of mesh axes. Equal largest values share the gradient evenly, as in `jnp.max`."""
    return largest(jnp.max(x, axis=dims), axes)


def _top_forward(x, dims, axes):
    best = top(x, dims, axes)
    mine = x == jnp.expand_dims(vary(best, varying(x)), dims)
    return best, (mine, add_up(jnp.sum(mine, axis=dims).astype(x.dtype), axes))


def _top_backward(dims, axes, kept, g):
    mine, ties = kept
    share = vary(g / ties, varying(mine))
    return (jnp.where(mine, jnp.expand_dims(share, dims), 0).astype(g.dtype),)


top.defvjp(_top_forward, _top_backward)


def before(lay: Layout, x: Array, axes: Axes) -> Array:
    """The sum of x on the devices before this one along mesh axes. Moves every device's x to every other."""
    every = lax.all_gather(x, axes, axis=0, to="varying")
    first = jnp.arange(lay.size(axes)).reshape(-1, *[1] * x.ndim) < lax.axis_index(axes)
    return jnp.sum(jnp.where(first, every, 0), axis=0).astype(x.dtype)


def shifted(lay: Layout, x: Array, dim: int, axes: Axes, steps: int, wrap: bool) -> Array:
    """The split axis `dim` moved on by `steps` (back for a negative number): each device sends its last elements to the next one. What comes in
    is zero, or with `wrap` what left at the other end. Two collective-permutes at most; only what crosses a border moves."""
    n, part = lay.size(axes), x.shape[dim]
    far, near = divmod(steps, part)
    head, tail = lax.slice_in_dim(x, 0, part - near, axis=dim), lax.slice_in_dim(x, part - near, part, axis=dim)
    pieces = [_sent(lay, x, n, axes, devices, wrap) for x, devices in ((tail, far + 1), (head, far)) if x.shape[dim]]
    return jnp.concatenate(pieces, axis=dim)


def _sent(lay: Layout, x: Array, n: int, axes: Axes, devices: int, wrap: bool) -> Array:
    """x of the device so many before this one; zero where there is none, unless they stand in a ring."""
    if devices == 0 or (wrap and devices % n == 0):
        return x
    order = _in_mesh_order(lay, axes)
    pairs = [(order[i], order[(i + devices) % n]) for i in range(n) if wrap or 0 <= i + devices < n]
    return lax.ppermute(x, axes, pairs) if pairs else jnp.zeros_like(x)


def _in_mesh_order(lay: Layout, axes: Axes) -> list[int]:
    """The number of each device along `axes`, whose first is the outermost, when they are counted in the order of the mesh, as JAX does here."""
    places = itertools.product(*(range(lay.sizes[a]) for a in axes))
    mesh = [a for a in lay.sizes if a in axes]
    return [functools.reduce(lambda at, a: at * lay.sizes[a] + place[axes.index(a)], mesh, 0) for place in places]
