"""Specs: arrays that do not exist yet. A model is a tree of them; init, bytes, shardings and checkpoints are maps over it."""

import functools
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from meshloom.core.tree import Same, Tree, map_named, named_leaves

AXES = {
    "b": "batch",
    "B": "work_batch",
    "t": "seq",
    "T": "whole_seq",
    "s": "attend_seq",
    "d": "embed",
    "D": "whole_embed",
    "f": "ffn",
    "h": "heads",
    "g": "kv_heads",
    "k": "head",
    "v": "vocab",
    "l": "layer",
    "p": "position",
    "e": "expert",
    "m": "expert_ffn",
    "r": "router",
    "a": "query_rank",
    "c": "latent",
    "z": "key_rank",
    "u": "key_value",
    "w": "value",
}
"""The letter of each array axis in an einsum. `seq` is the sequence of the residual stream, `whole_seq` that of a layer's matrices, `attend_seq` that
inside attention, whose heads may be split further in exchange; likewise `batch` and `work_batch`, which mesh axes may split beside those of
`batch`. `whole_embed` is embed where the head needs it whole. `router` are the experts as a router scores them: whole where
`expert`, the experts' own weights, is split. `query_rank`, `latent`, `key_rank`, `key_value` and `value` are of latent attention
(models/latent.py)."""


class Init(NamedTuple):
    """How a parameter starts: every element `mean`, plus a normal deviate times `std`."""

    std: float = 0.0
    mean: float = 0.0


ZEROS, ONES = Init(), Init(mean=1.0)


ROLES = {
    "factor": "multiplies: the backward pass of its layer needs it",
    "norm": "a norm's gain: multiplies what was divided by one statistic of each token",
    "centred norm": "a norm's gain: multiplies what was centred and divided, by two statistics of each token",
    "added": "only added (a bias): the backward pass needs it only to compute again what comes after it",
    "ends first half": "added last in a layer's first half, to what is then added to the residual stream",
    "ends layer": "added last in a layer's second half: nothing in the layer comes after it",
    "settled": "has no gradient: changed after a step by what its layer told (models.base.Model.settle)",
}
"""What a parameter does in its layer, as far as this decides what has to be moved."""


@dataclass(frozen=True)
class Spec:
    """One array not yet made. Deliberately not a registered pytree, so `jax.tree` sees it as a leaf.

    shape, axes: size and name of each axis. used: the part that is not padding (a prefix along each axis); padding starts at zero and stays there.
    role: of a parameter, a row of ROLES. exact: of a parameter, whether a step keeps it in its own type whatever the arithmetic's is.
    frozen: of a parameter, whether training leaves it as it is (models/freeze.py).
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init: Init
    dtype: str
    used: tuple[int, ...]
    role: str = "factor"
    exact: bool = False
    frozen: bool = False

    @property
    def size(self) -> int:
        """Elements, padding included."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return self.size * jnp.dtype(self.dtype).itemsize


def spec(sizes: Mapping[str, int], axes: str, init: Init = ZEROS, dtype: str = "float32", used: Mapping[str, int] | None = None) -> Spec:
    """The Spec of an array whose axes are the space-separated names, with sizes from a table. used: axis name -> size without padding."""
    names = tuple(axes.split())
    shape = tuple(sizes[name] for name in names)
    return Spec(shape, names, init, dtype, tuple((used or {}).get(name, size) for name, size in zip(names, shape)))


def is_spec(x: Any) -> bool:
    """Whether x is a Spec: the `is_leaf` of every map over specs."""
    return isinstance(x, Spec)


def stack(specs: Tree, layers: int) -> Tree:
    """The same specs with a leading `layer` axis."""

    def one(s: Spec) -> Spec:
        return replace(s, shape=(layers, *s.shape), axes=("layer", *s.axes), used=(layers, *s.used))

    return jax.tree.map(one, specs, is_leaf=is_spec)


def trained(specs: Tree, tree: Tree) -> Tree:
    """A tree like the specs, with None in place of what is frozen."""
    return jax.tree.map(lambda s, a: None if s.frozen else a, specs, tree, is_leaf=is_spec)


def with_frozen(specs: Tree, new: Tree, old: Tree) -> Tree:
    """A tree like the specs: `old` where they are frozen, else `new`."""
    return jax.tree.map(lambda s, a, b: b if s.frozen else a, specs, new, old, is_leaf=is_spec)


def abstract(specs: Tree, shardings: Tree | None = None) -> Tree:
    """The specs as `jax.ShapeDtypeStruct`s, with shardings where given."""
    if shardings is None:
        return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), specs, is_leaf=is_spec)
    return jax.tree.map(lambda s, where: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where), specs, shardings, is_leaf=is_spec)


def path_key(key: jax.Array, path: str) -> jax.Array:
    """A key that depends on the path alone: adding a parameter or changing the mesh never changes another's."""
    return jax.random.fold_in(key, int.from_bytes(hashlib.sha256(path.encode()).digest()[:4], "little"))


def init_leaf(path: str, s: Spec, key: jax.Array, flat: bool = False) -> jax.Array:
    """The starting value of one parameter. Each layer of a stack has its own key, so a deeper model starts with the same first layers.
    flat: draw each layer's numbers as one axis: the same numbers, compiled in a third of the time, but not split over devices."""

    def one(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        if not s.init.std:
            return jnp.full(shape, s.init.mean, s.dtype)
        draw = jax.random.normal(key, (math.prod(shape),) if flat else shape, jnp.float32).reshape(shape)
        return (s.init.mean + s.init.std * draw).astype(s.dtype)

    key = path_key(key, path)
    if s.axes[:1] == ("layer",):
        keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(s.shape[0]))
        value = jax.vmap(lambda k: one(k, s.used[1:]))(keys)
    else:
        value = one(key, s.used)
    pads = [(0, whole - used) for whole, used in zip(s.shape, value.shape)]
    return jnp.pad(value, pads) if any(after for _, after in pads) else value


def init(specs: Tree, key: jax.Array, shardings: Tree | None = None, options: dict | None = None) -> Tree:
    """Starting parameters, made where `shardings` puts them and bit-equal under every layout (threefry is partitionable).
    options: of the compiler."""
    flat = shardings is None or all(len(where.device_set) == 1 for where in jax.tree.leaves(shardings))
    fill = lambda key: map_named(lambda path, s: init_leaf(path, s, key, flat), specs, is_leaf=is_spec)
    return jax.jit(fill, out_shardings=shardings, compiler_options=options)(key)


def count(specs: Tree) -> int:
    """Parameters, without padding."""
    return sum(math.prod(s.used) for s in named_leaves(specs, is_spec).values())


@functools.lru_cache(maxsize=64)  # which keeps the trees, so that no other gets the address of one
def leaves_of(specs: Same) -> dict[str, Spec]:
    """The specs of a tree by path; the same dictionary for the same tree, so that plans may ask often."""
    return named_leaves(specs.of, is_spec)
