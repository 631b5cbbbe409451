"""The choice applied: the program run again, equation by equation, with the layouts that were chosen as constraints."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshloom.auto.graph import Graph
from meshloom.auto.price import Spec, reshard
from meshloom.auto.program import Block, Literal, Program, Ref, Step
from meshloom.auto.share import through


class Layouts(NamedTuple):
    """values: value -> its layout where it is made.  taken: (step, operand) -> the layout in which it is taken; copied: that of the copy which it is
    taken from, where several share one.  again: (step, operand) -> (value, visit), where it is moved anew."""

    values: dict[int, Spec]
    taken: dict[tuple, Spec]
    copied: dict[tuple, Spec]
    again: dict[tuple, tuple[int, int]]


def layouts(graph: Graph, choice: list[int], mesh: tuple[int, ...]) -> Layouts:
    """What a choice (a strategy for every node) says of the values that operations make and take."""
    values: dict[int, Spec] = {}
    taken: dict[tuple, Spec] = {}
    for node, k in zip(graph.nodes, choice):
        if node.gives:
            first = next(iter(node.gives))
            values[first] = node.gives[first][k]
        taken |= {(node.step, i): spec for i, spec in enumerate(node.wants[k])}
    taken |= {e.at: e.taken[choice[e.target]] for e in graph.edges}
    moved = lambda e: bool(reshard(e.have[choice[e.source]], e.want[choice[e.target]], e.bytes, mesh))
    copies = {e.target for e in graph.edges if e.at[0] == "copy" and moved(e)}
    anew = {e.at for e in graph.edges if e.at in graph.again and (moved(e) or e.source in copies)}
    return Layouts(values, taken, through(graph.edges, choice), {at: graph.again[at] for at in anew})


def partition(spec: Spec, rank: int, names: tuple[str, ...]) -> PartitionSpec:
    """A layout as JAX writes it."""
    found = [tuple(n for n, d in zip(names, spec) if d == i) for i in range(rank)]
    return PartitionSpec(*(axes[0] if len(axes) == 1 else axes or None for axes in found))


class Runner:
    """Runs a program's steps, under `jit`, on the arrays of a mesh."""

    def __init__(self, program: Program, places: Layouts, mesh: Mesh, axes: tuple[str, ...]) -> None:
        self.program, self.places, self.mesh, self.axes = program, places, mesh, axes

    def __call__(self, *args: Any) -> list[Any]:
        known: dict[Any, Any] = dict(zip(self.program.block.ins, args))
        self.steps(self.program.block.steps, known)
        return [self.read(r, known, ("out", j)) for j, r in enumerate(self.program.block.outs)]

    def put(self, x: Any, spec: Spec | None) -> Any:
        """An array in a layout; as it is where none is asked for."""
        if spec is None or self.mesh.size == 1 or not getattr(x, "ndim", 0):
            return x
        where = NamedSharding(self.mesh, partition(spec, x.ndim, self.axes))
        return jax.lax.with_sharding_constraint(x, where)

    def read(self, ref: Ref, known: Mapping[Any, Any], at: tuple) -> Any:
        """An operand, in the layout in which this place takes it."""
        if isinstance(ref, Literal):
            return ref.value
        x = known[self.places.again[at]] if at in self.places.again else known[ref]
        return self.put(self.put(x, self.places.copied.get(at)), self.places.taken.get(at))

    def anew(self, step: Step, known: dict[Any, Any]) -> None:
        """Gives values that this step moves anew another name, and keeps that back until another operand is there: so neither is the move taken for
        an earlier one, nor is it made long before its use."""
        for i, ref in enumerate(step.ins):
            visit = self.places.again.get((step.number, i))
            if visit is None or visit in known:
                continue
            others = [known[r] for r in step.ins if isinstance(r, int) and r != ref]
            known[visit] = jax.lax.optimization_barrier((known[ref], *others[:1]))[0]

    def steps(self, steps: tuple[Step, ...], known: dict[Any, Any]) -> None:
        """Runs steps on the values known so far and adds their results."""
        for step in steps:
            self.anew(step, known)
            ins = [self.read(r, known, (step.number, i)) for i, r in enumerate(step.ins)]
            if step.kind == "barrier":
                outs = jax.lax.optimization_barrier(tuple(ins))
            elif step.kind in RUN:
                outs = RUN[step.kind](self, step, ins, known)
            else:
                outs = bound(step.eqn, ins)
            for v, x in zip(step.outs, outs):
                known[v] = self.put(x, self.places.values.get(v))

    def block(self, block: Block, args: Any, known: Mapping[int, Any], at: Callable[[int], tuple]) -> list[Any]:
        """Runs a block inside a loop or a branch. Outer values are seen."""
        own = {**known, **{v: self.put(x, self.places.values.get(v)) for v, x in zip(block.ins, args)}}
        self.steps(block.steps, own)
        return [self.read(r, own, at(j)) for j, r in enumerate(block.outs)]

    def scan(self, step: Step, ins: list[Any], known: Mapping[int, Any]) -> list[Any]:
        """A scan, its body run through the blocks."""
        p, body = step.eqn.params, step.blocks[0]
        consts, carried = p["num_consts"], p["num_carry"]

        def one(carry, xs):
            outs = self.block(body, [*ins[:consts], *carry, *xs], known, lambda j: (step.number, "back", j))
            return outs[:carried], outs[carried:]

        carry, ys = jax.lax.scan(
            one, ins[consts : consts + carried], ins[consts + carried :], p["length"], reverse=p["reverse"], unroll=p["unroll"]
        )  # fmt: skip
        return [*carry, *ys]

    def whiles(self, step: Step, ins: list[Any], known: Mapping[int, Any]) -> list[Any]:
        """A while loop."""
        test, body = step.blocks
        back = lambda j: (step.number, "back", j)
        return jax.lax.while_loop(
            lambda carry: self.block(test, carry, known, lambda j: ())[0],
            lambda carry: self.block(body, carry, known, back),
            ins[len(ins) - len(step.outs) :],
        )

    def cond(self, step: Step, ins: list[Any], known: Mapping[int, Any]) -> list[Any]:
        """One of some branches."""
        branches = [lambda k=k, b=b: self.block(b, (), known, lambda j: (step.number, "branch", k, j)) for k, b in enumerate(step.blocks)]
        return jax.lax.switch(ins[0].astype("int32"), branches)


RUN = {"scan": Runner.scan, "while": Runner.whiles, "cond": Runner.cond}


def bound(eqn: Any, ins: list[Any]) -> list[Any]:
    """One equation on these operands."""
    params = eqn.primitive.get_bind_params(eqn.params)
    stack = str(eqn.source_info.name_stack)
    with eqn.ctx.manager, jax.named_scope(stack) if stack else contextlib.nullcontext():
        out = eqn.primitive.bind(*ins, **params)
    return list(out) if eqn.primitive.multiple_results else [out]
