"""A pipeline of unequal stages: a program of its own for each, on devices of its own, driven from Python in the order of a schedule's table.

The executor of `runner/pipeline.py` is one program that all stages run in lockstep; it wants parts that are alike. Here a stage is any pure function on
any number of devices, and what it sends is any tree: an encoder and a decoder, 2 layers beside 20. One process issues the work and JAX runs it behind,
so that stages work at the same time and none waits for a tick to end: idle time is what `parallel/simulate.py` calls asynchronous. The price is a
call for each F, B and W and a move for each message (`calls`), and that every device belongs to this process.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from meshloom.core.config import nearest
from meshloom.core.tree import Tree, map_named, named_leaves
from meshloom.parallel.schedules import B, F, Schedule, W, check

WHOLE = PartitionSpec()
"""On every device of a stage."""


class Stage(NamedTuple):
    """A stage, or one chunk of it where stages have several.

    run: (parameters, message, data) -> message to the next, a tree of arrays; the last returns a micro-batch's loss, a sum and not a mean, as a scalar.
    The first stage's message is (). Integers in a message arrive and get no gradient.  takes: names of the batch's arrays that `data` holds.
    params: how the parameters lie on the stage's mesh, a PartitionSpec or a tree of them.  batch: how the first axes of data and messages do."""

    run: Callable[[Any, Any, dict[str, Array]], Tree]
    takes: tuple[str, ...] = ()
    params: Tree = WHOLE
    batch: PartitionSpec = WHOLE


class Calls(NamedTuple):
    """What one step issues.  programs: of stages.  moves: of messages between stages, and of the batch to them."""

    programs: int
    moves: int


def calls(stages: Sequence[Stage], s: Schedule) -> Calls:
    """Calls of a step, without the sums of tied parameters. F of the last stage is left to its B, which runs it anyway; B of the first sends nothing."""
    kinds = 3 if s.splits else 2
    return Calls(
        (len(stages) * kinds - 1) * s.micro + len(stages), 2 * (len(stages) - 1) * s.micro + sum(bool(stage.takes) for stage in stages)
    )


def submeshes(sizes: Sequence[Mapping[str, int]], devices: Sequence[Any] | None = None) -> list[Mesh]:
    """A mesh for each stage, of devices in their order: `submeshes([{"data": 1}, {"data": 3}])` takes four.  devices: all of this machine by default.
    Raises ValueError if there are too few."""
    devices, counts = jax.devices() if devices is None else devices, [prod(of.values()) for of in sizes]
    if sum(counts) > len(devices):
        raise ValueError(
            f"The stages need {' + '.join(map(str, counts))} = {sum(counts)} devices, and there are {len(devices)}. Give them fewer, or simulate more on "
            f"the CPU with jax.config.update('jax_num_cpu_devices', {sum(counts)})."
        )
    starts = accumulate(counts, initial=0)
    return [_mesh(np.array(devices[at : at + n]).reshape(tuple(of.values())), tuple(of)) for at, n, of in zip(starts, counts, sizes)]


def value_and_grad(
    stages: Sequence[Stage], schedule: Schedule, meshes: Sequence[Mesh], tied: Sequence[str] = ()
) -> Callable[[Sequence[Tree], Mapping[str, Any]], tuple[Array, list[Tree]]]:
    """A function (parameters of each stage, batch) -> (loss, gradients of each stage): sums over the batch in fp32, each on its stage's devices.

    stages: in the order of the model; with chunks, entry chunk * schedule.stages + stage.  meshes: one for each stage of the schedule.  batch: name ->
    array whose first axis is cut into micro-batches.  tied: paths of parameters that several stages hold a copy of; each copy gets the sum of their
    gradients, so that equal updates keep them equal.  B runs a stage's forward again, and so does W. Parameters that lie elsewhere are moved in every
    call: `place` them once.  Raises ValueError for what does not fit together; where shapes decide it, on the first call."""
    check(schedule)
    homes = _homes(stages, schedule, meshes)
    programs = [_programs(home, i == len(homes) - 1, schedule.splits) for i, home in enumerate(homes)]
    order, plans = [op for _, _, op in schedule.each()], {}

    def run(params: Sequence[Tree], batch: Mapping[str, Any]) -> tuple[Array, list[Tree]]:
        data = [_cut(home, batch, schedule.micro) for home in homes]
        shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jax.dtypes.canonicalize_dtype(a.dtype)), (list(params), data))
        leaves, form = jax.tree.flatten(shapes)
        key = form, tuple((a.shape, a.dtype) for a in leaves)
        if key not in plans:
            plans[key] = _plan(homes, *shapes, tied)
        plan = plans[key]
        data = [jax.device_put(d, to) if d else d for d, to in zip(data, plan.data)]
        flight = _Flight(programs, plan, [_put(w, to) for w, to in zip(params, plan.params)], data)
        for op in order:
            flight.work[op.kind](op.micro, op.part)
        grads = [grad for _, grad in flight.sums]
        for name in tied:
            _join(grads, plan.params, name)
        return flight.sums[-1][0], grads

    return run


def place(
    stages: Sequence[Stage], schedule: Schedule, meshes: Sequence[Mesh], params: Sequence[Tree], tied: Sequence[str] = ()
) -> list[Tree]:
    """The parameters of each stage on its devices.  Raises ValueError where copies of a tied parameter differ."""
    homes = _homes(stages, schedule, meshes)
    for name in tied:
        (first, held), *others = _copies(params, name)
        for i, copy in others:
            for path in held:
                if not np.array_equal(held[path], copy[path]):
                    raise ValueError(
                        f"'{path}' is tied, and {homes[i].name} holds other numbers than {homes[first].name}. Give both the same."
                    )
    return [jax.device_put(w, home.params(w)) for home, w in zip(homes, params)]


class _Home(NamedTuple):
    """A stage on its mesh.  name: for errors."""

    stage: Stage
    mesh: Mesh
    name: str

    def rows(self, what: str, tree: Tree, lead: int = 0) -> Tree:
        """Where arrays of data or of a message lie, behind `lead` axes that are not split."""
        spec = lambda a: PartitionSpec(*[None] * lead, *self.stage.batch[: max(0, a.ndim - lead)])
        return map_named(lambda path, a: self._at(what, path, a, spec(a)), tree)

    def params(self, tree: Tree) -> Tree:
        """Where the parameters lie."""
        given = self.stage.params
        specs = jax.tree.map(lambda s, of: jax.tree.map(lambda _: s, of), given, tree, is_leaf=lambda x: isinstance(x, PartitionSpec))
        return map_named(lambda path, a, spec: self._at("the parameter", path, a, spec), tree, specs)

    def _at(self, what: str, path: str, a: Any, spec: PartitionSpec) -> NamedSharding:
        """A sharding that is known to fit."""
        found = NamedSharding(self.mesh, spec)
        try:
            found.shard_shape(a.shape)
        except ValueError as e:
            named = f"{what} '{path}'" if path else what
            raise ValueError(
                f"In {self.name} {named} has the shape {list(a.shape)}, which {tuple(spec)} does not cut evenly over the mesh {dict(self.mesh.shape)}. "
                "Give the stage other devices, or leave that axis whole."
            ) from e
        return found


class _Plan(NamedTuple):
    """For each stage, where things lie: its parameters and data, the message that arrives, the cotangent of what it sent (a list: floats only); and what
    makes the zeros that loss and gradients are added to."""

    params: list[Tree]
    data: list[Tree]
    arrive: list[Tree]
    back: list[list[NamedSharding]]
    zeros: list[Callable[[], tuple[Array, Tree]]]


class _Flight:
    """A step on its way: sums of loss and gradients of each part, and what lives between two operations, by micro-batch and part, under the names of
    the ring buffers of `parallel/slots.py`. A reference is dropped with its last use, so that memory is what the schedule says."""

    def __init__(self, programs: list[dict[int, Callable]], plan: _Plan, params: list[Tree], data: list[Tree]) -> None:
        self.programs, self.plan, self.params, self.data = programs, plan, params, data
        self.sums = [zeros() for zeros in plan.zeros]
        self.inbox, self.kept, self.grads, self.late = {}, {}, {}, {}
        self.work = {F: self.forward, B: self.backward, W: self.weight}

    def forward(self, m: int, part: int) -> None:
        """F; that of the last part is left to its B, which runs it anyway."""
        x = self.kept[m, part] = self.inbox.pop((m, part)) if part else ()
        if part < len(self.programs) - 1:
            y = self.programs[part][F](self.params[part], x, self.data[part], m)
            self.inbox[m, part + 1] = jax.device_put(y, self.plan.arrive[part + 1])

    def backward(self, m: int, part: int) -> None:
        """B; what W needs it leaves, where W is apart."""
        x, dy = self.kept.pop((m, part)), self.grads.pop((m, part), [])
        dx, self.sums[part] = self.programs[part][B](self.params[part], x, self.data[part], m, dy, self.sums[part])
        if part:
            self.grads[m, part - 1] = jax.device_put(dx, self.plan.back[part - 1])
        if W in self.programs[part]:
            self.late[m, part] = x, dy

    def weight(self, m: int, part: int) -> None:
        """W."""
        x, dy = self.late.pop((m, part))
        _, self.sums[part] = self.programs[part][W](self.params[part], x, self.data[part], m, dy, self.sums[part])


def _mesh(devices: np.ndarray, names: tuple[str, ...]) -> Mesh:
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))


def _homes(stages: Sequence[Stage], s: Schedule, meshes: Sequence[Mesh]) -> list[_Home]:
    """Every stage on its mesh, whose axes the compiler may split by itself.  Raises ValueError where their numbers are not the schedule's."""
    want, several = s.stages * s.chunks, s.chunks > 1
    if len(stages) != want or len(meshes) != s.stages:
        raise ValueError(
            f"'{s.name}' is a schedule of {s.stages} stages{f' with {s.chunks} chunks each' if several else ''}, and {len(stages)} functions on "
            f"{len(meshes)} meshes were given. Give {want} functions and {s.stages} meshes, or another schedule."
        )
    names = [f"stage {i % s.stages}{f', chunk {i // s.stages}' if several else ''}" for i in range(want)]
    clean = [_mesh(m.devices, m.axis_names) for m in meshes]
    return [_Home(stage, clean[i % s.stages], name) for i, (stage, name) in enumerate(zip(stages, names))]


def _programs(home: _Home, last: bool, splits: bool) -> dict[int, Callable]:
    """What a stage runs for each kind of work."""
    run = home.stage.run
    hold = lambda tree: lax.with_sharding_constraint(tree, home.rows("a message", tree)) if jax.tree.leaves(tree) else tree

    def forward(w: Tree, x: Tree, data: Tree, m: Array) -> Tree:
        return hold(run(w, x, _row(data, m)))

    def backward(for_x: bool, for_w: bool, w: Tree, x: Tree, data: Tree, m: Array, dy: list[Array], sums: tuple[Array, Tree]):
        """The cotangent of the message, and the sums; what is not asked for, the compiler leaves out."""
        loss, grad = sums
        y, pull = jax.vjp(lambda w, floats: _floats(run(w, _filled(x, floats), _row(data, m))), w, _floats(x))
        dw, dx = pull([jnp.ones_like(y[0])] if last else dy)
        if last and for_x:
            loss = loss + y[0].astype(loss.dtype)
        if for_w:
            grad = jax.tree.map(lambda g, d: g + d.astype(g.dtype), grad, dw)
            grad = lax.with_sharding_constraint(grad, home.params(grad)) if jax.tree.leaves(grad) else grad
        return hold(dx) if for_x else [], (loss, grad)

    jitted = lambda for_x, for_w: jax.jit(lambda *a: backward(for_x, for_w, *a), donate_argnums=5)
    return {F: jax.jit(forward), B: jitted(True, not splits), **({W: jitted(False, True)} if splits else {})}


def _plan(homes: list[_Home], params: list[Tree], data: list[Tree], tied: Sequence[str]) -> _Plan:
    """Where everything lies, from shapes alone.  Raises ValueError for parameters, data and messages that do not fit."""
    if len(params) != len(homes):
        raise ValueError(f"There are {len(homes)} functions of stages, and parameters for {len(params)}. Give each its own, () for none.")
    for name in tied:
        _copies(params, name)
    plan = _Plan([], [], [], [], [])
    x: Any = ()
    for i, (home, w, d) in enumerate(zip(homes, params, data)):
        whole = [f"'{path}' ({a.dtype})" for path, a in named_leaves(w).items() if not _smooth(a)]
        if whole:
            raise ValueError(
                f"{home.name} has no gradient for {', '.join(whole)}. Hand integers over as data, or keep them in its function."
            )
        plan.params.append(home.params(w))
        plan.data.append(home.rows("the data", d, 1))
        plan.arrive.append(home.rows("the message", x))
        x = _sends(home, homes[i - 1].name if i else "", w, x, jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), d))
        plan.back.append([to for to, a in zip(jax.tree.leaves(home.rows("what it sends,", x)), jax.tree.leaves(x)) if _smooth(a)])
        plan.zeros.append(_zeros(home, w, plan.params[-1]))
    if jax.tree.structure(x) != jax.tree.structure(0) or x.shape or not _smooth(x):
        raise ValueError(
            f"{homes[-1].name} is the last and returns {_told(x)}. Let it return the loss of its micro-batch, one number, a sum."
        )
    return plan


def _zeros(home: _Home, w: Tree, places: Tree) -> Callable[[], tuple[Array, Tree]]:
    """What loss and gradients are added to: fp32, or the parameters' own type where that is wider."""
    make = lambda: (jnp.zeros((), jnp.float32), jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.promote_types(a.dtype, jnp.float32)), w))
    return jax.jit(make, out_shardings=(NamedSharding(home.mesh, WHOLE), places))


def _sends(home: _Home, before: str, w: Tree, x: Tree, data: Tree) -> Tree:
    """Shapes of what a stage sends.  Raises ValueError where it cannot read what it gets."""
    try:
        return jax.eval_shape(home.stage.run, w, x, data)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError) as e:
        message = f"the message of {before}, {_told(x)}," if before else "no message"
        raise ValueError(
            f"{home.name} does not run with {message} and the data {_told(data)}. Change what is sent, or the function that gets it, which says: "
            f"{str(e).strip() or type(e).__name__}"
        ) from e


def _told(tree: Tree) -> str:
    """The arrays of a tree for an error."""
    return ", ".join(f"{path or 'an array'} {a.dtype}{list(a.shape)}" for path, a in named_leaves(tree).items()) or "(nothing)"


def _cut(home: _Home, batch: Mapping[str, Any], micro: int) -> dict[str, Any]:
    """The arrays that a stage takes, with an axis of micro-batches before their own."""
    found = {}
    for name in home.stage.takes:
        if name not in batch:
            near = nearest(name, list(batch))
            guess = f" Did you mean '{near}'?" if near else ""
            raise ValueError(f"{home.name} takes '{name}', which the batch lacks.{guess} It has: {', '.join(batch) or 'nothing'}.")
        rows, *rest = batch[name].shape
        if rows % micro or not rows:
            down = rows // micro * micro
            fits = f"{down} or {down + micro}" if down else f"{micro}"
            raise ValueError(f"'{name}' has {rows} rows, which {micro} micro-batches do not share evenly. The nearest that fit: {fits}.")
        found[name] = batch[name].reshape(micro, rows // micro, *rest)
    return found


def _put(tree: Tree, places: Tree) -> Tree:
    """A tree where it should lie: itself if it does."""
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(places))
    there = all(isinstance(a, Array) and (a.sharding == to or a.sharding.is_equivalent_to(to, a.ndim)) for a, to in pairs)
    return tree if there else jax.device_put(tree, places)


def _copies(params: Sequence[Tree], name: str) -> list[tuple[int, dict[str, Any]]]:
    """(part, path -> array) of each part that holds a tied parameter, or a tree of them.  Raises ValueError where they are no copies."""
    every = [named_leaves(w) for w in params]
    held = [(i, {p: a for p, a in leaves.items() if p == name or p.startswith(f"{name}.")}) for i, leaves in enumerate(every)]
    held = [(i, copy) for i, copy in held if copy]
    if len(held) < 2:
        near = nearest(name, sorted({p for leaves in every for p in leaves} - {name}))
        guess = f" Did you mean '{near}'?" if near else ""
        raise ValueError(
            f"'{name}' is tied, and {len(held)} of the functions of stages have it among their parameters, not 2 or more.{guess}"
        )
    forms = [{path: a.shape for path, a in copy.items()} for _, copy in held]
    wrong = next((i for (i, _), form in zip(held, forms) if form != forms[0]), None)
    if wrong is not None:
        raise ValueError(
            f"'{name}' is tied, and function {wrong} holds {_told(dict(held)[wrong])}, but function {held[0][0]} {_told(held[0][1])}. "
            "Give both the same shapes, or do not tie them."
        )
    return held


def _join(grads: list[Tree], places: list[Tree], name: str) -> None:
    """Gives each copy of a tied parameter the sum of the gradients of all, in place."""
    (first, total), *others = _copies(grads, name)
    to = named_leaves(places[first])
    for _, copy in others:
        total = {path: g + jax.device_put(copy[path], to[path]) for path, g in total.items()}
    for i in (first, *(i for i, _ in others)):
        grads[i] = map_named(lambda path, g, at, t=total: jax.device_put(t[path], at) if path in t else g, grads[i], places[i])


def _row(data: Tree, m: Array) -> Tree:
    """One micro-batch."""
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, m, 0, keepdims=False), data)


def _smooth(a: Any) -> bool:
    """Whether an array has a gradient."""
    return jnp.issubdtype(a.dtype, jnp.inexact)


def _floats(tree: Tree) -> list[Array]:
    """The leaves that have a gradient."""
    return [a for a in jax.tree.leaves(tree) if _smooth(a)]


def _filled(tree: Tree, floats: Sequence[Array]) -> Tree:
    """A tree with other floats."""
    rest = iter(floats)
    return jax.tree.map(lambda a: next(rest) if _smooth(a) else a, tree)
