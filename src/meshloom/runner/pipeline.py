"""A schedule's table as one program that every stage of a pipeline runs.

All stages keep step: in a tick each runs the kinds of work that any stage has in it, on a micro-batch of its own; work of none is computed and not
counted. So no collective stands in a branch that only some devices take, and everything that splits a layer works inside a stage. Ticks of the same
kinds are one loop. A stage keeps the inputs of its parts in rings of the table's sizes, and its backward computes the rest again.

Embedding and head are the work of all stages together, split by vocabulary: what enters and leaves the pipeline is shared over its devices.
Gradients are added up in fp32 on their stage and leave it once a step, as without a pipeline; what is frozen has none, and no sum is kept for it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from meshloom.core.batch import Batch
from meshloom.core.late import waits
from meshloom.core.layout import PIPE
from meshloom.core.spec import is_spec, trained, with_frozen
from meshloom.core.tree import Tree, pytree
from meshloom.core.vary import vary, varying
from meshloom.models.base import Ctx
from meshloom.parallel.pipe import stashes
from meshloom.parallel.slots import Table, arrivals, forward_only, segments
from meshloom.runner.gather import outside
from meshloom.runner.run import Layers
from meshloom.runner.stage import Often, Part, Row, Stage, after, blank, get, put

SHARED = ("enter", "leave", "exit")
"""Columns that are the same for all stages."""


@pytree
class Rings:
    """What a stage keeps from tick to tick. inbox: inputs that have arrived. kept: inputs or more, from forward to backward. grads: gradients of outputs.
    late: what a backward leaves for the gradients of weights. dx: what is sent next.
    layers, outer: gradients, fp32. sums: of the head, for the log. told: of each chunk, what its layers tell."""

    inbox: Array
    kept: tuple[Array, ...]
    grads: Array
    late: tuple[Array, ...]
    dx: Array
    layers: Tree
    outer: Tree
    sums: Tree
    told: Tree


@pytree
class Passing:
    """What a stage keeps where there is no backward. out: [micro + 1, ...], outputs of the last part."""

    inbox: Array
    out: Array
    told: Tree


@dataclass(frozen=True)
class Step(Part):
    """The slots of a training step.  head: (live weights outside the layers, x behind the last norm, rows) -> the sum to differentiate, and named sums.
    share_of: the factor of that sum. splits: whether the table has W. stash: whether a stage keeps what its backward needs, else its input alone.
    The rest is known once `start` has looked: later, what a B leaves for its W, pull, what an F keeps for its B (structures of trees); given, which of
    the latter's leaves are weights, by their place, and not kept; extra, one, as a cotangent of what layers add to the loss."""

    head: Callable
    share_of: Array
    splits: bool
    stash: bool
    later: Any = None
    pull: Any = None
    given: tuple[int | None, ...] = ()
    extra: Any = None

    @property
    def specs(self) -> Tree:
        """Of the whole model."""
        return self.s.model.specs(self.s.config)

    def pulled(self, layers: Layers, late: Array | None, x: Array, m: Array, v: Array) -> tuple[Array, Array, Any, dict[str, Array]]:
        """A part's output, what its layers add to the loss, the function from their cotangents to gradients of weights and input, and sums."""
        specs = self.specs.layers

        def both(mine: Tree, x: Array) -> tuple[tuple[Array, Array], dict[str, Array]]:
            y, told = self.part(layers._replace(w=with_frozen(specs, mine, layers.w)), x, m, v, late)
            extra, more = self.s.model.extra(self.s.config, self.s.layout.within, told)
            return (y, jnp.asarray(extra) * self.share_of), more

        (y, extra), pull, more = jax.vjp(both, trained(specs, layers.w), x, has_aux=True)
        return y, extra, pull, more

    @property
    def waiting(self) -> Array | None:
        """What gradients of matrices are multiplied by in B: 0 where W makes them."""
        return self.number(0.0) if self.splits else None

    def number(self, n: float) -> Array:
        """A number as a stage's own."""
        return vary(jnp.float32(n), (PIPE, *self.s.layout.tokens))

    def forward(self, c: Rings, r: Row, x: Array) -> tuple[Array, Rings]:
        """F: a part's output, and into the rings its input, or what its backward needs."""
        m, v, told = r["forward"], r["forward_chunk"], c.told
        if self.stash:
            y, _, pull, more = self.pulled(self.layers(v), self.waiting, x, m, v)
            new, told = self.fresh(pull), _add_rows(told, _real(m, more), v)
        else:
            y, new = self.part(self.layers(v), x, m, v)[0], [x]
        kept = tuple(put(ring, r["forward_keep"], a) for ring, a in zip(c.kept, new, strict=True))
        return y, replace(c, kept=kept, told=told)

    def fresh(self, pull: Any) -> list[Array]:
        """What of a backward pass is no weight."""
        return [leaf for leaf, at in zip(jax.tree.leaves(pull), self.given, strict=True) if at is None]

    def head_pass(self, y: Array, m: Array) -> tuple[Tree, Array, dict[str, Array]]:
        """The head forward and backward: gradients of its weights and of x, and the sums."""
        specs, outer = outside(self.specs), outside(self.w)

        def total(mine: Tree, x: Array) -> tuple[Array, dict[str, Array]]:
            total, sums = self.leave(with_frozen(specs, mine, outer), x, m, self.head)
            return total * self.share_of, sums

        x = self.share(y, self.s.layout.stages - 1)
        (_, sums), (douter, dx) = jax.value_and_grad(total, (0, 1), has_aux=True)(trained(specs, outer), x)
        return douter, dx, sums

    def last(self, y: Array, c: Rings, r: Row, often: Often) -> Rings:
        """The head of the micro-batch that leaves the pipeline."""
        douter, dx, sums = often.run(partial(self.head_pass, y), r["leave"])
        add = lambda total, new: jax.tree.map(lambda t, n: t + n.astype(t.dtype), total, new)
        return replace(c, grads=put(c.grads, r["leave_to"], vary(dx, (PIPE,))), outer=add(c.outer, douter), sums=add(c.sums, sums))

    def backward_pass(
        self, kept: Sequence[Array], dy: Array, m: Array, v: Array, late: Array | None
    ) -> tuple[Tree, Array, dict[str, Array]]:
        """A part's gradients, of its weights and its input, and, where its forward did not say, what its layers add to the sums."""
        if not self.stash:
            _, extra, pull, more = self.pulled(self.layers(v), late, kept[0], m, v)
            return *pull((dy, vary(jnp.ones_like(extra), varying(extra)))), more
        weights, rest = jax.tree.leaves((self.layers(v), late)), iter(kept)
        pull = jax.tree.unflatten(self.pull, [next(rest) if at is None else weights[at] for at in self.given])
        return *pull((dy, blank(self.extra) + 1)), {}

    def split_pass(self, kept: Sequence[Array], dy: Array, m: Array, v: Array) -> tuple[tuple[Tree, Array, dict[str, Array]], Any]:
        """As `backward_pass` without the gradients that can wait, which are 0, and the function that makes these of 1."""
        return jax.linearize(lambda late: self.backward_pass(kept, dy, m, v, late), self.waiting)

    def backward(self, c: Rings, r: Row, known: Array) -> Rings:
        """B: a part's gradients; where the table has W, those of its matrices are left for it.  known: what comes before it in a tick."""
        m, v, dy = r["backward"], r["backward_chunk"], after(get(c.grads, r["backward_from"]), known, r["backward"])
        kept = [after(get(ring, r["backward_kept"]), known, r["backward"]) for ring in c.kept]
        if self.splits:
            (dlayers, dx, more), later = self.split_pass(kept, dy, m, v)
            c = replace(c, late=tuple(put(a, r["backward_late"], new) for a, new in zip(c.late, jax.tree.leaves(later), strict=True)))
        else:
            dlayers, dx, more = self.backward_pass(kept, dy, m, v, None)
        told = c.told if self.stash else _add_rows(c.told, _real(m, more), v)
        return replace(c, dx=dx, layers=self.added(c.layers, dlayers, m, v, False), told=told)

    def weight(self, c: Rings, r: Row) -> Rings:
        """W: the gradients that a backward left."""
        m, v = r["weight"], r["weight_chunk"]
        later = jax.tree.unflatten(self.later, [get(a, r["weight_from"]) for a in c.late])
        return replace(c, layers=self.added(c.layers, later(self.number(1.0))[0], m, v, True))

    def added(self, total: Tree, new: Tree, m: Array, v: Array, late: bool) -> Tree:
        """Gradients of a chunk's layers added to the stage's, those that W makes or, not late, the others."""
        specs, chunks = self.specs.layers, self.s.place.layers.shape[1]
        mine = lambda s: not s.frozen and late == (self.splits and waits(self.s.layout, s))
        return jax.tree.map(lambda s, t, n: _add(t, _real(m, n), v, chunks) if mine(s) else t, specs, total, new, is_leaf=is_spec)

    def exit_pass(self, dx: Array, m: Array) -> Tree:
        """The embedding backward."""
        specs, outer = outside(self.specs), outside(self.w)
        return jax.vjp(lambda mine: self.enter(with_frozen(specs, mine, outer), m), trained(specs, outer))[1](self.share(dx, 0))[0]

    def exit(self, c: Rings, r: Row, often: Often) -> Rings:
        """The embedding's gradient of the micro-batch whose backward has come to the first part."""
        douter = often.run(partial(self.exit_pass, c.dx), r["exit"])
        return replace(c, outer=jax.tree.map(lambda t, n: t + n.astype(t.dtype), c.outer, douter))

    def start(self, sizes: dict[str, int]) -> tuple["Step", Rings]:
        """The step with what it needs to know, and empty rings and sums."""
        x, m, some, chunks = _arrives(self), jnp.int32(0), self.stage, (self.s.place.layers.shape[1],)
        _, extra, pull, more = jax.eval_shape(lambda: self.pulled(self.layers(some), self.waiting, x, some, some))
        step = replace(self, pull=jax.tree.structure(pull), given=self.passed(x), extra=extra)
        kept = step.fresh(pull) if self.stash else [x]
        blanks = [vary(blank(a), (PIPE,)) for a in kept]
        dlayers = jax.eval_shape(lambda: step.backward_pass(blanks, x, some, some, self.waiting))[0]
        later = jax.eval_shape(lambda: step.split_pass(blanks, x, some, some)[1]) if self.splits else None
        (douter, _, sums), also = jax.eval_shape(lambda: self.head_pass(x, m)), jax.eval_shape(lambda: self.exit_pass(x, m))
        ring = lambda name, a: vary(blank(a, (sizes[name],)), (PIPE,))
        rings = Rings(
            inbox=ring("inbox", x),
            kept=tuple(ring("kept", a) for a in kept),
            grads=ring("grads", x),
            late=tuple(ring("late", a) for a in jax.tree.leaves(later)),
            dx=x,
            layers=jax.tree.map(
                lambda w, g: vary(jnp.zeros(w.shape, jnp.float32), varying(g)), trained(self.specs.layers, self.w.layers), dlayers
            ),
            outer=jax.tree.map(lambda a, b: vary(blank(a, dtype=jnp.float32), varying(b)), douter, also),
            sums=jax.tree.map(blank, sums),
            told=jax.tree.map(lambda a: vary(blank(a, chunks), (PIPE,)), more),
        )
        return replace(step, later=jax.tree.structure(later)), rings

    def passed(self, x: Array) -> tuple[int | None, ...]:
        """Of each leaf of what a backward pass needs: which leaf of (weights, late) it is, if it is one of them."""
        leaves, tree = jax.tree.flatten((self.layers(self.stage), self.waiting))

        def needed(leaves: list[Array]) -> list[Array]:
            layers, late = jax.tree.unflatten(tree, leaves)
            return jax.tree.leaves(self.pulled(layers, late, x, self.stage, self.stage)[2])

        program = jax.make_jaxpr(needed)(leaves).jaxpr
        return tuple(next((i for i, given in enumerate(program.invars) if given is out), None) for out in program.outvars)

    def tick(self, kinds: tuple[bool, bool, bool], often: dict[str, Often], c: Rings, row: Row) -> tuple[Rings, None]:
        """One tick.  kinds: which of F, B, W any stage has.  often: of each column of SHARED, and of what arrives."""
        r = {name: a if name in SHARED else a[self.stage] for name, a in row.items()}
        known = entered = self.entered(r, often["enter"]) if kinds[0] else c.dx
        if often["arrive_g"].ticks:  # sent by the last backward, while the forward before this went on
            known = self.send(after(c.dx, entered, r["forward"]), -1)
            c = replace(c, grads=put(c.grads, r["arrive_g"], known))
        if kinds[0]:
            known, c = self.forward(c, r, after(self.first(c.inbox, entered, r), known, r["forward"]))
            y = known
            if often["arrive_x"].ticks:
                known = self.send(y, 1)
                c = replace(c, inbox=put(c.inbox, r["arrive_x"], known))
            c = self.last(after(y, known, r["forward"]), c, r, often["leave"]) if often["leave"].ticks else c
        if kinds[1]:
            c = self.backward(c, r, known)
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
    step, c = Step(s, w, whole, batch, key, head, share, table.schedule.splits, stashes(s.layout)).start(table.sizes)
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
    told = jax.eval_shape(lambda: part.part(part.layers(some), x, some, some)[1])
    told = jax.tree.map(lambda a: vary(blank(a, (s.place.layers.shape[1],)), (PIPE,)), told)

    def tick(often: Often, c: Passing, row: Row) -> tuple[Passing, None]:
        r = {name: a if name in SHARED else a[part.stage] for name, a in row.items()}
        m, v = r["forward"], r["forward_chunk"]
        y, said = part.part(part.layers(v), part.first(c.inbox, part.entered(r, often), r), m, v)
        said = jax.tree.map(lambda a: jnp.where(m >= 0, a, jnp.zeros_like(a)), said)
        out = put(c.out, jnp.where(r["leave"] >= 0, r["leave"], micro), y)
        return Passing(put(c.inbox, r["arrive_x"], part.send(y, 1)), out, _add_rows(c.told, said, v)), None

    c = Passing(blank(x, (table.sizes["inbox"],)), blank(x, (micro + 1,)), told)
    for start, stop, _ in segments(table):
        rows, often = _cut(table, start, stop)
        c, _ = lax.scan(partial(tick, often["enter"]), c, rows)
    x = part.share(c.out[:micro], s.layout.stages - 1)
    return x.reshape(-1, *x.shape[2:]), part.joined(c.told) if jax.tree.leaves(told) else None


def _cut(table: Table, start: int, stop: int) -> tuple[Row, dict[str, Often]]:
    """Ticks of a table as a loop takes them; how often each of SHARED is set in them, and something arrives at any stage: in a loop of ticks in which
    nothing does, nothing is sent."""
    rows = {name: jnp.asarray(a[start:stop, 0] if name in SHARED else a[start:stop]) for name, a in table.columns.items()}
    there = {name: table.columns[name][:, 0] >= 0 for name in SHARED} | arrivals(table.schedule)
    return rows, {name: Often(int(ticks[start:stop].sum()), stop - start) for name, ticks in there.items()}


def _arrives(p: Part) -> Array:
    """Zeros like what goes from stage to stage."""
    x = jax.eval_shape(lambda: p.enter(outside(p.w), jnp.int32(0)))
    x, some = vary(blank(x), (PIPE,)), p.stage
    y = jax.eval_shape(lambda: p.part(p.layers(some), x, some, some)[0])
    return vary(x, varying(y))


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
