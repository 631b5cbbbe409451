"""Varying types: what a value inside `shard_map` may differ over."""

import jax
from jax import lax


def varying(x: jax.Array) -> frozenset[str]:
    """Mesh axes over which x may differ from device to device; empty outside `shard_map`."""
    return frozenset(getattr(jax.typeof(x), "vma", ()))


def vary(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """x, allowed to differ over these mesh axes. No work forward; the transpose sums the cotangent over the axes that were added."""
    missing = tuple(a for a in axes if a not in varying(x))
    return lax.pcast(x, missing, to="varying") if missing else x
