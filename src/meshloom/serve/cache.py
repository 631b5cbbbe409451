"""The cache of keys and values as Specs: made and split like parameters. `length` slots a row; a text lies in the same slots in every layer."""

from typing import Any

import jax
import jax.numpy as jnp

from meshloom.core.layout import Layout
from meshloom.core.spec import Spec, is_spec, spec, stack
from meshloom.models.base import KV, Slots

AXES = "work_batch length kv_heads head"


def layer_specs(c: Any, batch: int, length: int, dtype: str) -> KV:
    """One layer's cache. dtype: of the arithmetic."""
    one = spec({"work_batch": batch, "length": length, "kv_heads": c.kv_heads, "head": c.head}, AXES, dtype=dtype)
    return KV(one, one)


def specs(c: Any, batch: int, length: int, dtype: str) -> KV:
    """The whole model's cache, [layer, batch, length, kv_heads, head]: what it costs, and where it lies (the `acts` table)."""
    return stack(layer_specs(c, batch, length, dtype), c.layers)


def empty(c: Any, lay: Layout, batch: int, length: int, dtype: str) -> list[KV]:
    """This device's cache of every layer, a list as the unrolled loop takes it.  batch: rows in the whole."""

    def zeros(s: Spec) -> jax.Array:
        return jnp.zeros(lay.shard_shape("acts", s), s.dtype)

    return [jax.tree.map(zeros, layer_specs(c, batch, length, dtype), is_leaf=is_spec) for _ in range(c.layers)]


def fill(slots: Slots, segments: jax.Array, positions: jax.Array, start: jax.Array | int) -> Slots:
    """The slots with new tokens' segments and positions [batch, n] from slot `start` on."""

    def write(old: jax.Array, new: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), start, axis=1)

    return Slots(jnp.asarray(start), write(slots.segments, segments), write(slots.positions, positions))
