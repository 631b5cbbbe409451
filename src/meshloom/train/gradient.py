"""Loss and gradient of one step under any layout: the program that runs on every device at once.

Everything here sees local shards inside one `shard_map` over every mesh axis; the collectives are those of `core/compress.py` (weights into
the step and gradients out of it), of `core/leaf.py` (inside a layer) and of `ops/loss.py` (a split vocabulary), no others. The master weights are split at every
stage of ZeRO: gradients arrive as the `rest` table has them, and the optimizer, which works on whole arrays outside the `shard_map`, updates
each device's share alone.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from meshloom.core.batch import Batch
from meshloom.core.compress import SCATTERED, bits, scatter
from meshloom.core.layout import Layout
from meshloom.core.leaf import gathers, parts, sum_over
from meshloom.core.mesh import partitions
from meshloom.core.spec import Spec, is_spec, trained, with_frozen
from meshloom.core.tree import Tree
from meshloom.core.vary import vary, varying
from meshloom.objectives.lm import Bound, Objective, evaluate
from meshloom.parallel.pipe import table_of
from meshloom.plan.plan import Plan
from meshloom.runner import pipeline
from meshloom.runner.gather import gather_step
from meshloom.runner.place import from_stages
from meshloom.runner.stage import stage_of


def make_gradient(model: Any, c: Any, plan: Plan, objective: Objective) -> Callable:
    """(params, batch [micro, batch, seq], key, scale) -> gradients in the `rest` table, divided by the number of scored tokens; sums for the
    log over the whole batch; the global norm of the gradients.  scale: the loss scale, undone before anything is returned.
    What is frozen has no gradient: None in its place."""
    lay, share = plan.layout, make_local(model, c, plan, objective, plan.layout)

    def local(params: Tree, batch: Batch, key: Any, scale: jax.Array) -> tuple[Tree, dict, jax.Array]:
        grads, sums = share(params, batch, key, scale)
        return grads, sums, global_norm(grads)

    if lay.devices == 1:
        return local
    specs, rows, nothing = model.specs(c), batch_partition(plan), PartitionSpec()
    rest = partitions(lay, "rest", specs)
    return jax.shard_map(local, mesh=plan.mesh, in_specs=(rest, rows, nothing, nothing), out_specs=(trained(specs, rest), nothing, nothing))


def make_local(model: Any, c: Any, plan: Plan, objective: Objective, inside: Layout) -> Callable:
    """One device's part of `make_gradient`, before the norm: (local params, local batch, key, scale) -> gradients, sums for the log.
    inside: the layout that gradients are added up in: the plan's; without some axis of the batch, they stay apart along that axis."""
    bound, specs, tokens = Bound(model, c, inside, plan.how), model.specs(c), plan.layout.tokens
    stage, table = stage_of(model, c, inside, plan.how), table_of(inside, plan.micro)

    def share(params: Tree, batch: Batch, key: Any, scale: jax.Array) -> tuple[Tree, dict]:
        w, whole = gather_step(inside, specs, params, plan.dtype, stage and stage.place)
        scored = sum_over(jnp.sum(batch.weights), tokens)
        count = jnp.maximum(scored, 1)

        def loss(mine: Tree, rows: Batch) -> tuple[jax.Array, dict]:
            total, sums = evaluate(bound, objective, with_frozen(specs, mine, w), whole, rows, key)
            return total * (scale / count), sums

        if stage and table:
            grads, sums = pipeline.gradient(stage, table, partial(objective, bound), w, whole, batch, key, scale / count)
        else:
            grads, sums = accumulate(loss, trained(specs, w), batch, apart=bool(gathers(inside)))
        total = lambda s, g: None if s.frozen else reduce_leaf(inside, s, g) / scale
        grads = jax.tree.map(total, specs, grads, is_leaf=is_spec)
        grads = from_stages(inside, stage.place, specs, grads) if stage else grads
        return grads, {name: scored if name == "tokens" else over_devices(plan.layout, a) for name, a in sums.items()}

    return share


def over_devices(lay: Layout, a: jax.Array) -> jax.Array:
    """A sum over this device's tokens as that over all devices'; what is of all devices already is left alone."""
    return sum_over(a, tuple(axis for axis in lay.summed if axis in varying(a)))


def batch_partition(plan: Plan) -> Batch:
    """The PartitionSpecs of a step's batch [micro, batch, seq]; without segments where rows are not packed."""
    split, seq = plan.layout.batch or None, plan.layout.acts.get("whole_seq") or None
    rows = PartitionSpec(None, split, seq)
    return Batch(rows, rows, rows, rows if plan.packed else None, rows, PartitionSpec(None, split))


def batch_shardings(plan: Plan) -> Batch:
    """Where a step's batch lies."""
    return jax.tree.map(lambda p: NamedSharding(plan.mesh, p), batch_partition(plan), is_leaf=lambda x: isinstance(x, PartitionSpec))


def accumulate(loss: Callable, w: Tree, batch: Batch, apart: bool = False) -> tuple[Tree, dict]:
    """The gradient and the sums of every micro-batch, added up in fp32.  apart: a gradient is whole before it is added. XLA for TPUs (libtpu 0.0.42)
    otherwise tries to move the scatters of ZeRO-2 and 3 behind this loop, and ends with an internal error where they are bf16."""
    grad = jax.grad(loss, has_aux=True)
    # one barrier for each: what passes one together is taken to differ over the same mesh axes
    step = (lambda *given: jax.tree.map(lax.optimization_barrier, grad(*given))) if apart else grad
    first = jax.tree.map(lambda a: a[0], batch)
    if batch.tokens.shape[0] == 1:
        grads, sums = step(w, first)
        return jax.tree.map(lambda g: g.astype(jnp.float32), grads), sums

    def add(total: tuple[Tree, dict], rows: Batch) -> tuple[tuple[Tree, dict], None]:
        return jax.tree.map(lambda t, new: t + new.astype(jnp.float32), total, step(w, rows)), None

    shapes = jax.eval_shape(step, w, first)
    zeros = jax.tree.map(lambda s: vary(jnp.zeros(s.shape, jnp.float32), varying(s)), shapes)
    return lax.scan(add, zeros, batch)[0]


def reduce_leaf(lay: Layout, s: Spec, g: jax.Array) -> jax.Array:
    """A gradient's local sums, added over devices into the `rest` table: scattered where that table splits, all-reduced elsewhere."""
    if s.role == "settled":
        return jnp.zeros(g.shape, g.dtype)  # the same on all devices
    dim, axes = lay.gathered("rest", "grad", s.axes)
    g = scatter(g, axes, dim, bits(lay, SCATTERED, axes, s.axes))
    done = {*axes, *(a for name in s.axes for a in lay.grad.get(name, ()))}
    return sum_over(g, tuple(a for a in (*lay.tokens, *parts(lay, s.axes)) if a not in done))


def global_norm(grads: Tree, apart: tuple[str, ...] = ()) -> jax.Array:
    """The L2 norm over all gradients on all devices: one scalar all-reduce for each way that a gradient may be split.
    apart: mesh axes along which each device has gradients of its own, and its own norm."""
    groups: dict[frozenset[str], jax.Array] = {}
    for g in jax.tree.leaves(grads):
        axes = varying(g) - {*apart}
        groups[axes] = groups.get(axes, 0.0) + jnp.sum(jnp.square(g))
    return jnp.sqrt(sum(sum_over(total, tuple(sorted(axes))) for axes, total in groups.items()))
