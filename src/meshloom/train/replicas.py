"""What each data replica keeps for itself: gradients, parameters and state along a leading axis `replica`, split over mesh axis `data`.

A replica is all devices with the same place along `data`; whatever else splits the model (ZeRO, tensor, sequence ...) works inside it as
always. Between replicas nothing moves here but the sums for the log and one number that says whether the step counts.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from meshloom.core.batch import Batch
from meshloom.core.layout import Layout
from meshloom.core.leaf import sum_over
from meshloom.core.mesh import partitions
from meshloom.core.spec import AXES, Spec, is_spec
from meshloom.core.tree import Tree
from meshloom.core.vary import vary
from meshloom.objectives.lm import Objective
from meshloom.parallel.base import Collective, Shapes, ordered
from meshloom.plan.cost import step_cost
from meshloom.plan.plan import Plan
from meshloom.train.gradient import batch_partition, global_norm, make_local

AXIS = "data"
"""The mesh axis that tells replicas apart."""


def axes(lay: Layout) -> tuple[str, ...]:
    """The mesh axis between replicas; none where there is one replica."""
    return (AXIS,) if lay.sizes.get(AXIS, 1) > 1 else ()


def count(lay: Layout) -> int:
    """Data replicas."""
    return lay.size(axes(lay))


def inside(lay: Layout) -> Layout:
    """The layout of one replica: as the whole, but no sum over the batch runs between replicas."""
    batch = tuple(a for a in lay.batch if a not in axes(lay))
    return replace(lay, acts={**lay.acts, "batch": batch})


def cut(name: str) -> str:
    """The axis `name` of an array that the replicas share out among them, each keeping one part of what it would hold otherwise."""
    return f"{name}/{AXIS}"


def placing(lay: Layout) -> Layout:
    """The layout with two kinds of further names in table `rest`: `replica`, and `cut(name)` of every axis name."""
    between = axes(lay)
    names = dict.fromkeys((*AXES.values(), *lay.rest))
    return replace(lay, rest={**lay.rest, "replica": between, **{cut(name): (*lay.rest.get(name, ()), *between) for name in names}})


def stacked(specs: Tree, replicas: int) -> Tree:
    """The specs of one array for each replica."""

    def one(s: Spec) -> Spec:
        return replace(s, shape=(replicas, *s.shape), axes=("replica", *s.axes), used=(replicas, *s.used))

    return jax.tree.map(one, specs, is_leaf=is_spec)


def spread(tree: Tree, replicas: int) -> Tree:
    """The same arrays for every replica: a leading axis."""
    return jax.tree.map(lambda p: jnp.broadcast_to(p[None], (replicas, *p.shape)), tree)


def each(values: jax.Array, like: jax.Array) -> jax.Array:
    """One number for each replica, shaped so that it multiplies an array with that leading axis."""
    return values.reshape(-1, *[1] * (like.ndim - 1))


def make_replica_gradient(model: Any, c: Any, plan: Plan, objective: Objective, own: bool) -> Callable:
    """(params, batch [micro, batch, seq], key, scale) -> every replica's gradient [replica, ...], of its own rows; sums for the log over the
    whole batch; each replica's norm [replica]; the root of the mean of their squares, which is finite where all are.

    A gradient is divided by the mean count of scored tokens of a replica, so that the mean of the replicas' is the gradient of the whole batch,
    however the tokens fall.  own: whether every replica has parameters of its own [replica, ...]."""
    lay, specs, between = plan.layout, model.specs(c), axes(plan.layout)
    share = make_local(model, c, plan, objective, inside(lay))
    replicas = count(lay)

    def local(params: Tree, batch: Batch, key: Any, scale: jax.Array) -> tuple[Tree, dict, jax.Array, jax.Array]:
        params = jax.tree.map(lambda p: p[0] if own else vary(p, between), params)
        grads, sums = share(params, batch, key, scale)
        grads = jax.tree.map(lambda g: g * replicas, grads)
        norm = global_norm(grads, between)
        overall = jnp.sqrt(sum_over(jnp.square(norm), between) / replicas)
        return jax.tree.map(lambda g: g[None], grads), sums, norm[None], overall

    if lay.devices == 1:
        return local
    many = partitions(placing(lay), "rest", stacked(specs, replicas))
    given, nothing = many if own else partitions(lay, "rest", specs), PartitionSpec()
    return jax.shard_map(
        local,
        mesh=plan.mesh,
        in_specs=(given, batch_partition(plan), nothing, nothing),
        out_specs=(many, nothing, PartitionSpec(between or None), nothing),
    )


def make_mean(plan: Plan, specs: Tree, measured: bool = False) -> Callable:
    """[replica, ...] -> the mean over replicas, in full precision: one all-reduce of every array.  measured: and the mean's global norm."""
    lay, replicas = plan.layout, count(plan.layout)

    def local(tree: Tree) -> Tree | tuple[Tree, jax.Array]:
        mean = jax.tree.map(lambda a: sum_over(a[0], axes(lay)) / replicas, tree)
        return (mean, global_norm(mean)) if measured else mean

    if lay.devices == 1:
        return local
    many, one = (partitions(placing(lay), "rest", s) for s in (stacked(specs, replicas), specs))
    return jax.shard_map(local, mesh=plan.mesh, in_specs=(many,), out_specs=(one, PartitionSpec()) if measured else one)


def make_one(plan: Plan, specs: Tree) -> Callable[[Tree], Tree]:
    """[replica, ...] of which all replicas hold the same -> that one; moves nothing."""
    if count(plan.layout) == 1:
        return lambda tree: jax.tree.map(lambda a: a[0], tree)
    many, one = (partitions(placing(plan.layout), "rest", s) for s in (stacked(specs, count(plan.layout)), specs))
    local = lambda tree: jax.tree.map(lambda a: a[0], tree)
    return jax.shard_map(
        local, mesh=plan.mesh, in_specs=(many,), out_specs=one, check_vma=False
    )  # which cannot know that they are the same


def gradient_cost(spelling: str, x: Shapes) -> tuple[Collective, ...]:
    """What `make_replica_gradient` moves: inside a replica as always; between replicas the sums for the log and one norm."""
    lay, between = x.layout, axes(x.layout)
    found = [c for c in step_cost(spelling, x._replace(layout=inside(lay))) if c.place != "log"]
    if lay.tokens:
        found += [
            Collective("all-reduce", ordered(lay, a), n, 4 * n, "log", "sums for the log")
            for a, n in ((lay.tokens, 1), (lay.summed, x.sums - 1))
        ]
    if between:
        found.append(Collective("all-reduce", between, 1, 4, "log", "the replicas' norms"))
        load = 4 * x.told.load * sum(kind.tells for kind in x.kinds)
        found += [Collective("all-reduce", between, 1, load, "log", "the routers' load")] if load else []
    return tuple(found)


def mean_cost(x: Shapes) -> tuple[Collective, ...]:
    """What `make_mean` of arrays like the parameters moves: each once, fp32."""
    between = axes(x.layout)
    size = sum(4 * x.elements("rest", s) for s in x.leaves.values())
    return (Collective("all-reduce", between, len(x.leaves), size, "end", "the mean over replicas"),) if between else ()
