"""The one loop over layers. How it runs is a row of RUNNERS; what it keeps for the backward pass is a row of REMAT."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_policies

from meshloom.core.layout import Layout
from meshloom.core.leaf import gathers, live
from meshloom.core.spec import is_spec
from meshloom.core.tree import Tree
from meshloom.models.base import Ctx, Kind, Model
from meshloom.ops.ring import KEPT


class How(NamedTuple):
    """Choices about the loop. runner: a row of RUNNERS. remat: a row of REMAT."""

    runner: str = "scan"
    remat: str = "none"


VIEWS = frozenset("reshape squeeze slice transpose broadcast_in_dim convert_element_type pcast pvary optimization_barrier name".split())
"""Operations that cost nothing beside what they read: made again rather than kept."""
SUMS = frozenset("psum psum_invariant reduce_scatter".split())


def _everything(gathered: frozenset[str]) -> Callable[..., bool]:
    """Keeps all but views and gathered weights (those of blocks too, core/compress.py), so that a weight is kept as what the layer was given: no
    copy, and ZeRO-3's shard."""

    def policy(prim: Any, *avals: Any, **params: Any) -> bool:
        moved = prim.name == "all_gather" and gathered & set(_names(params["axis_name"]))
        return prim.name not in VIEWS and not moved and not (prim.name == "dot_general" and avals[0].dtype == "int8")

    return policy


def _products(gathered: frozenset[str]) -> Callable[..., bool]:
    """Keeps the results of matrix products with weights, of the sums over devices behind them, and of attention in a ring."""
    dots = checkpoint_policies.dots_with_no_batch_dims_saveable

    def policy(prim: Any, *args: Any, **params: Any) -> bool:
        return prim.name in SUMS or (prim.name == "name" and params["name"] == KEPT) or dots(prim, *args, **params)

    return policy


def _names(axes: Any) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else tuple(axes)


REMAT = {"none": _everything, "selective": _products, "full": lambda gathered: checkpoint_policies.nothing_saveable}
"""What a layer keeps for the backward pass: everything but gathered weights; the results of matrix products; its input alone."""


class Stack(NamedTuple):
    """`repeat` times the layers of `unit`, starting at layer `start`."""

    start: int
    unit: tuple[Kind, ...]
    repeat: int


def stacks(kinds: tuple[Kind, ...], longest: int = 8) -> list[Stack]:
    """The layers as repeated units: one stack where a pattern of up to `longest` layers repeats throughout, else runs of equal layers."""
    n = len(kinds)
    for size in range(1, min(longest, n) + 1):
        if n % size == 0 and kinds == kinds[:size] * (n // size):
            return [Stack(0, kinds[:size], n // size)]
    runs: list[Stack] = []
    for i, kind in enumerate(kinds):
        if runs and runs[-1].unit == (kind,):
            runs[-1] = runs[-1]._replace(repeat=runs[-1].repeat + 1)
        else:
            runs.append(Stack(i, (kind,), 1))
    return runs


class Layers(NamedTuple):
    """What the loop takes per layer: trees with a leading `layer` axis, or (unroll) lists of one tree a layer.

    w: weights as differentiated. whole: gathered copies, None leaves where there are none. cache: keys and values, or None.
    """

    w: Tree
    whole: Tree
    cache: Tree


def run(model: Model, c: Any, lay: Layout, layers: Layers, x: jax.Array, ctx: Ctx, how: How) -> tuple[jax.Array, Tree]:
    """x through every layer.  x: (batch seq embed) -> same, and the layers' caches, stacked as they came."""
    layer = _layer(model, c, lay, how)
    caches = []
    for part in stacks(model.kinds(c)):
        x, cache = RUNNERS[how.runner](layer, part, _cut(layers, part), x, ctx)
        caches.append(cache)
    if isinstance(layers.cache, list):
        return x, [cache for part in caches for cache in part]
    return x, jax.tree.map(lambda *parts: jnp.concatenate(parts) if len(parts) > 1 else parts[0], *caches)  # type: ignore


def _layer(model: Model, c: Any, lay: Layout, how: How) -> Callable:
    """One layer: its weights made live, then the block; rematerialised where asked."""
    specs, gathered = model.specs(c).layers, gathers(lay)

    def layer(kind: Kind, at: int | None, weights: Layers, x: jax.Array, ctx: Ctx, seen: bool) -> tuple[jax.Array, Tree]:
        """at: this layer's place in a unit of several (the leading axis of the weights), or None.  seen: whether the compiler sees both passes at
        once (no loop): it would take the second computation for the first, and keep it."""

        def apply(w: Tree, whole: Tree, x: jax.Array, ctx: Ctx) -> tuple[jax.Array, Tree]:
            w, whole = (jax.tree.map(lambda a: a if at is None else lax.index_in_dim(a, at, keepdims=False), tree) for tree in (w, whole))
            w = jax.tree.map(lambda s, a, b: live(lay, s.axes[1:], a, b, ctx.samples), specs, w, whole, is_leaf=is_spec)
            x, ctx = model.block(c, lay, kind, w, x, ctx)
            return x, ctx.cache

        if how.remat != "none" or gathered or how.runner == "scan":
            apply = jax.checkpoint(apply, policy=REMAT[how.remat](gathered), prevent_cse=seen)
        cache = weights.cache if at is None else jax.tree.map(lambda a: a[at], weights.cache)
        return apply(weights.w, weights.whole, x, dataclasses.replace(ctx, cache=cache))

    return layer


def _cut(layers: Layers, part: Stack) -> Layers:
    """The weights of one stack."""
    end = part.start + part.repeat * len(part.unit)

    def cut(tree: Tree) -> Tree:
        if isinstance(tree, list):
            return tree[part.start : end]
        return jax.tree.map(lambda a: a if (part.start, end) == (0, len(a)) else a[part.start : end], tree)

    return Layers(*map(cut, layers))


def _scan(layer: Callable, part: Stack, layers: Layers, x: jax.Array, ctx: Ctx) -> tuple[jax.Array, Tree]:
    """A `lax.scan` over the units: one compiled unit whatever the depth. One unit is no loop."""
    if part.repeat == 1:
        return _unroll(layer, part, layers, x, ctx)
    n = len(part.unit)

    def unit(x: jax.Array, given: tuple[Layers, jax.Array]) -> tuple[jax.Array, Tree]:
        weights, first = given
        if n == 1:
            return layer(part.unit[0], None, weights, x, dataclasses.replace(ctx, layer=first), False)
        caches = []
        for i, kind in enumerate(part.unit):
            x, cache = layer(kind, i, weights, x, dataclasses.replace(ctx, layer=first + i), False)
            caches.append(cache)
        return x, jax.tree.map(lambda *a: jnp.stack(a), *caches)

    units = layers if n == 1 else jax.tree.map(lambda a: a.reshape(part.repeat, n, *a.shape[1:]), layers)
    x, caches = lax.scan(unit, x, (units, part.start + n * jnp.arange(part.repeat)))
    return x, caches if n == 1 else jax.tree.map(lambda a: a.reshape(part.repeat * n, *a.shape[2:]), caches)


def _unroll(layer: Callable, part: Stack, layers: Layers, x: jax.Array, ctx: Ctx) -> tuple[jax.Array, Tree]:
    """A Python loop: the compiler sees every layer.  Faster on CPUs; compiles longer in deep models."""
    count = part.repeat * len(part.unit)
    w, whole, cache = (as_list(tree, count) for tree in layers)
    caches = []
    for i in range(count):
        kind = part.unit[i % len(part.unit)]
        x, new = layer(kind, None, Layers(w[i], whole[i], cache[i]), x, dataclasses.replace(ctx, layer=part.start + i), True)
        caches.append(new)
    return x, caches if isinstance(layers.cache, list) else jax.tree.map(lambda *a: jnp.stack(a), *caches)


RUNNERS = {"scan": _scan, "unroll": _unroll}


def as_list(tree: Tree, count: int) -> list[Tree]:
    """A stacked tree as a list of one tree a layer, whose transpose is one `stack` a leaf; a list is returned as it is."""
    if isinstance(tree, list):
        return tree
    leaves, structure = jax.tree.flatten(tree)
    columns = [_unstack(count, leaf) for leaf in leaves]
    return [structure.unflatten([column[i] for column in columns]) for i in range(count)]


def _split(count: int, a: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(a[i] for i in range(count))


_unstack = jax.custom_vjp(_split, nondiff_argnums=(0,))
_unstack.defvjp(lambda count, a: (_split(count, a), None), lambda count, _, g: (jnp.stack(g),))
