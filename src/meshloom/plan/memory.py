"""Bytes on one device: what is stored between steps, by formula and as counted on real arrays; what a step adds, as an estimate."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from meshloom.core.layout import Layout
from meshloom.core.leaf import gathers
from meshloom.core.spec import Spec, is_spec
from meshloom.core.tree import Tree
from meshloom.models.base import Model
from meshloom.ops.loss import chunk_count
from meshloom.parallel.base import Shapes, moved
from meshloom.parallel.part import by_remat
from meshloom.plan.layer import kept, working_of
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
    """Bytes that a step holds beside what is stored, by kind, where it holds most.

    batch: a step's tokens. weights: the step's copy, and with ZeRO-3 one layer and what lies outside the layers. gradients: those of one micro-batch
    and, of several, their sum, fp32. activations: kept for the backward pass. layer: what the backward pass of one layer works with. loss: what the
    head and one chunk's logits need beyond that. update: what the optimizer needs beyond all of these, its gradients in fp32.
    chip: what the compiler keeps on the chip itself.
    In a pipeline weights and gradients are those of a stage; flight: what it has in flight; then activations are those of one chunk's backward, or what
    all in flight keep."""
    acts = {"in flight": flight.bytes - flight.chunk, "activations": flight.chunk} if flight else {"activations": residuals(x)}
    found = {
        "batch": batch(x),
        "weights": weights(x),
        "gradients": gradients(x),
        **acts,
        "layer": max(map(working_of, by_remat(x).values())),
    }
    updated = 4 * sum(x.elements("rest", s) for s in x.leaves.values() if not s.frozen)
    found["loss"] = max(0, loss(x) - found["layer"])
    found["update"] = max(0, 2 * updated - sum(found.values()) + found["batch"])
    return {**found, "chip": ON_CHIP[x.layout.platform]} if x.layout.platform in ON_CHIP else found


ON_CHIP = {"tpu": 128 << 20}
"""Bytes on the chip itself that a compiler counts with a program's temporaries, by platform. Found as what is left of programs of one layer at a time
whose arrays are told apart (v5e, v5p: libtpu 0.0.42)."""


def batch(x: Shapes) -> int:
    """Bytes of a step's tokens, targets, weights, positions, documents' numbers, and each row's number: 4 bytes each."""
    return 4 * x.micro * x.rows * ((5 if x.packed else 4) * x.seq + 1)


def weights(x: Shapes) -> int:
    """Bytes of the step's copy of the weights; with ZeRO-3 also one layer's, gathered."""
    lay, leaves = x.layout, x.leaves.values()
    copied = [s for s in leaves if (x.dtype != s.dtype and not s.exact) or moved(lay, "rest", "step", s) or (_inside(s) and lay.stages > 1)]
    # what lies outside the layers is done with before they run backward, but for the next micro-batch
    once = x.micro == 1 and lay.stages == 1
    freed = [s for s in copied if once and not _inside(s)]
    return sum(x.elements("step", s) * x.width_of(s) for s in copied) - sum(x.elements("step", s) * x.width_of(s) for s in freed)


def gradients(x: Shapes) -> int:
    """Bytes of gradients where the last layer's backward pass runs: of all layers and of the head, and the sum over micro-batches, fp32."""
    one = sum(x.elements("grad", s) * x.width_of(s) for s in x.leaves.values() if _inside(s) and not s.frozen)
    twice = x.micro == 1 or bool(gathers(x.layout))
    return one + totals(x) + head(x) * (2 if twice else 1)


def totals(x: Shapes) -> int:
    """Bytes of the sum of gradients over micro-batches; 0 for one."""
    return 4 * sum(x.elements("grad", s) for s in x.leaves.values() if not s.frozen) if x.micro > 1 else 0


def head(x: Shapes) -> int:
    """Bytes of the head, or of the table that is one, whole as the loss needs it."""
    s = [s for s in x.leaves.values() if "vocab" in s.axes][-1]
    return x.elements("live", s) * x.width_of(s)


def loss(x: Shapes) -> int:
    """Bytes of one chunk's logits and their gradient, and of the head's gradient, beyond those of the gradients that do not exist before it."""
    lay = x.layout
    tokens = x.rows * x.seq // lay.size(lay.inner)
    rows = x.config.vocab_padded // lay.size(lay.acts.get("vocab", ()))
    chunks = min(chunk_count(tokens, rows, lay.platform), tokens)
    needs = 3 * -(-tokens // chunks) * rows * 4 + 2 * rows * x.config.embed * 4
    return max(0, needs - (gradients(x) - totals(x)))


def residuals(x: Shapes) -> int:
    """Bytes of activations that all layers, or those of one part of a pipeline, keep on the device for the backward pass."""
    return sum(part.layers // part.parts * kept(part) for part in by_remat(x).values())


def _inside(s: Spec) -> bool:
    return s.axes[0] == "layer"
