"""What one step of a model moves between devices under a layout: the sum of its strategies' formulas, and how that compares with a compiled program."""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from meshloom.core.layout import PIPE, Layout
from meshloom.core.order import padded
from meshloom.core.remat import group_of, spelled, words_of
from meshloom.core.spec import Spec, is_spec
from meshloom.core.tree import Tree, map_named
from meshloom.models.base import Kind, Model
from meshloom.parallel import pipe
from meshloom.parallel.base import LAYER, PLACES, Collective, Shapes, merge, ordered
from meshloom.parallel.part import by_remat, restricted, unreached
from meshloom.parallel.table import STRATEGIES, parse
from meshloom.plan.hlo import Found
from meshloom.runner.place import Place, ranks
from meshloom.runner.run import How, stacks
from meshloom.runner.stage import placed

SUMS = 4
"""Numbers that the language-modelling objective adds up for the log: loss, z, correct, tokens."""


def shapes(model: Model, c: Any, layout: Layout, seq: int, sequences: int, micro: int, how: How, dtype: str, packed: bool = True) -> Shapes:
    """What a step's traffic depends on.  sequences: of the whole step, over all devices and micro-batches.  packed: whether rows hold several
    documents.  Raises ValueError where these do not divide."""
    split = (*layout.batch, *layout.inner)
    cut = micro * layout.size(split)
    if sequences % cut:
        by = " x ".join(f"{a}={layout.sizes[a]}" for a in split)
        raise ValueError(
            f"A batch of {sequences} sequences cannot be cut into {micro} micro-batches over {cut // micro} devices ({by or 'one'}). "
            f"Use batch.sequences that is a multiple of {cut}."
        )
    told, where = model.told(c), placed(model, c, layout)
    parts = math.prod(where.layers.shape[:2]) if where else 1
    return Shapes(
        specs=as_run(model, c, layout),
        config=c,
        layout=layout,
        rows=sequences // (micro * layout.size(layout.batch)),
        seq=padded(layout, seq) // layout.size(layout.acts.get("whole_seq", ())),
        micro=micro,
        remat=spelled(
            words_of(how.remat, len(where.kinds) if where else c.layers, "slots in a part of the pipeline" if where else "layers")
        ),
        dtype=dtype,
        straight=straight(model, c, layout, how),
        sums=SUMS + told.sums,
        told=told,
        parallel=model.parallel(c),
        wide=model.wide(c),
        kinds=model.kinds(c),
        packed=packed,
        run=where.kinds * parts if where else model.kinds(c),
        flow=pipe.flow(layout, micro, parts, how.runner == "unroll" or stacks(where.kinds, how.remat)[-1].repeat == 1, heavy(where))
        if where
        else None,
    )


def heavy(where: Place) -> tuple[Kind, ...]:
    """Kinds of the layers of the part that has most."""
    parts = where.layers.reshape(-1, len(where.kinds)) >= 0
    return tuple(kind for kind, filled in zip(where.kinds, parts[parts.sum(1).argmax()]) if filled)


def as_run(model: Model, c: Any, layout: Layout) -> Tree:
    """The specs with as many layers in each stack as a pipeline's stages have slots for, together; those that there are count as used."""
    where = placed(model, c, layout)
    if where is None:
        return model.specs(c)

    def one(path: str, s: Spec) -> Spec:
        found = ranks(where, path)
        return s if found is None else replace(s, shape=(found.size, *s.shape[1:]), used=(s.shape[0], *s.used[1:]))

    return map_named(one, model.specs(c), is_leaf=is_spec)


def straight(model: Model, c: Any, layout: Layout, how: How) -> tuple[bool, ...]:
    """Of each layer of a step, whether XLA gathers its weights once for both passes, because one piece of straight code holds both: on a CPU every
    unrolled layer (its compiler drops the barriers that keep them apart before it merges common subexpressions), and a loop that runs once."""
    where = placed(model, c, layout)
    kinds, times = (where.kinds, math.prod(where.layers.shape[:2])) if where else (model.kinds(c), 1)
    merges = layout.platform == "cpu" and not pipe.stashes(layout)
    found = (
        [merges and (how.runner == "unroll" or s.repeat == 1 or s.grouped)] * (s.repeat * len(s.unit)) for s in stacks(kinds, how.remat)
    )
    return tuple(one for part in found for one in part) * times


def step_cost(spelling: str, x: Shapes) -> tuple[Collective, ...]:
    """Every collective of one step under a layout's compact spelling, by strategy."""
    rest, ticks = shares(spelling, x)
    return merge([*rest, *(c._replace(count=c.count * times, bytes=c.bytes * times) for times, found in ticks.values() for c in found)])


class Ticking(NamedTuple):
    """What one tick of a kind moves inside the parts of a pipeline that run in it. times: ticks of that kind in a step."""

    times: int
    moves: tuple[Collective, ...]


def shares(spelling: str, x: Shapes) -> tuple[tuple[Collective, ...], dict[str, Ticking]]:
    """The collectives of a step; of a pipeline those outside its parts, and of each kind of tick (forward, backward, weight) those inside.

    Exact where a part's layers are a loop. Where they are straight code (unrolled, or one layer a part), a CPU's compiler merges some gathers of
    ZeRO-3 in a tick's forward and backward besides: of gains and biases, with a remat of matrices too. Where gradients are put off (zb) and there is a
    remat, what it computes again is computed twice."""
    asked = [name for name, a in parse(spelling).items() if a.devices > 1]
    parts, never = by_remat(x), unreached(x)
    costs = lambda x, names, parts: (c for name in names for c in _cost(name, x, parts) if c.place not in never)
    told = lambda x, names, parts=parts: (c._replace(axes=ordered(x.layout, c.axes)) for c in costs(x, names, parts))
    if not x.flow:
        return merge(told(x, asked)), {}
    rest, inside = list(told(x, [PIPE])), [name for name in asked if name != PIPE]
    ticks: dict[str, list[Collective]] = {kind: [] for kind in ("forward", "backward", "weight")}
    for c in told(x, inside):
        kinds = pipe.ticks_of(x, c.place)
        for kind in kinds:
            ticks[kind].append(pipe.part(x, c))
        rest += [] if kinds else [c]
    last = last_layers(x)
    unused = pipe.unused(x._replace(remat=last.remat))
    for c in told(last, inside, by_remat(last)) if unused else ():
        if c.place in unused:
            one = pipe.part(x, c)
            ticks["backward"].append(one._replace(count=-one.count, bytes=-one.bytes))
    return merge(rest), {kind: Ticking(getattr(x.flow.ticks, kind), merge(found)) for kind, found in ticks.items() if found}


def _cost(name: str, x: Shapes, parts: dict[str, Shapes]) -> Iterable[Collective]:
    """A strategy's collectives: of a pattern of remat each part's own, what comes once a step or a micro-batch once.  parts: `by_remat`."""
    for word, part in parts.items():
        for c in _grouped(name, part) if group_of(word) > 1 else STRATEGIES[name].cost(part):
            if PLACES[c.place].often == LAYER or len(parts) == 1:
                yield c
    if len(parts) > 1:
        first = next(word for word in ("none", *parts) if word in parts)
        yield from (c for c in STRATEGIES[name].cost(x._replace(remat=first)) if PLACES[c.place].often != LAYER)


def _grouped(name: str, x: Shapes) -> Iterable[Collective]:
    """A strategy's collectives where groups of layers keep one input: of layers that keep all, and the forward pass again but for what only a group's
    output needs.  Exact where groups are turns of a loop."""
    size, inner, cost = group_of(x.remat), x._replace(remat="none"), STRATEGIES[name].cost
    keep = lambda last: restricted(inner, tuple((i % size == size - 1) == last for i in range(x.layers)))
    again = [c for c in cost(keep(False)) if PLACES[c.place].often == LAYER and not PLACES[c.place].back]
    again += [c for c in cost(keep(True)) if c.place == "layer"]
    lasts = keep(True)._replace(remat="full", straight=(False,) * (x.layers // size))
    again += [c for c in cost(lasts) if c.place == "weights again"]
    yield from cost(inner)
    for c in again:
        yield c._replace(place="weights again" if "weights" in c.place else "layer again", why=f"{c.why}, again in groups")


def last_layers(x: Shapes) -> Shapes:
    """The same step with nothing but the last layer of each part."""
    slots = x.layers // x.parts
    one = restricted(x, (*[False] * (slots - 1), True) * x.parts)
    return one._replace(straight=(False,) * x.parts, remat=words_of(x.remat, slots)[-1])


class Line(NamedTuple):
    """One kind of collective over the same mesh axes: what the program has and what the formula says, (count, bytes)."""

    kind: str
    axes: tuple[str, ...]
    found: tuple[int, int]
    formula: tuple[int, int]

    @property
    def equal(self) -> bool:
        """Whether the program moves what the formula says, to the byte."""
        return self.found == self.formula


def compare(found: Iterable[Found], formula: Iterable[Collective]) -> list[Line]:
    """Program and formula side by side, in the order of kinds."""
    sides: list[dict] = []
    for side in (found, formula):
        total: dict[tuple, tuple[int, int]] = {}
        for c in side:
            count, size = total.get((c.kind, c.axes), (0, 0))
            total[c.kind, c.axes] = (count + c.count, size + c.bytes)
        sides.append(total)
    return [Line(*key, sides[0].get(key, (0, 0)), sides[1].get(key, (0, 0))) for key in sorted({*sides[0], *sides[1]})]


SENT = {"all-reduce": lambda n: 2 * (n - 1) / n, "collective-permute": lambda n: 1}
"""Parts of its bytes that each of n devices sends; (n-1)/n for other kinds."""


def wire_bytes(c: Collective | Found, layout: Layout) -> float:
    """Bytes that each device sends, with the ring algorithm: (n-1)/n of a gather or a scatter, twice that of an all-reduce, all of
    what is passed on to a neighbour.
    Source: the scaling book, 'Sharded matrices'."""
    n = layout.size(c.axes)
    return c.bytes * SENT[c.kind](n) if c.kind in SENT else c.bytes * (n - 1) / n
