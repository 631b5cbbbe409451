"""The one loop over layers. How it runs is a row of RUNNERS; what each layer keeps for the backward pass is a row of REMAT."""

import dataclasses
from collections.abc import Callable
from itertools import groupby
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import Offloadable, checkpoint_policies

from meshloom.core.late import Late, waits
from meshloom.core.layout import Layout
from meshloom.core.leaf import gathers, live
from meshloom.core.remat import GROUPED, ROWS, group_of, words_of
from meshloom.core.spec import is_spec
from meshloom.core.summa import PRODUCT
from meshloom.core.tree import Tree
from meshloom.core.vary import vary, varying
from meshloom.models.base import Ctx, Kind, Model, stack_of
from meshloom.ops.ring import KEPT
from meshloom.parallel.pipe import skips


class How(NamedTuple):
    """Choices about the loop. runner: a row of RUNNERS. remat: a row of REMAT, or a pattern over the layers (core/remat.py)."""

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
    """Keeps the results of matrix products with weights, of the sums over devices behind them, and what is named to be kept: attention in a ring, exchanges of experts."""
    dots = checkpoint_policies.dots_with_no_batch_dims_saveable

    def policy(prim: Any, *args: Any, **params: Any) -> bool:
        return prim.name in SUMS or (prim.name == "name" and params["name"] in (KEPT, PRODUCT)) or dots(prim, *args, **params)

    return policy


def _names(axes: Any) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else tuple(axes)


def _offloaded(gathered: frozenset[str]) -> Callable[..., Any]:
    """Keeps what `_products` keeps, in the host's memory where that can be told apart from the device's (a sum over devices is kept on the device)."""
    keeps, away = _products(gathered), Offloadable(src="device", dst="pinned_host")

    def policy(prim: Any, *args: Any, **params: Any) -> Any:
        kept = keeps(prim, *args, **params)
        return away if kept and prim.name not in SUMS else kept

    return policy


REMAT = {"none": _everything, "selective": _products, GROUPED: lambda gathered: checkpoint_policies.nothing_saveable, "offload": _offloaded}
"""What a layer keeps for the backward pass: everything but gathered weights; the results of matrix products; its input alone; those results, elsewhere."""
assert REMAT.keys() == ROWS.keys()
UNOFFERED = {"cpu": "a CPU's devices have no memory but the host's, and its compiler drops the request"}
"""Platform -> why `offload` moves nothing there."""


class Stack(NamedTuple):
    """`repeat` times the layers of `unit`, starting at layer `start`. remat: what each of them keeps, a row of REMAT; `full:2`: units of two layers
    that keep the first one's input together."""

    start: int
    unit: tuple[Kind, ...]
    repeat: int
    remat: str = "none"

    @property
    def grouped(self) -> bool:
        """Whether the layers of a unit share one input."""
        return group_of(self.remat) > 1


def stacks(kinds: tuple[Kind, ...], remat: str = "none", longest: int = 8) -> list[Stack]:
    """The layers as repeated units: one stack where they keep the same and a pattern of up to `longest` layers repeats throughout, else runs of equal
    layers.  Raises ValueError for a pattern of remat that is not of so many layers."""
    words, found, start = words_of(remat, len(kinds)), [], 0
    for word, same in groupby(words):
        end = start + len(list(same))
        size = group_of(word)
        if size > 1:
            parts = [Stack(i, kinds[i : i + size], 1) for i in range(start, end, size)]
            alike = all(part.unit == parts[0].unit for part in parts)
            parts = [parts[0]._replace(repeat=len(parts))] if alike else parts
        else:
            parts = [part._replace(start=start + part.start) for part in _repeated(kinds[start:end], longest)]
        found += [part._replace(remat=word) for part in parts]
        start = end
    return found


def _repeated(kinds: tuple[Kind, ...], longest: int) -> list[Stack]:
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
    """What the loop takes per layer: trees with a leading `layer` axis (several of them, where the model has several stacks), or (unroll) lists of
    one tree a layer.  w: weights as differentiated. whole: gathered copies, None leaves where there are none. cache: keys and values, or None.
    """

    w: Tree
    whole: Tree
    cache: Tree


def run(
    model: Model, c: Any, lay: Layout, layers: Layers, x: jax.Array, ctx: Ctx, how: How, slots: tuple[Kind, ...] | None = None
) -> tuple[jax.Array, Tree, Tree]:
    """x through every layer.  x: (batch seq embed) -> same; the layers' caches, stacked as they came; and what the layers told that did, stacked.
    slots: of a pipeline's part (runner/place.py), whose layers run in place of all; ctx then says which these are."""
    kinds = slots or model.kinds(c)
    ctx = ctx if slots else dataclasses.replace(ctx, layer=0, real=None)
    caches, told = [], []
    for part in stacks(kinds, how.remat):
        layer = _layer(model, c, lay, how.runner, "none" if part.grouped else part.remat)
        x, cache, said = RUNNERS[how.runner](layer, part, _cut(layers, part, kinds), x, ctx)
        caches.append(cache)
        told.append(said)
    said = _joined([t for t in told if t is not None])
    if isinstance(layers.cache, list):
        return x, [cache for part in caches for cache in part], said
    return x, _joined(caches), said


def _joined(parts: list[Tree]) -> Tree:
    """Stacked trees one after the other; None for none."""
    return jax.tree.map(lambda *a: jnp.concatenate(a) if len(a) > 1 else a[0], *parts) if parts else None  # type: ignore


def _stacked(trees: list[Tree]) -> Tree:
    """Trees as one with a leading axis, those that are None left out; None for none."""
    there = [tree for tree in trees if tree is not None]
    return jax.tree.map(lambda *a: jnp.stack(a), *there) if there else None


def _layer(model: Model, c: Any, lay: Layout, runner: str, remat: str) -> Callable:
    """One layer: its weights made live, then the block; rematerialised where asked."""
    all_specs, gathered, skip = model.specs(c).layers, gathers(lay), skips(lay)

    def layer(kind: Kind, at: int | None, weights: Layers, x: jax.Array, ctx: Ctx, seen: bool) -> tuple[jax.Array, Tree, Tree]:
        """at: this layer's place among those of its stack in a unit (the leading axis of the weights), or None where there is no such axis.  seen:
        whether the compiler sees both passes at once (no loop): it would take the second computation for the first, and keep it."""
        specs = stack_of(all_specs, kind.stack)

        def apply(w: Tree, whole: Tree, x: jax.Array, ctx: Ctx) -> tuple[jax.Array, Tree, Tree]:
            w, whole = (jax.tree.map(lambda a: a if at is None else lax.index_in_dim(a, at, keepdims=False), tree) for tree in (w, whole))
            w = jax.tree.map(lambda s, a, b: live(lay, s.axes[1:], a, b, ctx.samples), specs, w, whole, is_leaf=is_spec)
            if (late := ctx.late) is not None:
                w = jax.tree.map(lambda s, a: Late(a, late) if waits(lay, s) else a, specs, w, is_leaf=is_spec)
            block = lambda w, x: _told(model.block(c, lay, kind, w, x, ctx))
            return _unless_empty(block, w, x, ctx.real) if skip and ctx.real is not None else block(w, x)

        if remat != "none" or gathered or runner == "scan":
            apply = jax.checkpoint(apply, policy=REMAT[remat](gathered), prevent_cse=seen)
        y, cache, told = apply(weights.w, weights.whole, x, dataclasses.replace(ctx, cache=weights.cache))
        if ctx.real is None or skip:
            return y, cache, told
        return jnp.where(ctx.real, y, x), cache, jax.tree.map(lambda a: jnp.where(ctx.real, a, jnp.zeros_like(a)), told)

    return layer


def _told(out: tuple[jax.Array, Ctx]) -> tuple[jax.Array, Tree, Tree]:
    """What a block returns that its layer does."""
    return out[0], out[1].cache, out[1].told


def _unless_empty(block: Callable, w: Tree, x: jax.Array, real: jax.Array | None) -> tuple[jax.Array, Tree, Tree]:
    """block(w, x) where a layer fills the slot; else x, and zeros for what it would have told."""
    out = jax.eval_shape(block, w, x)
    blank = lambda a: vary(jnp.zeros(a.shape, a.dtype), varying(a))
    empty = lambda w, x: (vary(x, varying(out[0])), *jax.tree.map(blank, out[1:]))
    return lax.cond(real, block, empty, w, x)


def _cut(layers: Layers, part: Stack, kinds: tuple[Kind, ...]) -> Layers:
    """What one part of the layers takes: w and whole by the name of the stack."""
    end = part.start + part.repeat * len(part.unit)

    def cut(tree: Tree, start: int, end: int) -> Tree:
        if isinstance(tree, list):
            return tree[start:end]
        return jax.tree.map(lambda a: a if (start, end) == (0, len(a)) else a[start:end], tree)

    def weights(tree: Tree) -> Tree:
        if isinstance(tree, list):
            return tree[part.start : end]
        names = dict.fromkeys(kind.stack for kind in part.unit)
        count = lambda name, kinds: sum(kind.stack == name for kind in kinds)
        first = {name: count(name, kinds[: part.start]) for name in names}
        return {name: cut(stack_of(tree, name), first[name], first[name] + count(name, kinds[part.start : end])) for name in names}

    return Layers(weights(layers.w), weights(layers.whole), cut(layers.cache, part.start, end))


def _scan(layer: Callable, part: Stack, layers: Layers, x: jax.Array, ctx: Ctx) -> tuple[jax.Array, Tree, Tree]:
    """A `lax.scan` over the units: one compiled unit whatever the depth. One unit is no loop."""
    if part.repeat == 1:
        return _unroll(layer, part, layers, x, ctx)
    n, names = len(part.unit), [kind.stack for kind in part.unit]

    def unit(x: jax.Array, given: tuple[Layers, Any]) -> tuple[jax.Array, tuple[Tree, Tree]]:
        weights, numbers = given
        caches, told = [], []
        for i, (kind, name) in enumerate(zip(part.unit, names)):
            at = None if names.count(name) == 1 else names[:i].count(name)
            cache = weights.cache if n == 1 else jax.tree.map(lambda a, i=i: a[i], weights.cache)
            mine = Layers(weights.w[name], weights.whole[name], cache)
            x, cache, said = layer(kind, at, mine, x, _numbered(ctx, numbers, i), False)
            caches.append(cache)
            told.append(said)
        return x, (caches[0], told[0]) if n == 1 else (_stacked(caches), _stacked(told))

    def by_unit(tree: Tree, each: int) -> Tree:
        return tree if each == 1 else jax.tree.map(lambda a: a.reshape(part.repeat, each, *a.shape[1:]), tree)

    if part.grouped:
        unit = jax.checkpoint(unit, policy=checkpoint_policies.nothing_saveable, prevent_cse=False)
    w, whole = ({name: by_unit(tree, names.count(name)) for name, tree in weights.items()} for weights in layers[:2])
    units = Layers(w, whole, by_unit(layers.cache, n))
    x, ys = lax.scan(unit, x, (units, _numbers(ctx, part)))
    caches, told = ys if n == 1 else jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), ys)
    return x, caches, told


def _numbers(ctx: Ctx, part: Stack) -> Any:
    """What `_numbered` reads, with a leading axis of the part's units: the number of a unit's first layer; in a pipeline's part each layer's, and whether
    it is there."""
    n = len(part.unit)
    if jnp.ndim(ctx.layer) == 0:
        return part.start + n * jnp.arange(part.repeat)
    return jax.tree.map(lambda a: a[part.start : part.start + n * part.repeat].reshape(part.repeat, n), (ctx.layer, ctx.real))


def _numbered(ctx: Ctx, numbers: Any, i: int) -> Ctx:
    """The context of layer i of a unit."""
    if not isinstance(numbers, tuple):
        return dataclasses.replace(ctx, layer=numbers + i if i else numbers)
    layer, real = jax.tree.map(lambda a: a[i], numbers)
    return dataclasses.replace(ctx, layer=layer, real=real)


def _unroll(layer: Callable, part: Stack, layers: Layers, x: jax.Array, ctx: Ctx) -> tuple[jax.Array, Tree, Tree]:
    """A Python loop: the compiler sees every layer.  Faster on CPUs; compiles longer in deep models."""
    count = part.repeat * len(part.unit)
    names = [part.unit[i % len(part.unit)].stack for i in range(count)]
    w, whole = (_in_order(trees, names) for trees in layers[:2])
    cache = as_list(layers.cache, count)
    numbers = part.start if jnp.ndim(ctx.layer) == 0 else jax.tree.map(lambda a: a[part.start :], (ctx.layer, ctx.real))
    caches, told, size = [], [], len(part.unit) if part.grouped else 1

    def piece(x: jax.Array, mine: list[Layers], first: int) -> tuple[jax.Array, list[Tree], list[Tree]]:
        """x through layers from `first` on, whose weights these are."""
        news, saids = [], []
        for i, weights in enumerate(mine, first):
            x, new, said = layer(part.unit[i % len(part.unit)], None, weights, x, _numbered(ctx, numbers, i), True)
            news.append(new)
            saids.append(said)
        return x, news, saids

    for first in range(0, count, size):
        mine = [Layers(w[i], whole[i], cache[i]) for i in range(first, first + size)]
        run = jax.checkpoint(piece, policy=checkpoint_policies.nothing_saveable, static_argnums=2) if part.grouped else piece
        x, news, saids = run(x, mine, first)
        caches += news
        told += saids
    return x, caches if isinstance(layers.cache, list) else jax.tree.map(lambda *a: jnp.stack(a), *caches), _stacked(told)


def each(layers: Tree, kinds: tuple[Kind, ...]) -> list[Tree]:
    """A model's `layers` as a list of one tree a layer."""
    names = [kind.stack for kind in kinds]
    return _in_order({name: stack_of(layers, name) for name in dict.fromkeys(names)}, names)


def _in_order(trees: Tree, names: list[str]) -> list[Tree]:
    """One tree a layer, from stacks by name; a list is returned as it is."""
    if isinstance(trees, list):
        return trees
    lists = {name: as_list(tree, names.count(name)) for name, tree in trees.items()}
    return [lists[name][names[:i].count(name)] for i, name in enumerate(names)]


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
