"""Reductions by name. Along a split axis each device reduces its part; sums are added up when they are needed, largest values at once."""

import math

import jax
import jax.numpy as jnp
from jax import lax

from meshloom.core.vary import vary, varying
from meshloom.named import move
from meshloom.named.elementwise import div, map, mul, sub
from meshloom.named.shape import relaid, whole
from meshloom.named.tensor import Tensor, has, named, scoped, words


def _asked(x, names: str | None, what: str) -> tuple[Tensor, tuple[str, ...], tuple[int, ...]]:
    """The tensor, the names to reduce (all for None), and where they stand."""
    t = named(x, what)
    group = t.names if names is None else words(names)
    return t, group, tuple(has(t, name, what) for name in group)


def sum(x, names: str | None = None) -> Tensor:
    """The sum over some axes, over all for None. Along a split axis it is a part of a sum until it is needed."""
    t, group, dims = _asked(x, names, "ml.sum")
    rest = tuple(n for n in t.names if n not in group)
    with scoped("sum", t, out=rest) as text:
        t = t.gathered_up()
        y = jnp.sum(jnp.asarray(t.part), axis=dims)
    return Tensor(rest, y, t.place, t.pending | (t.place.split(group) if t.place else frozenset()), owed=t.owed or text)


def mean(x, names: str | None = None) -> Tensor:
    """The mean over some axes, over all for None."""
    t, group, _ = _asked(x, names, "ml.mean")
    return mul(sum(t, names), 1 / math.prod(t.sizes[n] for n in group))


def max(x, names: str | None = None) -> Tensor:
    """The largest element along some axes, along all for None. Equal ones share the gradient evenly."""
    t, group, dims = _asked(x, names, "ml.max")
    rest = tuple(n for n in t.names if n not in group)
    with scoped("max", t, out=rest):
        part, axes = t.value(), t.place.split(group) if t.place else frozenset()
        y = move.top(vary(part, axes), dims, axes) if axes else jnp.max(part, axis=dims)
    return Tensor(rest, y, t.place)


def min(x, names: str | None = None) -> Tensor:
    """The smallest element along some axes, along all for None. Equal ones share the gradient evenly."""
    return mul(max(mul(x, -1), names), -1)


def any(x, names: str | None = None) -> Tensor:
    """Whether any element along some axes, all for None, is true."""
    return map(lambda a: a > 0, max(map(lambda a: (a != 0).astype(jnp.int32), x), names))


def all(x, names: str | None = None) -> Tensor:
    """Whether every element along some axes, all for None, is true."""
    return map(lambda a: a > 0, min(map(lambda a: (a != 0).astype(jnp.int32), x), names))


def _largest(x: Tensor, names: str | None) -> Tensor:
    """The largest elements without a gradient; zero where all are minus infinity."""
    t, group, dims = _asked(x, names, "ml.logsumexp")
    part = lax.stop_gradient(t.value())
    best = move.largest(jnp.max(part, axis=dims), t.place.split(group) if t.place else frozenset())
    return Tensor([n for n in t.names if n not in group], jnp.where(jnp.isfinite(best), best, 0), t.place)


def logsumexp(x, names: str | None = None) -> Tensor:
    """log(sum(exp(x))) over some axes, over all for None, without overflow. Along a split axis it moves the largest elements and the sums."""
    t, group, _ = _asked(x, names, "ml.logsumexp")
    with scoped("logsumexp", t, out=tuple(n for n in t.names if n not in group)):
        best = _largest(t, names)
        total = sum(map(jnp.exp, sub(t, best)), names)
        return map(lambda s, m: jnp.log(s) + m, total, best)


def softmax(x, names: str) -> Tensor:
    """exp(x) over its sum along some axes. Axes as in x."""
    t, _, _ = _asked(x, names, "ml.softmax")
    with scoped("softmax", t):
        exps = map(jnp.exp, sub(t, _largest(t, names)))
        return _as(div(exps, sum(exps, names)), t)


def log_softmax(x, names: str) -> Tensor:
    """The logarithm of `softmax`. Axes as in x."""
    t, _, _ = _asked(x, names, "ml.log_softmax")
    return _as(sub(t, logsumexp(t, names)), t)


def _as(y: Tensor, t: Tensor) -> Tensor:
    assert y.names == t.names
    return y


def argmax(x, name: str) -> Tensor:
    """Where the largest element along an axis stands, the first of equal ones."""
    t = named(x, "ml.argmax")
    at = has(t, name, "ml.argmax")
    rest = tuple(n for n in t.names if n != name)
    with scoped("argmax", t, out=rest):
        part = lax.stop_gradient(t.value())
        found = jnp.argmax(part, axis=at).astype(jnp.int32)
        if t.place is None or not t.place.axes(name):
            return Tensor(rest, found, t.place)
        axes = t.place.axes(name)
        mine, split = jnp.max(part, axis=at), frozenset(axes)
        best = vary(move.largest(mine, split), varying(mine))
        found = found + move.start(t.place.layout, axes, part.shape[at])
        found = jnp.where(mine == best, found, jnp.iinfo(jnp.int32).max)
        return Tensor(rest, move.smallest(found, split), t.place)


def top_k(x, name: str, k: int, to: str) -> tuple[Tensor, Tensor]:
    """The k largest elements along an axis, in falling order, and where they stand; of equal ones, the first. Their axis is called `to`.
    Along a split axis each device sends its k best.  Raises ValueError where the axis is shorter than k."""
    t = named(x, "ml.top_k")
    at = has(t, name, "ml.top_k")
    if not 1 <= k <= t.sizes[name]:
        raise ValueError(f"ml.top_k: '{name}' has {t.sizes[name]} elements, and k is {k}. Use 1 to {t.sizes[name]}.")
    rest = tuple(n for n in t.names if n != name)
    with scoped("top_k", t, out=(*rest, to)):
        part = jnp.moveaxis(t.value(), at, -1)
        values, where = lax.top_k(part, k if k < part.shape[-1] else part.shape[-1])
        where = where.astype(jnp.int32)
        if t.place is not None and t.place.axes(name):
            axes = t.place.axes(name)
            where = where + move.start(t.place.layout, axes, part.shape[-1])
            values, where = (move.gathered(a, [(a.ndim - 1, axes)], frozenset()) for a in (values, where))
            values, order = lax.top_k(values, k)
            where = jnp.take_along_axis(where, order, axis=-1)
        have = [t.place.axes(n) for n in rest] + [()] if t.place else None
        return tuple(
            relaid(Tensor((*rest, to), a, t.place), (*rest, to), have, a) if t.place else Tensor((*rest, to), a) for a in (values, where)
        )  # type: ignore[return-value]


def sort(x, name: str, descending: bool = False) -> Tensor:
    """The elements along an axis in rising (or falling) order. A split axis is gathered for it, and split again."""
    t = named(x, "ml.sort")
    at = has(t, name, "ml.sort")
    with scoped("sort", t):
        y = whole(t, name) if t.place else t
        part = jnp.sort(y.value(), axis=at, descending=descending)
        return relaid(Tensor(y.names, part, t.place), t.names)


def stop(x):
    """x as a constant: no gradient flows into it."""
    return map(jax.lax.stop_gradient, x)
