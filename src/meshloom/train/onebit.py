"""The mean over data replicas by one bit an element: signs and a scale a weight, what they leave out carried to the next exchange.

Every replica sends the signs of its array to the replicas that serve its parts (all-to-all), each server averages its part of all arrays and
sends the signs of that to all (all-gather); n elements move as 2 n / 8 bytes. What the signs of a replica leave out is its *worker
error*, what those of a server leave out its *server error*; both are added before the next exchange. A scale is a weight's root mean square over
all its elements, wherever they lie, so that the result depends on the replicas alone and not on how a replica is split. A stack of layers is
many weights, and so is a table that is looked up row by row: one scale for a whole table would move the rows of rare tokens by what
frequent ones need, divided by their own small variance. Elements that are not `alive` are zero and stay zero: padding, and what has never had a gradient.
Source: arXiv 2102.02888, algorithm 1 and section 5.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from meshloom.core.layout import Layout
from meshloom.core.leaf import sum_over
from meshloom.core.mesh import partitions
from meshloom.core.spec import Spec, is_spec
from meshloom.core.tree import Tree, named_leaves
from meshloom.parallel.base import Collective, Shapes, merge, ordered
from meshloom.plan.plan import Plan
from meshloom.train.optimizer import TABLES_BY_INDEX, role
from meshloom.train.replicas import AXIS, axes, count, cut, placing, stacked


class Errors(NamedTuple):
    """What compression has left out so far. worker: [replica, ...]. server: like the parameters, each replica holding the part that it serves."""

    worker: Tree
    server: Tree


class Piece(NamedTuple):
    """How one parameter is exchanged. at: the axis along which the replicas share it out; None where none can be, and it is averaged in full.
    weights: separate weights in it on a device, along its first axis. used: elements of one of them, without padding. split, rows: mesh axes that
    split a weight inside a replica, and those that split the first axis. size: elements on a device."""

    at: int | None
    weights: int
    used: int
    split: tuple[str, ...]
    rows: tuple[str, ...]
    size: int


def piece(lay: Layout, s: Spec) -> Piece:
    """How a parameter is exchanged under a layout."""
    local, lead = lay.shard_shape("rest", s), separate(s)
    at = next((i for i in range(lead, len(local)) if local[i] % count(lay) == 0), None)
    over = lay.entries("rest", s.axes)
    rows, split = (ordered(lay, tuple(a for mesh_axes in part for a in mesh_axes)) for part in (over[:lead], over[lead:]))
    return Piece(at, local[0] if lead else 1, math.prod(s.used[lead:]), split, rows, math.prod(local))


def separate(s: Spec) -> int:
    """1 where the first axis of a parameter counts separate weights: layers of a stack, rows of a table; else 0."""
    return int(len(s.axes) > 1 and s.axes[0] in ("layer", *TABLES_BY_INDEX))


def error_specs(lay: Layout, specs: Tree) -> Errors:
    """The Specs of the errors, all zero at first."""

    def server(s: Spec) -> Spec:
        at = piece(lay, s).at
        return replace(s, axes=tuple(cut(name) if i == at else name for i, name in enumerate(s.axes)))

    return Errors(stacked(specs, count(lay)), jax.tree.map(server, specs, is_leaf=is_spec))


def check(lay: Layout, specs: Tree, kind: str) -> None:
    """Raises ValueError for a matrix that the replicas cannot share out evenly.  (Small vectors that they cannot are averaged in full.)"""
    for name, s in named_leaves(specs, is_spec).items():
        if piece(lay, s).at is None and role(s).matrix:
            shape = " x ".join(str(n) for n in lay.shard_shape("rest", s))
            raise ValueError(
                f"optimizer {kind} shares out every matrix among the data replicas, and {name} ({' '.join(s.axes)}, {shape} on a device) has no axis "
                f"that {count(lay)} replicas divide. Use another number of devices for data, or optimizer.kind: adamw."
            )


def pack(signs: Array) -> Array:
    """bool [parts, elements] -> uint8 [parts, elements / 8 rounded up], eight signs a byte."""
    return jnp.packbits(signs, axis=1)


def unpack(bits: Array, elements: int) -> Array:
    """`pack` undone, as +1 and -1, fp32."""
    return jnp.unpackbits(bits, axis=1, count=elements).astype(jnp.float32) * 2 - 1


def apart(a: Array, at: int, parts: int) -> Array:
    """[..., n, ...] -> [parts, ..., n / parts, ...]: cut along axis `at`."""
    shape = a.shape
    return jnp.moveaxis(a.reshape(*shape[:at], parts, shape[at] // parts, *shape[at + 1 :]), at, 0)


def together(a: Array, at: int) -> Array:
    """`apart` undone."""
    a = jnp.moveaxis(a, 0, at)
    return a.reshape(*a.shape[:at], a.shape[at] * a.shape[at + 1], *a.shape[at + 2 :])


def sign(a: Array) -> Array:
    """+1 where a >= 0, else -1."""
    return jnp.where(a >= 0, 1.0, -1.0)


def _squares(a: Array, p: Piece) -> Array:
    """The sum of squares of each weight, [weights], on this device."""
    return jnp.square(a).reshape(p.weights, -1).sum(1)


def _wide(scales: Array, like: Array) -> Array:
    """[weights] so that it multiplies an array that is one weight or a stack of them."""
    return scales.reshape(-1, *[1] * (like.ndim - 1))


def _scales(lay: Layout, arrays: list[Array], pieces: list[Piece], between: tuple[str, ...]) -> list[Array]:
    """Every weight's root mean square, [weights] for each array; one all-reduce for each way that arrays are split.
    between: further mesh axes that hold parts of them."""
    out: list[Array] = [jnp.zeros(0)] * len(arrays)
    for split, rows in dict.fromkeys((p.split, p.rows) for p in pieces):
        mine = [i for i, p in enumerate(pieces) if (p.split, p.rows) == (split, rows)]
        total = sum_over(jnp.concatenate([_squares(arrays[i], pieces[i]) for i in mine]), ordered(lay, (*between, *split)))
        at = 0
        for i in mine:
            out[i] = jnp.sqrt(total[at : at + pieces[i].weights] / pieces[i].used)
            at += pieces[i].weights
    return out


def make_exchange(plan: Plan, specs: Tree) -> Callable[[Tree, Tree, Errors], tuple[Tree, Errors]]:
    """(values [replica, ...], alive, errors) -> the mean over replicas as it arrives by one bit an element, and the new errors.
    alive: bool, like the parameters.  With one replica nothing is exchanged and nothing is compressed: the values come back as they are."""
    lay, replicas = plan.layout, count(plan.layout)
    if replicas == 1:
        return lambda values, alive, errors: (jax.tree.map(lambda v, a: v[0] * a, values, alive), errors)
    structure = jax.tree.structure(specs, is_leaf=is_spec)
    pieces = [piece(lay, s) for s in jax.tree.leaves(specs, is_leaf=is_spec)]

    def local(values: Tree, alive: Tree, errors: Errors) -> tuple[Tree, Errors]:
        flat = [jax.tree.leaves(tree) for tree in (values, alive, errors.worker, errors.server)]
        out: list[tuple[Array, Array, Array]] = [
            (sum_over(v[0], (AXIS,)) / replicas * a, worker, server) for v, a, worker, server in zip(*flat, strict=True)
        ]
        cuts = [i for i, p in enumerate(pieces) if p.at is not None]
        done = _exchange(lay, *([leaves[i] for i in cuts] for leaves in flat), [pieces[i] for i in cuts])
        for i, result in zip(cuts, done, strict=True):
            out[i] = result
        mean, worker, server = (jax.tree.unflatten(structure, [one[i] for one in out]) for i in range(3))
        return mean, Errors(worker, server)

    errors = error_specs(lay, specs)
    many, one, servers = (partitions(placing(lay), "rest", tree) for tree in (errors.worker, specs, errors.server))
    return jax.shard_map(local, mesh=plan.mesh, in_specs=(many, one, Errors(many, servers)), out_specs=(one, Errors(many, servers)))


def _exchange(
    lay: Layout, values: list[Array], alive: list[Array], worker: list[Array], server: list[Array], pieces: list[Piece]
) -> list[tuple[Array, Array, Array]]:
    """Inside a replica: [1, ...] values and errors of the arrays that can be shared out -> (mean, worker error, server error) of each."""
    replicas, here = count(lay), lax.axis_index(AXIS)
    own = [(v[0] + e[0]) * a for v, e, a in zip(values, worker, alive)]
    scales = _scales(lay, own, pieces, ())
    everyone = _everyone(scales, pieces)
    left = [(c - _wide(s, c) * sign(c)) * a for c, s, a in zip(own, scales, alive)]
    parts, masks = [], []
    for c, a, e, p, given in zip(own, alive, server, pieces, everyone):
        mine = apart(c >= 0, p.at, replicas)
        votes = lax.all_to_all(pack(mine.reshape(replicas, -1)), AXIS, 0, 0, tiled=True)
        votes = unpack(votes, mine[0].size).reshape(mine.shape)
        given = given.reshape(replicas, -1, *[1] * (c.ndim - 1))
        masks.append(lax.dynamic_index_in_dim(apart(a, p.at, replicas), here, keepdims=False))
        parts.append(((votes * given).sum(0) / replicas + e) * masks[-1])
    served = _scales(lay, parts, pieces, (AXIS,))
    out = []
    for part, mask, s, a, e, p in zip(parts, masks, served, alive, left, pieces):
        bits = lax.all_gather(pack((part >= 0).reshape(1, -1)), AXIS, axis=0, tiled=True, to="invarying")
        signs = together(unpack(bits, part.size).reshape(replicas, *part.shape), p.at)
        out.append((signs * _wide(s, signs) * a, e[None], (part - _wide(s, part) * sign(part)) * mask))
    return out


def _everyone(scales: list[Array], pieces: list[Piece]) -> list[Array]:
    """The scales of all replicas, [replica, weights] for each array; one all-gather for each way that first axes are split."""
    out = list(scales)
    for rows in dict.fromkeys(p.rows for p in pieces):
        mine = [i for i, p in enumerate(pieces) if p.rows == rows]
        found = lax.all_gather(jnp.concatenate([scales[i] for i in mine]), AXIS)
        ends = [sum(pieces[j].weights for j in mine[: n + 1]) for n in range(len(mine))]
        for i, end in zip(mine, ends):
            out[i] = found[:, end - pieces[i].weights : end]
    return out


def exchange_cost(x: Shapes) -> tuple[Collective, ...]:
    """What one exchange moves: each array's signs twice, eight a byte (the part of every server rounded up to whole bytes); a scale for each
    weight of each replica; sums of squares, one number a weight. Vectors that cannot be shared out are all-reduced, fp32."""
    lay, replicas, between = x.layout, count(x.layout), axes(x.layout)
    if not between:
        return ()
    pieces = [piece(lay, s) for s in x.leaves.values()]
    cuts, found = [p for p in pieces if p.at is not None], []
    for p in pieces:
        if p.at is None:
            found.append(Collective("all-reduce", between, 1, 4 * p.size, "end", "small vectors, in full"))
    signs = sum(replicas * math.ceil(p.size // replicas / 8) for p in cuts)
    found.append(Collective("all-to-all", between, len(cuts), signs, "end", "signs of every replica, to the servers"))
    found.append(Collective("all-gather", between, len(cuts), signs, "end", "signs of the mean, from the servers"))
    for rows in dict.fromkeys(p.rows for p in cuts):
        size = 4 * replicas * sum(p.weights for p in cuts if p.rows == rows)
        found.append(Collective("all-gather", between, 1, size, "end", "a scale for each weight"))
    for split, rows in dict.fromkeys((p.split, p.rows) for p in cuts):
        size = 4 * sum(p.weights for p in cuts if (p.split, p.rows) == (split, rows))
        found += [Collective("all-reduce", ordered(lay, (*more, *split)), 1, size, "end", "sums of squares") for more in ((), between)]
    return merge(c for c in found if c.axes)
