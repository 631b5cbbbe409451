"""Bytes on one device: what is stored between steps, by formula and as counted on real arrays; what a step adds, as an estimate."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from meshloom.core.layout import Layout
from meshloom.core.leaf import split_seq
from meshloom.core.remat import group_of, row_of
from meshloom.core.spec import is_spec
from meshloom.core.tree import Tree
from meshloom.models.base import Model
from meshloom.ops.loss import chunk_count
from meshloom.parallel.base import Shapes, moved
from meshloom.parallel.part import by_remat
from meshloom.plan.timeline import Flight


class Memory(NamedTuple):
    """Bytes of one device in a train step, by kind. kinds: what is stored between steps first, then what a step adds."""

    kinds: Mapping[str, int]

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self.kinds.values())


def device_memory(model: Model, x: Shapes, stored: Mapping[str, int], flight: Flight | None = None) -> Memory:
    """Bytes that one device needs in a train step.  stored: kind -> bytes that a device keeps between steps (parameters, optimizer, average).
    flight: what a pipeline has in flight.  Makes no array."""
    return Memory({**stored, **working(model, x, flight)})


def stored(layout: Layout, specs: Tree) -> int:
    """Bytes of a tree of arrays on one device between steps: each array's share under table `rest`, in its own type."""
    return sum(layout.shard_bytes("rest", s, jnp.dtype(s.dtype).itemsize) for s in jax.tree.leaves(specs, is_leaf=is_spec))


def counted(tree: Tree) -> int:
    """Bytes of a tree of arrays on the device that holds most of them, counted on the arrays' shards."""
    held: dict[Any, int] = {}
    for array in jax.tree.leaves(tree):
        for shard in array.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    return max(held.values(), default=0)


def kv_cache(c: Any, layout: Layout, rows: int, length: int, dtype: str) -> int:
    """Bytes of the keys and values of every layer on one device.  rows: sequences on one device.  length: slots of each."""
    heads = c.kv_heads // layout.size(layout.acts.get("kv_heads", ()))
    return 2 * c.layers * rows * length * heads * c.head * jnp.dtype(dtype).itemsize


def working(model: Model, x: Shapes, flight: Flight | None = None) -> dict[str, int]:
    """Bytes that a step holds beside what is stored, by kind. An estimate from shapes: a compiler reuses buffers and adds its own;
    `compiled.memory_analysis()` has the compiler's number.

    weights: the step's copy, and with ZeRO-3 one layer and what lies outside the layers. gradients: as accumulated, fp32, of what trains.
    activations: kept for the backward pass. loss: one chunk's logits and the head's gradient.  In a pipeline weights and gradients are those of a
    stage; flight: what it has in flight; then activations are those of one chunk's backward, or what all in flight keep.
    """
    lay, leaves = x.layout, x.leaves.values()
    staged = [s for s in leaves if s.axes[0] == "layer" and lay.stages > 1]
    copied = [s for s in leaves if (x.dtype != s.dtype and not s.exact) or moved(lay, "rest", "step", s) or s in staged]
    passing = [s for s in leaves if moved(lay, "step", "live", s)]
    weights = sum(x.elements("step", s) * x.width_of(s) for s in copied)
    weights += sum(x.elements("live", s) // (s.shape[0] if s.axes[0] == "layer" else 1) * x.width_of(s) for s in passing)
    gradients = sum(x.elements("grad", s) * 4 for s in leaves if not s.frozen)
    tokens = x.rows * x.seq
    rows = x.config.vocab_padded // lay.size(lay.acts.get("vocab", ()))
    chunks = min(chunk_count(tokens, rows, lay.platform), tokens)
    loss = 2 * math.ceil(tokens / chunks) * rows * 4 + rows * x.config.embed * 4
    acts = {"in flight": flight.bytes - flight.chunk, "activations": flight.chunk} if flight else {"activations": residuals(x)}
    return {"weights": weights, "gradients": gradients, **acts, "loss": loss}


def residuals(x: Shapes) -> int:
    """Bytes of activations that all layers, or those of one part of a pipeline, keep on the device for the backward pass."""
    return sum(part.layers // part.parts * kept(part) for part in by_remat(x).values())


def kept(x: Shapes) -> int:
    """Bytes of activations that one layer keeps on the device for its backward pass, by what `remat`, one word, keeps; a layer of a group its share.
    An estimate: its matrices' inputs and results."""
    c, lay = x.config, x.layout
    work = lay.size((*lay.acts.get("heads", ()), *lay.inner))
    enters = c.embed // lay.size(lay.stream if lay.square else lay.live.get("embed", ()))
    stream = c.embed // lay.size((*split_seq(lay), *lay.stream))
    heads = (c.heads * c.head) // work
    keys = c.kv_heads * c.head // lay.size((*lay.acts.get("kv_heads", ()), *lay.inner))
    wide = x.wide // work
    features = {
        "full": stream,
        "selective": 3 * stream + heads + 2 * keys + wide,
        # also both norms' inputs and results, attention's result and blocks, the activation's result
        "none": 4 * stream + 2 * enters + 3 * heads + 4 * keys + 2 * wide,
        "offload": stream,
    }
    return x.rows * x.seq * features[row_of(x.remat)] * x.width // group_of(x.remat)
