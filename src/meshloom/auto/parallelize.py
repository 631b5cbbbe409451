"""`ml.parallelize`: any JAX function laid out over a mesh by the cheapest strategies that fit into memory, found by an integer program."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from meshloom.auto import explain, machine
from meshloom.auto.apply import Layouts, Runner, layouts, partition
from meshloom.auto.graph import Graph
from meshloom.auto.grow import grow
from meshloom.auto.price import WHOLE, Rates, Spec, specs
from meshloom.auto.problem import pose
from meshloom.auto.program import Program, trace
from meshloom.auto.repeat import alone, classes
from meshloom.auto.solve import Impossible, Solved, search
from meshloom.core.layout import Layout
from meshloom.core.mesh import make_mesh
from meshloom.named.rules import layout as read_mesh
from meshloom.plan import hardware

SECONDS, GAP = 60.0, 1e-3
"""When the search stops, and the part of the cost that is good enough."""
DEEP = 120
"""Nodes from which on those with the same surroundings share a decision."""


class Asked(NamedTuple):
    """What the user asked for."""

    mesh: Any
    batch: tuple[int, ...]
    memory: int | None
    donate: tuple[int, ...]
    on: str


class Made(NamedTuple):
    """A function planned for arguments of some shapes."""

    plan: explain.Plan
    program: Program
    places: Layouts
    inputs: tuple[Spec, ...]
    outs: Any
    results: tuple[Spec | None, ...]
    axes: tuple[str, ...]


class Parallel:
    """A function over a mesh. Called with arrays, it returns what the plain function returns, laid out; `.plan` says how.

    Planned for the example arguments, or at the first call; again for arguments of other shapes."""

    def __init__(self, fn: Callable, asked: Asked) -> None:
        self.fn, self.asked = fn, asked
        self._made: dict[Any, tuple[Made, Any]] = {}
        self._last: Made | None = None

    def __call__(self, *args: Any) -> Any:
        made, run = self.prepared(args)
        leaves = jax.tree.leaves(args)
        return jax.tree.unflatten(made.outs, run(*leaves))

    @property
    def plan(self) -> explain.Plan:
        """How the function is laid out: print it.  Raises ValueError before anything was planned."""
        if self._last is None:
            raise ValueError(
                "Nothing is planned yet: the shapes are not known. Give example_args to ml.parallelize, or call the function first."
            )
        return self._last.plan

    def explain(self) -> str:
        """The plan with every operation and every change of layout."""
        return self.plan.explain()

    def shard(self, *args: Any) -> Any:
        """The arguments where the plan wants them, as `jax.device_put` places them; one argument alone comes back alone."""
        made, _ = self.prepared(args)
        mesh = self.devices()
        leaves, tree = jax.tree.flatten(args)
        put = [jax.device_put(x, _sharding(mesh, s, np.ndim(x), made.axes)) for x, s in zip(leaves, made.inputs)]
        placed = tree.unflatten(put)
        return placed[0] if len(args) == 1 else placed

    def lower(self, *args: Any) -> Any:
        """The program for these arguments, lowered: `.lower(*args).compile().as_text()` shows what XLA makes of it."""
        _, run = self.prepared(args)
        return run.lower(*[_shape(x) for x in jax.tree.leaves(args)])

    def devices(self) -> Mesh:
        """The mesh of devices.  Raises ValueError if there are too few."""
        if isinstance(self.asked.mesh, Mesh):
            return Mesh(self.asked.mesh.devices, self.asked.mesh.axis_names, axis_types=(AxisType.Auto,) * len(self.asked.mesh.axis_names))
        return make_mesh(Layout(sizes_of(self.asked.mesh)))

    def planned(self, args: tuple) -> tuple[Made, Any]:
        """The plan for arguments of these shapes, and the key of the shapes. Needs no devices."""
        key, leaves, tree = _checked(self.fn, args)
        if key not in self._made:
            self._made[key] = (_make(self.fn, self.asked, leaves, tree, args), None)
        self._last = self._made[key][0]
        return self._last, key

    def prepared(self, args: tuple) -> tuple[Made, Any]:
        """The plan and the compiled function for arguments of these shapes."""
        made, key = self.planned(args)
        if self._made[key][1] is None:
            mesh = self.devices()
            into = tuple(_sharding(mesh, s, len(v.shape), made.axes) for s, v in zip(made.inputs, _values(made)))
            shapes = [len(made.program.values[r].shape) if isinstance(r, int) else None for r in made.program.block.outs]
            out = tuple(None if s is None else _sharding(mesh, s, n or 0, made.axes) for s, n in zip(made.results, shapes))
            donated = [i for i, n in enumerate(_owners(args)) if n in self.asked.donate]
            run = jax.jit(
                Runner(made.program, made.places, mesh, made.axes), in_shardings=into, out_shardings=list(out), donate_argnums=donated
            )
            self._made[key] = (made, run)
        return self._made[key]


def parallelize(
    fn: Callable | None = None,
    example_args: tuple | None = None,
    mesh: Any = "",
    batch_argnums: int | tuple[int, ...] = (),
    memory: int | float | str | None = None,
    donate_argnums: int | tuple[int, ...] = (),
    on: str = "",
) -> Any:
    """Any JAX function, laid out over a mesh; usually a whole training step, (params, state, batch) -> (params, state, loss).

    `step = ml.parallelize(step, (params, state, batch), mesh="rows=2 cols=4", batch_argnums=2)`, or `@ml.parallelize(mesh=..., batch_argnums=2)`,
    planned at the first call. mesh: names and sizes, a `jax.sharding.Mesh`, or nothing for all devices on one axis. batch_argnums: arguments whose
    leading axis is the batch. memory: of a device, bytes or "40GB"; the machine's if not given. donate_argnums: arguments whose memory the results may
    take. on: the machine to plan for, "h100:1x8"; the present one if not given. A result that looks like an argument (params out, params in) lies as
    that argument does, so that calls can follow each other.
    Returns a Parallel.  Raises ValueError, in a sentence, for what cannot be."""
    if fn is None:
        return partial(
            parallelize, example_args=example_args, mesh=mesh, batch_argnums=batch_argnums, memory=memory, donate_argnums=donate_argnums, on=on
        )  # fmt: skip
    if not callable(fn):
        raise ValueError(f"ml.parallelize needs a function, and this is {fn!r}. Use ml.parallelize(step, (params, batch), mesh=...).")
    limit = machine.size(memory) if memory is not None else None
    sizes_of(mesh)
    one = Parallel(fn, Asked(mesh, _numbers(batch_argnums), limit, _numbers(donate_argnums), on))
    if example_args is not None:
        if not isinstance(example_args, (tuple, list)):
            raise ValueError("example_args is the tuple of all arguments: ml.parallelize(step, (params, batch), ...).")
        one.planned(tuple(example_args))
    return one


def sizes_of(mesh: Any) -> dict[str, int]:
    """Devices on each mesh axis.  Raises ValueError for more than two axes of more than one device, and for what is no mesh."""
    sizes = dict(mesh.shape if isinstance(mesh, Mesh) else read_mesh({"devices": jax.device_count()} if mesh == "" else mesh).sizes)
    if sum(n > 1 for n in sizes.values()) > 2:
        raise ValueError(f"The mesh {sizes} has more than two axes, and strategies are chosen on one or two. Join axes into one.")
    return sizes


def _numbers(said: int | tuple[int, ...]) -> tuple[int, ...]:
    """Numbers of arguments.  Raises ValueError for what is no number."""
    numbers = (said,) if isinstance(said, int) else tuple(said)
    if not all(isinstance(n, int) and not isinstance(n, bool) for n in numbers):
        raise ValueError(
            f"{said!r} is no number of an argument. Give batch_argnums and donate_argnums numbers, counted from 0: 2, or (0, 1)."
        )
    return numbers


def _shape(x: Any) -> Any:
    """An argument's shape and type, without its elements."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return x
    if isinstance(x, (bool, int, float, complex)):
        return jax.ShapeDtypeStruct((), jax.numpy.result_type(x), weak_type=True)
    dtype = x.dtype if jax.numpy.issubdtype(x.dtype, jax.dtypes.extended) else jax.dtypes.canonicalize_dtype(x.dtype)
    return jax.ShapeDtypeStruct(np.shape(x), dtype, weak_type=getattr(x, "weak_type", False))


def _checked(fn: Callable, args: tuple) -> tuple[Any, list[Any], Any]:
    """A key of the arguments' shapes, the shapes, and their tree.  Raises ValueError for what is no array."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(args)
    for path, x in leaves:
        if isinstance(x, Tracer):
            raise ValueError(
                "A function made by ml.parallelize was called inside jax.jit, jax.grad or another transformation. "
                "Give ml.parallelize the whole function, transformations included, and call the result with arrays."
            )
        if not isinstance(x, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct, bool, int, float, complex)):
            name = _paths(fn, [(path, x)])[0]
            raise ValueError(
                f"Argument {name} is no array: {x!r}. Pass arrays, and bind what is not with functools.partial or a closure (of an Equinox model: "
                "eqx.partition(model, eqx.is_array), eqx.combine inside)."
            )
    shapes = [_shape(x) for _, x in leaves]
    return (tree, tuple((s.shape, str(s.dtype), s.weak_type) for s in shapes)), shapes, tree


def _paths(fn: Callable, leaves: list) -> list[str]:
    """The names of arguments' leaves: params.dense.kernel."""
    try:
        named = [p.name for p in inspect.signature(fn).parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    except (TypeError, ValueError):
        named = []
    words = lambda path: [str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path]
    found = []
    for path, _ in leaves:
        first, *rest = words(path)
        found.append(".".join([named[int(first)] if int(first) < len(named) else f"argument {first}", *rest]))
    return found


def _owners(args: tuple) -> list[int]:
    """For every leaf, the number of its argument."""
    return [i for i, a in enumerate(args) for _ in jax.tree.leaves(a)]


def _values(made: Made) -> list[Any]:
    return [made.program.values[v] for v in made.program.block.ins]


def _sharding(mesh: Mesh, spec: Spec, rank: int, axes: tuple[str, ...]) -> NamedSharding:
    return NamedSharding(mesh, partition(spec, rank, axes) if rank else PartitionSpec())


def _make(fn: Callable, asked: Asked, leaves: list[Any], tree: Any, args: tuple) -> Made:
    """The plan of a function for these shapes."""
    for name, numbers in (("batch_argnums", asked.batch), ("donate_argnums", asked.donate)):
        for n in numbers:
            if not 0 <= n < len(args):
                raise ValueError(f"{name} names argument {n}, and there are {len(args)}, counted from 0. Use one of 0 to {len(args) - 1}.")
    sizes = sizes_of(asked.mesh)
    rates = machine.rates(hardware.read(asked.on) if asked.on else hardware.present(), sizes)
    program, outs, results = trace(fn, leaves, tree)
    named = _paths(fn, jax.tree_util.tree_flatten_with_path(args)[0])
    owners, ins = _owners(args), program.block.ins
    names = dict(zip(ins, named))
    allowed = {v: _allowed(program, v, names[v], n in asked.batch, rates) for v, n in zip(ins, owners) if program.values[v].shape}
    ties = {j: ins[i] for j, i in carried(args, asked.batch, outs, results).items()}
    donated = {v for v, n in zip(ins, owners) if n in asked.donate}
    graph = grow(program, rates, allowed, ties, donated, names)
    groups = classes(graph) if len(graph.nodes) > DEEP else alone(graph)
    problem, times = pose(graph, groups, rates)
    limit = asked.memory or rates.memory
    try:
        solved = search(problem, times, limit, SECONDS, GAP)
    except Impossible as e:
        raise ValueError(
            f"No layout fits into {limit:,} B on each of {rates.devices(tuple(range(len(rates.mesh))))} devices: the one that needs least needs "
            f"{int(e.needs):,} B, {int(e.needs) - limit:,} B more. Use more devices, a smaller batch, donate_argnums for what the step replaces, or "
            "jax.checkpoint around layers."
        ) from e
    choice = [solved.choice[c] for c in groups]
    inputs, returned = _ends(program, graph, choice)
    plan = _told(program, graph, choice, solved, rates, (sizes, limit, dict(zip(named, inputs)), len(problem.seconds)))
    return Made(plan, program, layouts(graph, choice, rates.mesh), inputs, outs, returned, tuple(rates.sizes))


def _allowed(program: Program, value: int, name: str, batch: bool, rates: Rates) -> list[Spec]:
    """The layouts that an input may have: a batch is split along its leading axis or not at all.  Raises ValueError where no mesh axis divides it."""
    shape = program.values[value].shape
    found = specs(shape, rates.mesh)
    if batch:
        found = [s for s in found if set(s) <= {0, WHOLE}]
        if len(found) == 1 and rates.mesh:
            axes = ", ".join(f"{n} ({s} devices)" for n, s in rates.sizes.items())
            raise ValueError(
                f"The leading axis of {name} has {shape[0]} elements, and no axis of the mesh divides them: {axes}. Use a batch that is a multiple of "
                f"{rates.mesh[-1]}, another mesh, or leave the argument out of batch_argnums."
            )
    return found


def carried(args: tuple, batch: tuple[int, ...], outs: Any, results: list[Any]) -> dict[int, int]:
    """Number of a result's leaf -> number of the argument's leaf whose place it takes: a result, or a part of a tuple of results, that has the tree and
    the shapes of an argument (not of a batch). Each argument is taken once, in order."""
    looks = lambda leaves: [(np.shape(x), str(_shape(x).dtype)) for x in leaves]
    starts = np.cumsum([0, *(len(jax.tree.leaves(a)) for a in args)])
    whole = jax.tree.unflatten(outs, list(range(len(results))))
    parts = [whole]
    if isinstance(whole, (tuple, list)) and not hasattr(whole, "_fields"):
        parts = list(whole)
    elif isinstance(whole, Mapping) and not any(jax.tree.structure(whole) == jax.tree.structure(a) for a in args):
        parts = list(whole.values())
    free = [n for n in range(len(args)) if n not in batch and jax.tree.leaves(args[n])]
    found: dict[int, int] = {}
    for part in parts:
        numbers, tree = jax.tree.flatten(part)
        for n in free:
            leaves, other = jax.tree.flatten(args[n])
            if numbers and tree == other and looks([results[j] for j in numbers]) == looks(leaves):
                found |= {j: int(starts[n]) + i for i, j in enumerate(numbers)}
                free.remove(n)
                break
    return found


def _ends(program: Program, graph: Graph, choice: list[int]) -> tuple[tuple[Spec, ...], tuple[Spec | None, ...]]:
    """The layouts of the inputs, and of the results; None for a result that the compiler may place."""
    places = {v: specs[k] for node, k in zip(graph.nodes, choice) for v, specs in node.gives.items()}
    ends = {e.at[1]: e.taken[choice[e.target]] for e in graph.edges if e.at[0] == "out"}
    results = [ends.get(j, places.get(r) if isinstance(r, int) else None) for j, r in enumerate(program.block.outs)]
    return tuple(places.get(v, ()) for v in program.block.ins), tuple(results)


def _told(program: Program, graph: Graph, choice: list[int], solved: Solved, rates: Rates, asked: tuple) -> explain.Plan:
    """The plan in words and numbers."""
    sizes, limit, inputs, decided = asked
    axes = tuple(rates.sizes)
    operations = explain.lines_of(graph, choice, program.values, axes)
    changes = explain.changes_of(graph, choice, program.values, rates.mesh, axes)
    said = {name: explain.shaped(program.values[v], spec, axes) for (name, spec), v in zip(inputs.items(), program.block.ins)}
    return explain.Plan(
        " ".join(f"{n}={s}" for n, s in sizes.items()), rates.label, said, operations, changes, explain.summed((*operations, *changes), axes),
        solved.seconds, int(solved.peak), limit, solved.gap, solved.spent, explain.notes_of(graph, program.captured, solved, GAP, decided), axes,
    )  # fmt: skip
