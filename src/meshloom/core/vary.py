"""Which mesh axes a value differs over inside `jax.shard_map`, and making two values agree about it."""

from collections.abc import Sequence

import jax
from jax import Array, lax


def varying(x: Array) -> frozenset[str]:
    """Mesh axes over which the value x may differ between devices; empty outside `jax.shard_map`."""
    kind = getattr(jax.typeof(x), "manual_axis_type", None)
    return frozenset(kind.varying) if kind is not None else frozenset()


def vary(x: Array, axes: Sequence[str] | frozenset[str]) -> Array:
    """x itself, marked as differing over `axes` too; on the way back its cotangent is summed over the axes that were missing.
    axes: mesh axis names, () for none.  Axes that x varies over already are left alone."""
    missing = tuple(sorted(set(axes) - varying(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def alike(*xs: Array) -> tuple[Array, ...]:
    """The arrays xs, each varying over every axis that any of them varies over.

    A `custom_vjp` needs this: the cotangent that it returns must vary over exactly the axes of its primal, so small parameters (a norm's
    gain) are marked before the call and their sum over devices happens in the transpose of that mark, once."""
    axes = frozenset().union(*(varying(x) for x in xs))
    return tuple(vary(x, axes) for x in xs)
