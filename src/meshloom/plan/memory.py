"""Bytes on one device: what is stored between steps, by formula and as counted on real arrays; what a step adds, as an estimate."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from meshloom.core.layout import Layout
from meshloom.core.leaf import gathers
from meshloom.core.remat import words_of
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
    step, x = weights(x), x._replace(dtype=COMPUTES.get((x.layout.platform, x.dtype), x.dtype))
    acts = {"in flight": flight.bytes - flight.chunk, "activations": flight.chunk} if flight else {"activations": residuals(x)}
    found = {
        "batch": batch(x),
        "weights": step,
        "gradients": gradients(x),
        **acts,
        "layer": beside(x),
    }
    if x.flow and x.layers == x.parts:  # a part of one layer is no loop, which would stack its gradients beside the layer's own
        found["layer"] = max(0, found["layer"] - stacked(x))
    updated = 4 * sum(x.elements("rest", s) for s in x.leaves.values() if not s.frozen)
    found["loss"] = max(0, loss(x) - found["layer"])
    found["update"] = max(0, UPDATED.get(x.layout.platform, 1) * updated - sum(found.values()) + found["batch"])
    return {**found, "chip": ON_CHIP[x.layout.platform]} if x.layout.platform in ON_CHIP else found


COMPUTES = {("cpu", "bfloat16"): "float32", ("cpu", "float16"): "float32"}
"""(platform, type of the arithmetic) -> the type that a compiler computes in, and keeps, where it has none of the other."""
UPDATED = {"cpu": 2}
"""Copies of a device's fp32 gradients that the optimizer's update needs, by platform; 1 elsewhere."""
HEADS = {"cpu": (3, 3), "gpu": (2, 2), "tpu": (1, 4)}
"""Copies of the head's gradient, fp32, at a time in the loss, by platform; where the head is whole between micro-batches, and where it is gathered. Fitted
to three programs of a CPU, and to Llama 3 70B under zero3=512 on TPU v5p; of GPUs an estimate."""
ON_CHIP = {"tpu": 128 << 20}
"""Bytes of memory on the chip itself (VMEM), by platform, which a compiler counts with a program's temporaries: taken from a program of one v5e chip, of
whose temporaries they were what its arrays did not explain."""


def batch(x: Shapes) -> int:
    """Bytes of a step's tokens, targets, weights, positions, documents' numbers, and each row's number: 4 bytes each."""
    return 4 * x.micro * x.rows * ((5 if x.packed else 4) * x.seq + 1)


def weights(x: Shapes) -> int:
    """Bytes of the step's copy of the weights; with ZeRO-3 also one layer's, gathered."""
    lay, leaves = x.layout, x.leaves.values()
    copied = [s for s in leaves if (x.dtype != s.dtype and not s.exact) or moved(lay, "rest", "step", s) or (_inside(s) and lay.stages > 1)]
    # what lies outside the layers is done with before they run backward, but for the next micro-batch
    held = [s for s in copied if _inside(s) or x.micro > 1 or lay.stages > 1]
    return sum(x.elements("step", s) * x.width_of(s) for s in held) + passing(x)


def passing(x: Shapes) -> int:
    """Bytes of the weights that a pipeline's part gathers for its layers, and of their gradients before they are scattered: those of all its layers,
    which a compiler sees together."""
    if not x.flow:
        return 0
    moves = [s for table in ("step", "grad") for s in x.leaves.values() if _inside(s) and moved(x.layout, table, "live", s)]
    return sum(x.layer(s) * x.width_of(s) for s in moves) * (x.layers // x.parts)


def gradients(x: Shapes) -> int:
    """Bytes of gradients where the last layer's backward pass runs: of all layers and of the head, and the sum over micro-batches, fp32."""
    apart = x.micro == 1 or bool(gathers(x.layout))  # else it is added to the sum at once
    return stacked(x) + totals(x) + (head(x) if apart else 0)


def stacked(x: Shapes) -> int:
    """Bytes of one micro-batch's gradients of the layers."""
    return sum(x.elements("grad", s) * x.width_of(s) for s in x.leaves.values() if _inside(s) and not s.frozen)


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
    copies = HEADS.get(lay.platform, HEADS["gpu"])[bool(gathers(lay))]
    needs = -(-tokens // chunks) * rows * 4 + copies * rows * x.config.embed * 4 + 2 * tokens * x.config.embed * x.width
    return max(0, needs - (gradients(x) - totals(x)))


def residuals(x: Shapes) -> int:
    """Bytes of activations that all layers, or those of one part of a pipeline, keep on the device for the backward pass."""
    return sum(part.layers // part.parts * kept(part) for part in by_remat(x).values())


def beside(x: Shapes) -> int:
    """Bytes that the backward pass of a layer works with where most is held, beyond what all layers keep: of a pattern of remat, what layers behind this
    one kept is gone by then."""
    parts = {word: (kept(part), working_of(part)) for word, part in by_remat(x).items()}
    held, most = 0, 0
    for word in words_of(x.remat, x.layers // x.parts):
        held += parts[word][0]
        most = max(most, held + parts[word][1])
    return max(0, most - held)


def _inside(s: Spec) -> bool:
    return s.axes[0] == "layer"
