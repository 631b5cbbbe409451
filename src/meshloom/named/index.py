"""Reading by number: take, one_hot, range. A split axis is never gathered: each device looks in its part, and the parts are added."""

import jax
import jax.numpy as jnp
import numpy as np

from meshloom.core.vary import vary, varying
from meshloom.named import move
from meshloom.named.shape import HIDDEN, whole
from meshloom.named.tensor import Tensor, check_sizes, has, named, over, placed, same_place, scoped, spec


def range(name: str, size: int, dtype: str = "int32") -> Tensor:
    """0, 1, ... size - 1 along a new axis."""
    return Tensor((name,), jnp.arange(size, dtype=dtype))


def zeros(names: str, dtype: str = "float32", **sizes: int) -> Tensor:
    """Zeros: `ml.zeros("batch hidden", batch=4, hidden=8)`."""
    return full(names, 0, dtype, **sizes)


def full(names: str, value: float, dtype: str = "float32", **sizes: int) -> Tensor:
    """One value everywhere: `ml.full("batch", -1.0, batch=4)`."""
    s = spec(names, **sizes)
    return Tensor(s.axes, jnp.full(s.shape, value, dtype))


def one_hot(indices, name: str, size: int, dtype: str = "float32") -> Tensor:
    """A new axis that is 1 where its number is the index and 0 elsewhere, all 0 for an index outside. Moves nothing."""
    t = named(indices, "ml.one_hot")
    with scoped("one_hot", t):
        numbers = placed(range(name, size), t.place)
        names = (*t.names, name)
        if t.place is not None:
            t.place.check(names)
        marks = varying(t.added_up().part) | varying(numbers.part)
        hot = jnp.expand_dims(t.value(marks), -1) == numbers.value(marks)
        return Tensor(names, hot.astype(dtype), t.place)


def take(table, indices, name: str) -> Tensor:
    """The entries of a table along one of its axes: `ml.take(table, tokens, "vocab")` has the axes of the indices, then those of the table without
    `name`; an axis that both have is matched (each batch row its own table). An index outside gives zeros.
    A split `name` gives parts of a sum, as in `ml.einsum` with `ml.one_hot`.  Raises ValueError where the indices have the axis too."""
    t, i = named(table, "ml.take"), named(indices, "ml.take")
    has(t, name, "ml.take")
    if name in i.names:
        raise ValueError(
            f"ml.take: the indices have the axis '{name}' themselves. Rename it there: what they choose is along '{name}' of the table."
        )
    if not jnp.issubdtype(i.dtype, jnp.integer):
        raise ValueError(f"ml.take: indices are whole numbers; these are {i.dtype}. Use ml.astype(x, 'int32').")
    check_sizes([t, i], "ml.take")
    place = same_place([t, i])
    rest = tuple(n for n in t.names if n != name and n not in i.names)
    out = (*i.names, *rest)
    with scoped("take", t, i, out=out) as text:
        t, i = placed(t, place), placed(i, place)
        axes = place.axes(name) if place else ()
        if place is not None:
            place.check(out)
            if set(axes) & place.split(out):  # parts of a sum cannot be split over its own mesh axes
                t, name, axes = whole(t, name), name + HIDDEN, ()
        t, i = t.added_up(), i.added_up()
        marks = over([t, i])
        rows, numbers = t.value(marks), i.value(marks)
        both = [n for n in i.names if n in t.names]
        rows = jnp.transpose(rows, [t.names.index(n) for n in (*both, name, *rest)])
        numbers = jnp.transpose(numbers, [i.names.index(n) for n in (*both, *(n for n in i.names if n not in both))])
        n = rows.shape[len(both)]
        local = numbers - move.start(place.layout, axes, n) if axes else numbers  # type: ignore[union-attr]
        lookup = _rows
        for _ in both:
            lookup = jax.vmap(lookup)
        y = lookup(rows, local)
        order = (*both, *(n for n in i.names if n not in both), *rest)
        y = jnp.transpose(y, [order.index(n) for n in out])
        return Tensor(out, y, place, frozenset(axes), owed=text)


def _rows(table: jax.Array, numbers: jax.Array) -> jax.Array:
    """table[numbers] along the first axis, zeros for numbers outside."""
    inside = (numbers >= 0) & (numbers < table.shape[0])
    rows = jnp.take(table, jnp.where(inside, numbers, 0), axis=0, mode="clip")
    inside = vary(inside, varying(rows))
    return jnp.where(jnp.expand_dims(inside, _axes(numbers.ndim, rows.ndim)), rows, jnp.zeros((), rows.dtype))


def _axes(first: int, last: int) -> list[int]:
    """first, ... last - 1."""
    return np.arange(first, last).tolist()
