"""Products: `einsum` over names."""

import string

import jax
import jax.numpy as jnp

from meshloom.core.config import unknown
from meshloom.named.shape import whole
from meshloom.named.tensor import Tensor, check_sizes, named, over, placed, same_place, scoped, words


def einsum(*xs, out: str, precision=None) -> Tensor:
    """The product of tensors, summed over every name that is not in `out`: `ml.einsum(x, w, out="batch hidden")`.

    Each device multiplies its parts. Where a summed name is split, the result is a part of a sum over its mesh axes, added up when it is needed:
    two such results that are added share one all-reduce. Where the mesh axis of a summed name also splits a name that is kept, the summed one is
    gathered first.  Raises ValueError for a name in `out` that no tensor has, and for sizes that differ."""
    ts, kept = [named(x, "ml.einsum") for x in xs], words(out)
    sizes = check_sizes(ts, "ml.einsum")
    for name in kept:
        if name not in sizes:
            raise ValueError(f"ml.einsum(out='{out}'): {unknown('axis in its tensors,', name, sizes)}")
    place = same_place(ts)
    with scoped("einsum", *ts, out=kept) as text:
        ts = [placed(t, place).added_up() for t in ts]
        summed = [name for name in sizes if name not in kept]
        pending: frozenset[str] = frozenset()
        if place is not None:
            place.check(kept)
            held = place.split(kept)
            for name in summed:
                if held & set(place.axes(name)):
                    ts = [whole(t, name) if name in t.names else t for t in ts]
                else:
                    held, pending = held | set(place.axes(name)), pending | set(place.axes(name))
        letters = dict(zip(dict.fromkeys((*kept, *(name for t in ts for name in t.names))), string.ascii_letters))
        eq = ",".join("".join(letters[name] for name in t.names) for t in ts) + "->" + "".join(letters[name] for name in kept)
        marks = over(ts)
        arrays = [jnp.asarray(t.value(marks)) for t in ts]
        y = _einsum(eq, arrays, precision)
    return Tensor(kept, y, place, pending, owed=text)


def _einsum(eq: str, arrays: list[jax.Array], precision) -> jax.Array:
    """jnp.einsum in the type of its result."""
    return jnp.einsum(eq, *arrays, precision=precision)
