"""A loop over an axis: the same layer for each of a stack, compiled once."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from meshloom.named.shape import HIDDEN, relaid, whole
from meshloom.named.tensor import Tensor, has, is_tensor, placed


def scan(fn: Callable, carry: Any, xs: Any, name: str) -> tuple[Any, Any]:
    """Like `jax.lax.scan` along a named axis: `x, kept = ml.scan(block, x, layers, "layer")`, where block(x, one layer) -> (x, kept).

    xs: a tree of tensors that all have the axis; fn sees them without it, and what it keeps of each round has it first. A split axis is gathered.
    `ml.explain` multiplies out what a round moves.  Raises ValueError where a tensor lacks the axis, or a round changes the carry's names."""
    stacked, tree = jax.tree.flatten(xs, is_leaf=is_tensor)
    places = [t.place for t in (*stacked, *jax.tree.leaves(carry, is_leaf=is_tensor)) if is_tensor(t) and t.place is not None]
    place = places[0] if places else None
    parts, names = [], []
    for t in stacked:
        at = has(t, name, "ml.scan")
        t = placed(t, place)
        t = whole(t, name) if place is not None and place.axes(name) else t
        parts.append(jnp.moveaxis(t.value(), at, 0))
        names.append(tuple(n for i, n in enumerate(t.names) if i != at))
    first, carried = jax.tree.flatten(carry, is_leaf=is_tensor)
    order = [t.names if is_tensor(t) else None for t in first]
    kept: list = []

    def settled(t: Any, want: tuple[str, ...] | None) -> Any:
        """A carried value's array in the order of its names at the start, varying over all mesh axes that split it."""
        if not is_tensor(t) or want is None:
            return t
        if set(t.names) != set(want):
            raise ValueError(
                f"ml.scan: the carry has axes ({' '.join(want)}) before a round and ({' '.join(t.names)}) after it. Keep its names."
            )
        t = placed(t, place)
        return jnp.transpose(jnp.asarray(t.value(t.split)), [t.names.index(n) for n in want])

    def round(arrays: list, part: list) -> tuple[list, list]:
        now = carried.unflatten([a if n is None else Tensor(n, a, place) for a, n in zip(arrays, order)])
        now, out = fn(now, tree.unflatten([Tensor(n, a, place) for a, n in zip(part, names)]))
        out, shape = jax.tree.flatten(out, is_leaf=is_tensor)
        kept[:] = [shape, [t.names if is_tensor(t) else None for t in out]]
        now = carried.flatten_up_to(now)
        return [settled(t, n) for t, n in zip(now, order)], [placed(t, place).value() if is_tensor(t) else t for t in out]

    arrays, outs = jax.lax.scan(round, [settled(t, n) for t, n in zip(first, order)], parts)
    last = carried.unflatten([a if n is None else Tensor(n, a, place) for a, n in zip(arrays, order)])
    shape, kinds = kept
    return last, shape.unflatten([a if n is None else _stacked(a, (name, *n), place) for a, n in zip(outs, kinds)])


def _stacked(a: jax.Array, names: tuple[str, ...], place: Any) -> Tensor:
    """What the rounds kept, with the axis of the loop, whole on each device, first; split where the rules split it."""
    if place is None or not place.axes(names[0]):
        return Tensor(names, a, place)
    return relaid(Tensor((names[0] + HIDDEN, *names[1:]), a, place), names)
