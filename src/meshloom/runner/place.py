"""Which stage of a pipeline runs which layers, and the way of weights and gradients there and back.

All stages run one program, so every part of the layers is a row of the same slots, each of one kind; a slot that no layer fills is computed and
left out (its output is its input, its gradient 0).
"""

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshloom.core.layout import PIPE, Layout
from meshloom.core.leaf import sum_over
from meshloom.core.spec import Spec, is_spec
from meshloom.core.tree import Tree, map_named
from meshloom.models.base import Kind
from meshloom.parallel.base import in_stack


class Place(NamedTuple):
    """kinds: of the slots of one part. layers: int [stages, chunks, slots], the number of the layer in a slot, -1 for none. ranks: stack -> int
    [stages, its slots of all chunks], which of the stack's layers is there, -1 for none."""

    kinds: tuple[Kind, ...]
    layers: np.ndarray
    ranks: dict[str, np.ndarray]

    @property
    def masked(self) -> int:
        """Slots that no layer fills."""
        return int((self.layers < 0).sum())

    def said(self, skip: bool = False) -> str:
        """A sentence on a split that does not come out even; empty for one that does.  skip: whether empty slots are left out."""
        if not self.masked:
            return ""
        stages, chunks, slots = self.layers.shape
        parts = f"{stages} stages" + (f" x {chunks} chunks" if chunks > 1 else "")
        count = self.layers.size - self.masked
        then = "are left out" if skip else f"are computed in vain ({self.masked / count:.0%} more work in the layers)"
        return f"pipeline: {count} layers on {parts} of {slots} slot{'s' * (slots > 1)} each; {self.masked} of {self.layers.size} slots hold no layer and {then}"


@functools.cache
def place(kinds: tuple[Kind, ...], stages: int, chunks: int, sizes: tuple[int, ...] = ()) -> Place:
    """Consecutive layers on stages x chunks parts, part chunk * stages + stage on that stage, with as few slots as a search finds.
    sizes: layers of each part, in the order of the model; (): those with which the slots are fewest."""
    parts = stages * chunks
    if sizes:
        runs = [kinds[end - n : end] for n, end in zip(sizes, itertools.accumulate(sizes))]
        rows = [functools.reduce(_merged, dict.fromkeys(runs), ()), *(_pattern(kinds, size) for size in set(sizes))]
        slots = min((_shrunk(row, lambda slots: _stated(slots, runs)) for row in rows if _stated(row, runs)), key=len)
        filled = _stated(slots, runs)
    else:
        tried = range(-(-len(kinds) // parts), len(kinds) + 1)
        slots = min((_shrunk(_pattern(kinds, size), lambda slots: _fill(slots, kinds, parts)) for size in tried), key=len)
        filled = _fill(slots, kinds, parts)
    assert filled is not None
    layers = np.array(filled).reshape(chunks, stages, len(slots)).swapaxes(0, 1)
    ranks = {}
    for name in dict.fromkeys(kind.stack for kind in kinds):
        mine = [i for i, kind in enumerate(slots) if kind.stack == name]
        rank = np.cumsum([kind.stack == name for kind in kinds]) - 1
        there = layers[:, :, mine].reshape(stages, -1)
        ranks[name] = np.where(there < 0, -1, rank[there])
    return Place(slots, layers, ranks)


def _pattern(kinds: tuple[Kind, ...], size: int) -> tuple[Kind, ...]:
    """Slots of which every run of `size` consecutive layers, one behind the other, fills some: a common supersequence."""
    found: tuple[Kind, ...] = ()
    for start in range(0, len(kinds), size):
        found = _merged(found, kinds[start : start + size])
    return found


def _merged(a: tuple[Kind, ...], b: tuple[Kind, ...]) -> tuple[Kind, ...]:
    """A shortest sequence that both are parts of."""
    best = [[()] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i in range(len(a), -1, -1):
        for j in range(len(b), -1, -1):
            if i == len(a) or j == len(b):
                best[i][j] = a[i:] or b[j:]
            elif a[i] == b[j]:
                best[i][j] = (a[i], *best[i + 1][j + 1])
            else:
                best[i][j] = min((a[i], *best[i + 1][j]), (b[j], *best[i][j + 1]), key=len)
    return best[0][0]


def _shrunk(slots: tuple[Kind, ...], fill: Callable[[tuple[Kind, ...]], list | None]) -> tuple[Kind, ...]:
    """The slots without those that can be spared.  fill: None where layers then find no slot."""
    for i in reversed(range(len(slots))):
        fewer = slots[:i] + slots[i + 1 :]
        if fewer and fill(fewer) is not None:
            return _shrunk(fewer, fill)
    return slots


def _stated(slots: tuple[Kind, ...], runs: list[tuple[Kind, ...]]) -> list[list[int]] | None:
    """As `_fill`, where it is given which layers each part has.  runs: the kinds of their layers."""
    start, found = 0, []
    for run in runs:
        filled = _fill(slots, run, 1)
        if filled is None:
            return None
        found.append([start + at if at >= 0 else -1 for at in filled[0]])
        start += len(run)
    return found


def _fill(slots: tuple[Kind, ...], kinds: tuple[Kind, ...], parts: int) -> list[list[int]] | None:
    """The layer of every slot of every part, -1 for none, each as early as it can be; None where they do not all find one."""
    at, found = 0, []
    for _ in range(parts):
        row = []
        for slot in slots:
            fits = at < len(kinds) and kinds[at] == slot
            row.append(at if fits else -1)
            at += fits
        found.append(row)
    return found if at == len(kinds) else None


def to_stage(lay: Layout, where: Place, specs: Tree, params: Tree) -> Tree:
    """Parameters between steps -> this stage's layers, stacked slot by slot; what is no layer's is left alone.  An empty slot has some layer's."""

    def one(path: str, s: Spec, p: jax.Array) -> jax.Array:
        if (found := ranks(where, path)) is None:
            return p
        order, at = np.maximum(found, 0), lay.exchanged(s.axes)
        if at is None:
            return jnp.take(p, jnp.asarray(order)[lax.axis_index(PIPE)], axis=0)
        return lax.all_to_all(jnp.take(p, order.reshape(-1), axis=0), PIPE, split_axis=0, concat_axis=at, tiled=True)

    return map_named(one, specs, params, is_leaf=is_spec)


def from_stages(lay: Layout, where: Place, specs: Tree, grads: Tree) -> Tree:
    """Gradients of this stage's layers, as `to_stage` gave them -> as parameters lie between steps."""

    def one(path: str, s: Spec, g: jax.Array | None) -> jax.Array | None:
        found = ranks(where, path)
        if g is None or found is None:
            return g
        if s.role == "settled":
            return jnp.zeros((s.shape[0], *g.shape[1:]), g.dtype)
        if (at := lay.exchanged(s.axes)) is not None:
            flat = found.reshape(-1)
            order = np.array([np.flatnonzero(flat == rank)[0] for rank in range(s.shape[0])])
            return jnp.take(lax.all_to_all(g, PIPE, split_axis=at, concat_axis=0, tiled=True), order, axis=0)
        mine = jnp.asarray(found)[lax.axis_index(PIPE)]
        return sum_over(spread(g, mine, s.shape[0]), (PIPE,))

    return map_named(one, specs, grads, is_leaf=is_spec)


def spread(a: jax.Array, ranks: jax.Array, count: int) -> jax.Array:
    """Rows at their places among `count`, 0 elsewhere; those of rank -1 nowhere.  a: [slots, ...].  ranks: [slots]."""
    there = (jnp.arange(count)[:, None] == ranks).astype(a.dtype)
    return jnp.einsum("ls,s...->l...", there, a, precision=lax.Precision.HIGHEST)


def ranks(where: Place, path: str) -> np.ndarray | None:
    """The ranks of the stack that a parameter is in; None for one outside the layers."""
    return next((ranks for name, ranks in where.ranks.items() if in_stack(path, name)), None)
