"""What every stage of a pipeline can do: its part of the layers, and with all others embedding and head."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from meshloom.core.batch import Batch
from meshloom.core.layout import PIPE, Layout
from meshloom.core.leaf import whole_rows
from meshloom.core.tree import Tree
from meshloom.core.vary import vary, varying
from meshloom.models.base import Model, context
from meshloom.parallel.pipe import chunks_in, layers_in
from meshloom.runner.gather import outer_weights, outside
from meshloom.runner.place import Place, place, spread
from meshloom.runner.run import How, Layers, run

Row = dict[str, Array]
"""One tick of a table as one stage reads it: micro-batches (-1: none), chunks and slots of rings."""


class Stage(NamedTuple):
    """What a device needs to know to run its stage."""

    model: Model
    config: Any
    layout: Layout
    how: How
    place: Place


def stage_of(model: Model, c: Any, lay: Layout, how: How) -> Stage | None:
    """The stage of a layout with a pipeline; None for one without."""
    where = placed(model, c, lay)
    return Stage(model, c, lay, how, where) if where else None


def placed(model: Model, c: Any, lay: Layout) -> Place | None:
    """Where a layout's pipeline has which layers; None for one without."""
    return place(model.kinds(c), lay.stages, chunks_in(lay), layers_in(lay)) if lay.stages > 1 else None


class Often(NamedTuple):
    """In how many ticks of a loop there is something to do, the same on all stages."""

    ticks: int
    of: int

    def run(self, make: Callable[[Array], Tree], m: Array) -> Tree:
        """make(m), and zeros in ticks where there is nothing to do. The compiled program says how often (plan/hlo.py reads it)."""
        if self.ticks == self.of:
            return make(m)
        shapes = jax.eval_shape(make, m)
        if not self.ticks:
            return jax.tree.map(blank, shapes)
        with jax.named_scope(f"ticks_{self.ticks}_of_{self.of}"):
            return lax.cond(m >= 0, make, lambda m: jax.tree.map(blank, shapes), m)


@dataclass(frozen=True)
class Part:
    """The functions that a table's slots run, on this stage's weights and a batch [micro, batch, seq]."""

    s: Stage
    w: Tree
    whole: Tree
    batch: Batch
    key: Any

    @property
    def stage(self) -> Array:
        """This stage's number."""
        return lax.axis_index(PIPE)

    def rows(self, m: Array) -> Batch:
        """A micro-batch; any for -1."""
        return jax.tree.map(lambda a: get(a, jnp.maximum(m, 0)), self.batch)

    def chunk(self, tree: Tree, v: Array) -> Tree:
        """One chunk of this stage's layers."""
        chunks = self.s.place.layers.shape[1]
        return jax.tree.map(lambda a: get(a.reshape(chunks, -1, *a.shape[1:]), v), tree) if chunks > 1 else tree

    def enter(self, outer: Tree, m: Array) -> Array:
        """A micro-batch behind the embedding, the same on all stages."""
        s, rows = self.s, self.rows(m)
        # what the weights wait for has to be used besides: XLA drops a barrier's operand that is not, and gathers once before the loop
        live = outer_weights(s.model.specs(s.config), s.layout, outer, outside(self.whole), rows.tokens)
        return s.model.embed(s.config, s.layout, live, rows.tokens, context(rows, self.key))

    def leave(self, outer: Tree, x: Array, m: Array, head: Callable) -> tuple[Array, dict[str, Array]]:
        """The head's sum and sums of a micro-batch whose x is the same on all stages."""
        s, rows = self.s, self.rows(m)
        live = outer_weights(s.model.specs(s.config), s.layout, outer, outside(self.whole), rows.samples)
        return head(live, s.model.final(s.config, s.layout, live, x), rows)

    def layers(self, v: Array) -> Layers:
        """The weights of chunk v."""
        return Layers(self.chunk(self.w.layers, v), self.chunk(self.whole.layers, v), None)

    def part(self, layers: Layers, x: Array, m: Array, v: Array, late: Array | None = None) -> tuple[Array, Tree]:
        """x through this stage's chunk v, and what its layers told.  late: as in models.base.Ctx."""
        s, ctx = self.s, context(self.rows(m), self.key)
        numbers = jnp.asarray(s.place.layers)[self.stage, v]
        segments = None if ctx.segments is None else after(ctx.segments, x, m)
        rotary, documents = s.model.rotary(s.config, ctx.positions), whole_rows(s.layout, segments)
        real = numbers >= 0 if s.place.masked else None
        ctx = replace(ctx, segments=segments, rotary=rotary, documents=documents, layer=jnp.maximum(numbers, 0), real=real, late=late)
        y, _, told = run(s.model, s.config, s.layout.within, layers, x, ctx, s.how, s.place.kinds)
        return y, told

    def entered(self, r: Row, often: Often) -> Array:
        """The micro-batch that enters in a tick, behind the embedding."""
        return often.run(lambda m: self.enter(outside(self.w), m), r["enter"])

    def first(self, inbox: Array, entered: Array, r: Row) -> Array:
        """The input of a tick's forward: from the embedding in the first part, else what has arrived."""
        new = (self.stage == 0) & (r["forward_chunk"] == 0)
        return jnp.where(new, vary(entered, (PIPE,)), get(inbox, r["forward_from"]))

    def send(self, x: Array, by: int) -> Array:
        """What the stage before (by = 1) or behind (-1) this one has sent."""
        n = self.s.layout.stages
        return lax.ppermute(x, PIPE, [(i, (i + by) % n) for i in range(n)])

    def share(self, x: Array, stage: int) -> Array:
        """One stage's x on all stages."""
        return lax.psum(jnp.where(self.stage == stage, x, jnp.zeros_like(x)), PIPE)

    def joined(self, told: Tree) -> Tree:
        """What layers told, from [chunks, slots that tell, ...] on their stages to [layers that tell, ...] in their order on all; sums as they are."""
        where = self.s.place
        tells = [i for i, kind in enumerate(where.kinds) if kind.tells]
        telling = np.cumsum([kind.tells for kind in self.s.model.kinds(self.s.config)])
        numbers = where.layers[:, :, tells].reshape(self.s.layout.stages, -1)
        ranks = jnp.asarray(np.where(numbers < 0, -1, telling[numbers] - 1))[self.stage]

        def one(a: Array) -> Array:
            if a.ndim == 1:
                return lax.psum(a.sum(0), PIPE)
            return lax.psum(spread(a.reshape(-1, *a.shape[2:]), ranks, int(telling[-1])), PIPE)

        return jax.tree.map(one, told)


def after(x: Array, other: Array, m: Array) -> Array:
    """x, not before `other` is known. The collectives of a tick must begin in the same order on every device: XLA on a CPU takes those that are ready as
    they come, and two devices that begin with different ones wait for each other. A barrier would not hold there.  m: a number of the tick's, which
    no compiler knows to be more than -2."""
    return jnp.where(m < -1, other.ravel()[0].astype(x.dtype), x)


def get(ring: Array, slot: Array) -> Array:
    """One slot of a ring."""
    return lax.dynamic_index_in_dim(ring, slot, 0, keepdims=False)


def put(ring: Array, slot: Array, x: Array) -> Array:
    """A ring with x in one slot."""
    return lax.dynamic_update_index_in_dim(ring, x.astype(ring.dtype), slot, 0)


def blank(a: Any, lead: tuple[int, ...] = (), dtype: Any = None) -> Array:
    """Zeros like an array, with more axes before its own."""
    return vary(jnp.zeros((*lead, *a.shape), dtype or a.dtype), varying(a))
