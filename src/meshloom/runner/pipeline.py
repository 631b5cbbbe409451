"""A schedule's table as one program that every stage of a pipeline runs.

All stages keep step: in a tick each runs the kinds of work that any stage has in it, on a micro-batch of its own; work of none is computed and not
counted. So no collective stands in a branch that only some devices take, and everything that splits a layer works inside a stage. Ticks of the same
kinds are one loop. A stage keeps the inputs of its parts in rings of the table's sizes, and its backward computes the rest again.

Embedding and head are the work of all stages together, split by vocabulary: what enters and leaves the pipeline is shared over its devices.
Gradients are added up in fp32 on their stage and leave it once a step, as without a pipeline.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from meshloom.core.batch import Batch
from meshloom.core.late import waits
from meshloom.core.layout import PIPE, Layout
from meshloom.core.leaf import whole_rows
from meshloom.core.spec import is_spec
from meshloom.core.tree import Tree, pytree
from meshloom.core.vary import vary, varying
from meshloom.models.base import Ctx, Model, context
from meshloom.parallel.pipe import chunks_in
from meshloom.parallel.slots import COLUMNS, Table, forward_only, segments
from meshloom.runner.gather import outer_weights, outside
from meshloom.runner.place import Place, place, spread
from meshloom.runner.run import How, Layers, run

Row = dict[str, Array]
"""One tick of a table as one stage reads it: micro-batches (-1: none), chunks and slots of rings."""
SHARED = ("enter", "leave", "exit")
"""Columns that are the same for all stages."""
ARRIVE = ("arrive_x", "arrive_g")
"""Columns of what comes from other stages. In a loop of ticks in which nothing does, nothing is sent."""


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
    return place(model.kinds(c), lay.stages, chunks_in(lay)) if lay.stages > 1 else None


@pytree
class Rings:
    """What a stage keeps from tick to tick. inbox: inputs that have arrived. kept: inputs, from forward to backward. grads: gradients of outputs.
    late: what a backward leaves for the gradients of weights. Each has one slot more, which dummy work reads and writes. y, dx: what is sent next.
    layers, outer: gradients, fp32. sums: of the head, for the log. told: of each chunk, what its layers tell."""

    inbox: Array
    kept: Array
    grads: Array
    late: tuple[Array, ...]
    y: Array
    dx: Array
    layers: Tree
    outer: Tree
    sums: Tree
    told: Tree


@pytree
class Passing:
    """What a stage keeps where there is no backward. out: [micro + 1, ...], outputs of the last part."""

    inbox: Array
    y: Array
    out: Array
    told: Tree


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
            return jax.tree.map(_blank, shapes)
        with jax.named_scope(f"ticks_{self.ticks}_of_{self.of}"):
            return lax.cond(m >= 0, make, lambda m: jax.tree.map(_blank, shapes), m)


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

    def part(self, weights: Tree, x: Array, m: Array, v: Array, late: Array | None = None) -> tuple[Array, Tree]:
        """x through this stage's chunk v, and what its layers told.  late: as in models.base.Ctx."""
        s, ctx = self.s, context(self.rows(m), self.key)
        numbers = jnp.asarray(s.place.layers)[self.stage, v]
        where = replace(ctx, layer=jnp.maximum(numbers, 0), real=numbers >= 0 if s.place.masked else None, late=late)
        ctx = replace(where, rotary=s.model.rotary(s.config, ctx.positions), documents=whole_rows(s.layout, ctx.segments))
        layers = Layers(weights, self.chunk(self.whole.layers, v), None)
        y, _, told = run(s.model, s.config, s.layout.within, layers, x, ctx, s.how, s.place.kinds)
        return y, told

    def first(self, inbox: Array, r: Row, often: Often) -> Array:
        """The input of a tick's forward: from the embedding in the first part, else what has arrived."""
        entered = often.run(lambda m: self.enter(outside(self.w), m), r["enter"])
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


@dataclass(frozen=True)
class Step(Part):
    """The slots of a training step.  head: (live weights outside the layers, x behind the last norm, rows) -> the sum to differentiate, and named sums.
    share_of: the factor of that sum. splits: whether the table has W. later: the structure of what B leaves for it."""

    head: Callable
    share_of: Array
    splits: bool
    later: Any = None

    def forward(self, c: Rings, r: Row, often: Often) -> Rings:
        """F: a part's output, and its input into the ring."""
        x = self.first(c.inbox, r, often)
        y, _ = self.part(self.chunk(self.w.layers, r["forward_chunk"]), x, r["forward"], r["forward_chunk"])
        return replace(c, y=y, kept=put(c.kept, r["forward_keep"], x))

    def head_pass(self, y: Array, m: Array) -> tuple[Tree, Array, dict[str, Array]]:
        """The head forward and backward: gradients of its weights and of x, and the sums."""

        def total(outer: Tree, x: Array) -> tuple[Array, dict[str, Array]]:
            total, sums = self.leave(outer, x, m, self.head)
            return total * self.share_of, sums

        x = self.share(y, self.s.layout.stages - 1)
        (_, sums), (douter, dx) = jax.value_and_grad(total, (0, 1), has_aux=True)(outside(self.w), x)
        return douter, dx, sums

    def last(self, c: Rings, r: Row, often: Often) -> Rings:
        """The head of the micro-batch that leaves the pipeline."""
        douter, dx, sums = often.run(partial(self.head_pass, c.y), r["leave"])
        add = lambda total, new: jax.tree.map(lambda t, n: t + n.astype(t.dtype), total, new)
        return replace(c, grads=put(c.grads, r["leave_to"], vary(dx, (PIPE,))), outer=add(c.outer, douter), sums=add(c.sums, sums))

    def backward_pass(self, x: Array, dy: Array, m: Array, v: Array, late: Array | None = None) -> tuple[Tree, Array, dict[str, Array]]:
        """A part's gradients, of its weights and its input, and what its layers add to the sums."""

        def both(weights: Tree, x: Array) -> tuple[tuple[Array, Array], dict[str, Array]]:
            y, told = self.part(weights, x, m, v, late)
            extra, more = self.s.model.extra(self.s.config, self.s.layout.within, told)
            return (y, jnp.asarray(extra) * self.share_of), more

        (_, extra), pull, more = jax.vjp(both, self.chunk(self.w.layers, v), x, has_aux=True)
        return *pull((dy, vary(jnp.ones_like(extra), varying(extra)))), more

    def split_pass(self, x: Array, dy: Array, m: Array, v: Array) -> tuple[tuple[Tree, Array, dict[str, Array]], Any]:
        """As `backward_pass` without the gradients that can wait, which are 0, and the function that makes these of 1."""
        return jax.linearize(lambda late: self.backward_pass(x, dy, m, v, late), vary(jnp.zeros(()), varying(dy)))

    def backward(self, c: Rings, r: Row) -> Rings:
        """B: a part's gradients; where the table has W, those of its matrices are left for it."""
        m, v, given = r["backward"], r["backward_chunk"], (get(c.kept, r["backward_kept"]), get(c.grads, r["backward_from"]))
        if self.splits:
            (dlayers, dx, more), later = self.split_pass(*given, m, v)
            c = replace(c, late=tuple(put(a, r["backward_late"], new) for a, new in zip(c.late, jax.tree.leaves(later), strict=True)))
        else:
            dlayers, dx, more = self.backward_pass(*given, m, v)
        return replace(c, dx=dx, layers=self.added(c.layers, dlayers, m, v, False), told=_add_rows(c.told, _real(m, more), v))

    def weight(self, c: Rings, r: Row) -> Rings:
        """W: the gradients that a backward left."""
        m, v = r["weight"], r["weight_chunk"]
        later = jax.tree.unflatten(self.later, [get(a, r["weight_from"]) for a in c.late])
        return replace(c, layers=self.added(c.layers, later(vary(jnp.ones(()), varying(c.dx)))[0], m, v, True))

    def added(self, total: Tree, new: Tree, m: Array, v: Array, late: bool) -> Tree:
        """Gradients of a chunk's layers added to the stage's, those that W makes or, not late, the others."""
        specs, chunks = self.s.model.specs(self.s.config).layers, self.s.place.layers.shape[1]
        mine = lambda s: late == (self.splits and waits(self.s.layout, s))
        return jax.tree.map(lambda s, t, n: _add(t, _real(m, n), v, chunks) if mine(s) else t, specs, total, new, is_leaf=is_spec)

    def exit_pass(self, dx: Array, m: Array) -> Tree:
        """The embedding backward."""
        return jax.vjp(lambda outer: self.enter(outer, m), outside(self.w))[1](self.share(dx, 0))[0]

    def exit(self, c: Rings, r: Row, often: Often) -> Rings:
        """The embedding's gradient of the micro-batch whose backward has come to the first part."""
        douter = often.run(partial(self.exit_pass, c.dx), r["exit"])
        return replace(c, outer=jax.tree.map(lambda t, n: t + n.astype(t.dtype), c.outer, douter))

    def start(self, slots: dict[str, int]) -> tuple["Step", Rings]:
        """Empty rings and sums."""
        m, some = jnp.int32(0), self.stage
        x = _arrives(self)
        douter, _, sums = jax.eval_shape(lambda: self.head_pass(x, m))
        dlayers, _, more = jax.eval_shape(lambda: self.backward_pass(x, x, some, some))
        also = jax.eval_shape(lambda: self.exit_pass(x, m))
        ring = lambda name: _blank(x, (slots[name] + 1,))
        outer = jax.tree.map(lambda a, b: vary(_blank(a, dtype=jnp.float32), varying(b)), douter, also)
        layers = jax.tree.map(
            lambda w, g: _blank(g, dtype=jnp.float32) if w.shape == g.shape else vary(jnp.zeros(w.shape, jnp.float32), varying(g)),
            self.w.layers,
            dlayers,
        )
        chunks = (self.s.place.layers.shape[1],)
        told = jax.tree.map(lambda a: vary(_blank(a, chunks), (PIPE,)), more)
        left = jax.eval_shape(lambda: self.split_pass(x, x, some, some)[1]) if self.splits else None
        late = tuple(vary(_blank(a, (slots["late"] + 1,)), (PIPE,)) for a in jax.tree.leaves(left))
        rings = Rings(ring("inbox"), ring("kept"), ring("grads"), late, x, x, layers, outer, jax.tree.map(_blank, sums), told)
        return replace(self, later=jax.tree.structure(left)), rings

    def tick(self, kinds: tuple[bool, bool, bool], often: dict[str, Often], c: Rings, row: Row) -> tuple[Rings, None]:
        """One tick.  kinds: which of F, B, W any stage has.  often: of each column of SHARED, and of what arrives."""
        r = {name: a if name in SHARED else a[self.stage] for name, a in row.items()}
        if often["arrive_g"].ticks:  # sent by the last backward, while the forward before this went on
            c = replace(c, grads=put(c.grads, r["arrive_g"], self.send(c.dx, -1)))
        if kinds[0]:
            c = self.forward(c, r, often["enter"])
            c = replace(c, inbox=put(c.inbox, r["arrive_x"], self.send(c.y, 1))) if often["arrive_x"].ticks else c
            c = self.last(c, r, often["leave"]) if often["leave"].ticks else c
        if kinds[1]:
            c = self.backward(c, r)
            c = self.exit(c, r, often["exit"]) if often["exit"].ticks else c
        if kinds[2]:
            c = self.weight(c, r)
        return c, None


def gradient(
    s: Stage, table: Table, head: Callable, w: Tree, whole: Tree, batch: Batch, key: Any, share: Array
) -> tuple[Tree, dict[str, Array]]:
    """The gradient of every micro-batch, added up in fp32 as `grad` splits it, and the sums for the log.

    head: (live weights outside the layers, x behind the last norm, rows) -> the sum to differentiate, and named sums.  w, whole: this stage's weights.
    batch: [micro, batch, seq].  share: the factor of that sum.
    """
    step, c = Step(s, w, whole, batch, key, head, share, table.schedule.splits).start(table.slots)
    for start, stop, kinds in segments(table):
        rows, often = _cut(table, start, stop)
        c, _ = lax.scan(partial(step.tick, kinds, often), c, rows)
    return replace(c.outer, layers=c.layers), {**c.sums, **step.joined(c.told)}


def through(s: Stage, w: Tree, whole: Tree, tokens: Array, ctx: Ctx) -> tuple[Array, Tree]:
    """Tokens through embedding and all layers, forward alone.  tokens: [batch, whole_seq].  Returns x [batch, seq, embed], equal on all stages, and
    what the layers told, stacked in their order.  Rows go in as many micro-batches as they can be cut into, up to four a stage."""
    micro = max(n for n in range(1, min(len(tokens), 4 * s.layout.stages) + 1) if len(tokens) % n == 0)
    cut = lambda a: a.reshape(micro, -1, *a.shape[1:])
    given = Batch(tokens, None, None, ctx.segments, ctx.positions, ctx.samples)  # type: ignore[arg-type]  # no loss here
    part, table = Part(s, w, whole, jax.tree.map(cut, given), ctx.key), forward_only(s.layout.stages, micro, s.place.layers.shape[1])
    x, some = _arrives(part), part.stage
    told = jax.eval_shape(lambda: part.part(part.chunk(w.layers, some), x, some, some)[1])
    told = jax.tree.map(lambda a: vary(_blank(a, (s.place.layers.shape[1],)), (PIPE,)), told)

    def tick(often: Often, c: Passing, row: Row) -> tuple[Passing, None]:
        r = {name: a if name in SHARED else a[part.stage] for name, a in row.items()}
        m, v = r["forward"], r["forward_chunk"]
        y, said = part.part(part.chunk(w.layers, v), part.first(c.inbox, r, often), m, v)
        said = jax.tree.map(lambda a: jnp.where(m >= 0, a, jnp.zeros_like(a)), said)
        out = put(c.out, jnp.where(r["leave"] >= 0, r["leave"], micro), y)
        return Passing(put(c.inbox, r["arrive_x"], part.send(y, 1)), y, out, _add_rows(c.told, said, v)), None

    c = Passing(_blank(x, (table.slots["inbox"] + 1,)), x, _blank(x, (micro + 1,)), told)
    for start, stop, _ in segments(table):
        rows, often = _cut(table, start, stop)
        c, _ = lax.scan(partial(tick, often["enter"]), c, rows)
    x = part.share(c.out[:micro], s.layout.stages - 1)
    return x.reshape(-1, *x.shape[2:]), part.joined(c.told) if jax.tree.leaves(told) else None


def get(ring: Array, slot: Array) -> Array:
    """One slot of a ring."""
    return lax.dynamic_index_in_dim(ring, slot, 0, keepdims=False)


def put(ring: Array, slot: Array, x: Array) -> Array:
    """A ring with x in one slot."""
    return lax.dynamic_update_index_in_dim(ring, x.astype(ring.dtype), slot, 0)


def _cut(table: Table, start: int, stop: int) -> tuple[Row, dict[str, Often]]:
    """Ticks of a table as a loop takes them; how often each of SHARED is set in them, and something arrives at any stage."""
    rows = {name: jnp.asarray(a[start:stop, 0] if name in SHARED else a[start:stop]) for name, a in table.columns.items()}
    count = lambda set: Often(int(set.any(1).sum()), stop - start)
    often = {name: count(table.columns[name][start:stop] >= 0) for name in SHARED}
    return rows, often | {name: count(table.columns[name][start:stop] < table.slots[COLUMNS[name]]) for name in ARRIVE}


def _arrives(p: Part) -> Array:
    """Zeros like what goes from stage to stage."""
    x = jax.eval_shape(lambda: p.enter(outside(p.w), jnp.int32(0)))
    x, some = vary(_blank(x), (PIPE,)), p.stage
    y = jax.eval_shape(lambda: p.part(p.chunk(p.w.layers, some), x, some, some)[0])
    return vary(x, varying(y))


def _blank(a: Any, lead: tuple[int, ...] = (), dtype: Any = None) -> Array:
    """Zeros like an array, with more axes before its own."""
    return vary(jnp.zeros((*lead, *a.shape), dtype or a.dtype), varying(a))


def _real(m: Array, tree: Tree) -> Tree:
    """The work of a micro-batch; 0 for -1."""
    return jax.tree.map(lambda a: jnp.where(m >= 0, a, jnp.zeros_like(a)), tree)


def _add(total: Array, new: Array, v: Array, chunks: int) -> Array:
    """The gradient of one chunk's layers added to that of a stage's."""
    if chunks == 1:
        return total + new.astype(total.dtype)
    at, size = v * len(new), len(new)
    return lax.dynamic_update_slice_in_dim(total, lax.dynamic_slice_in_dim(total, at, size) + new.astype(total.dtype), at, 0)


def _add_rows(total: Tree, new: Tree, v: Array) -> Tree:
    """Sums of one chunk added to its own.  total: leaves with a leading axis of chunks."""
    return jax.tree.map(lambda t, n: put(t, v, get(t, v) + n), total, new)
