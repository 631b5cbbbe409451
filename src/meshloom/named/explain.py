"""What a program will move and compute under a layout, read from its tracing: before anything is compiled or run, and without devices."""

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from jax.interpreters.partial_eval import dce_jaxpr

from meshloom.core.layout import Layout
from meshloom.named.program import Program
from meshloom.named.rules import Rules, Sizes, spelled
from meshloom.named.rules import layout as read
from meshloom.named.tensor import OWED
from meshloom.plan.hlo import Found, total

MOVES = {
    # JAX's primitive: (kind as XLA names it, parameter with the mesh axes, whether what comes out is what counts)
    "psum": ("all-reduce", "axes", True),
    "psum_invariant": ("all-reduce", "axes", True),
    "pmax": ("all-reduce", "axes", True),
    "pmin": ("all-reduce", "axes", True),
    "all_gather": ("all-gather", "axis_name", True),
    "all_gather_invariant": ("all-gather", "axis_name", True),
    "reduce_scatter": ("reduce-scatter", "axis_name", False),
    "all_to_all": ("all-to-all", "axis_name", True),
    "ppermute": ("collective-permute", "axis_name", True),
}


class Operation(NamedTuple):
    """An operation of the program, forward or backward: what it moves, and what each device multiplies for it."""

    name: str
    backward: bool
    moves: tuple[Found, ...]
    flops: int


class Explained(NamedTuple):
    """What a program moves and computes in one run.

    operations: in the order of the program. flops: of the products on one device, two for a multiplication with its addition.
    whole: those of the whole program on one device, so that flops x devices / whole says how often work is repeated."""

    layout: Layout
    operations: tuple[Operation, ...]
    flops: int
    whole: int

    @property
    def total(self) -> dict[tuple[str, tuple[str, ...]], tuple[int, int]]:
        """(kind, mesh axes) -> (arrays, bytes), as `plan.hlo.total` counts them in a compiled program."""
        return total([f for op in self.operations for f in op.moves])

    @property
    def bytes(self) -> int:
        """Bytes of all that moves, each array whole, on one device."""
        return sum(size for _, size in self.total.values())

    def __str__(self) -> str:
        rows = []
        for op in self.operations:
            name = ("backward of " if op.backward else "") + op.name
            moves = [_said(f.kind, f.axes, f.count, f.bytes) for f in op.moves]
            rows += [(name, move, op.flops if i == 0 else 0) for i, move in enumerate(moves or ["nothing"])]
        wide = [max([len(row[i]) for row in rows] or [0]) for i in (0, 1)]
        lines = [f"{name:{wide[0]}}  {move:{wide[1]}}  {f'{flops:,} flops' if flops else ''}".rstrip() for name, move, flops in rows]
        sums = ["  " + _said(*key, *numbers) for key, numbers in self.total.items()]
        again = self.flops * self.layout.devices / self.whole if self.whole else 1.0
        flops = f"each device: {self.flops:,} flops; all devices do {again:.2f} x the {self.whole:,} of the program"
        return "\n".join([spelled(self.layout), *lines, "all together" if sums else "nothing moves", *sums, flops])


def _said(kind: str, axes: tuple[str, ...], count: int, size: int) -> str:
    return f"{kind} over {' x '.join(axes)}, {count} array{'s' * (count > 1)}, {size:,} B"


def explain(fn: Callable | Program, *args, mesh: Sizes | Layout = "", rules: Rules = "") -> Explained:
    """What fn moves and computes for these arguments (tensors, or `ml.spec`s, which need no memory): which collective each operation implies, over
    which mesh axes, how many arrays and bytes. Backward too, where fn takes gradients: `ml.explain(ml.value_and_grad(loss), params, batch, ...)`.
    The counts are those of the compiled program. Refuses what `ml.program` refuses. Print what it returns."""
    program = fn if isinstance(fn, Program) else Program(fn, read(mesh, rules))
    sizes = program.layout.sizes
    found: dict[tuple[str, bool], tuple[list[Found], list[int]]] = {}
    for name, backward, moved, flops in _walk(_live(program.jaxpr(*args)), 1, sizes, ""):
        moves, products = found.setdefault((name, backward), ([], []))
        moves += [moved] if moved else []
        products.append(flops)
    operations = tuple(Operation(*key, _merged(moves), sum(products)) for key, (moves, products) in found.items())
    alone = _walk(_live(Program(program.fn, Layout()).jaxpr(*args)), 1, {}, "")
    return Explained(program.layout, operations, sum(op.flops for op in operations), sum(flops for *_, flops in alone))


def _live(closed: Any) -> Any:
    """The jaxpr without what no result needs, which the compiler leaves out too."""
    return dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))[0]


def _merged(moves: list[Found]) -> tuple[Found, ...]:
    """Moves of one kind over the same mesh axes as one."""
    return tuple(Found(kind, axes, count, count, size, "") for (kind, axes), (count, size) in total(moves).items())


def _walk(jaxpr: Any, times: int, sizes: Mapping[str, int], above: str) -> Iterator[tuple[str, bool, Found | None, int]]:
    """(operation, whether backward, what it moves, flops) of every equation that moves or multiplies, loops multiplied out."""
    for eqn in _once(jaxpr):
        stack = f"{above}/{eqn.source_info.name_stack}"
        name, backward = _named(stack)
        if eqn.primitive.name in MOVES:
            moved = _moved(eqn, times, sizes, name)
            if moved.axes:
                yield name, backward, moved, 0
        elif eqn.primitive.name == "dot_general":
            yield name, backward, None, times * _flops(eqn)
        inner = [
            j for p in eqn.params.values() for j in (p if isinstance(p, (tuple, list)) else (p,)) if hasattr(getattr(j, "jaxpr", j), "eqns")
        ]
        loops = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        for j in inner[:1] if eqn.primitive.name.startswith("custom_") else inner:
            rows = list(_walk(getattr(j, "jaxpr", j), times * loops, sizes, stack))
            if eqn.primitive.name in ("while", "cond") and any(moved for *_, moved, _ in rows):
                raise ValueError(
                    f"'{name}' moves bytes inside a {eqn.primitive.name}, so how often is not known before it runs. Use lax.scan or ml.where."
                )
            yield from rows


def _once(jaxpr: Any) -> Iterator[Any]:
    """The equations without those that compute the same as an earlier one, which the compiler finds too."""
    same: dict[Any, Any] = {}
    seen: dict[tuple, list] = {}
    for eqn in jaxpr.eqns:
        inputs = tuple(str(v) if hasattr(v, "val") else id(same.get(v, v)) for v in eqn.invars)
        key = (eqn.primitive.name, inputs, str(eqn.params))
        if key in seen:
            same |= {new: same.get(old, old) for new, old in zip(eqn.outvars, seen[key])}
        else:
            seen[key] = eqn.outvars
            yield eqn


def _moved(eqn: Any, times: int, sizes: Mapping[str, int], name: str) -> Found:
    """One collective."""
    kind, param, out = MOVES[eqn.primitive.name]
    axes = eqn.params[param]
    axes = {axes} if isinstance(axes, str) else set(axes)
    if kind == "collective-permute":
        axes = _crossed(eqn.params["perm"], [a for a in sizes if a in axes], sizes)
    arrays = eqn.outvars if out else eqn.invars
    size = sum(math.prod(v.aval.shape) * np.dtype(v.aval.dtype).itemsize for v in arrays)
    return Found(kind, tuple(a for a in sizes if a in axes and sizes[a] > 1), times * len(arrays), times, times * size, name)


def _crossed(pairs: Any, axes: list[str], sizes: Mapping[str, int]) -> set[str]:
    """The mesh axes along which any pair of devices differs."""
    places = list(itertools.product(*(range(sizes[a]) for a in axes)))
    return {a for i, j in pairs for a, x, y in zip(axes, places[i], places[j]) if x != y}


def _flops(eqn: Any) -> int:
    """Two for each multiplication of a product."""
    (summed, _), _ = eqn.params["dimension_numbers"]
    return 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(eqn.invars[0].aval.shape[i] for i in summed)


def _named(stack: str) -> tuple[str, bool]:
    """The operation that a stack of scopes belongs to, and whether this is its backward pass: that which owes the work, else the outermost."""
    names = [re.sub(r"\)+$", "", re.sub(r"^(?:\w+\()+", "", word)) for word in stack.split("/") if word]
    names = [name for name in names if name]
    owed = [name for name in names if name.startswith(OWED)]
    return (owed[-1].removeprefix(OWED) if owed else names[0] if names else "other"), "transpose(" in stack
