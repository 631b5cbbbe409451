"""A JAX function as one list of steps over numbered values: traced, calls inlined, loops and branches as blocks inside a step."""

import math
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core
from jax.interpreters.partial_eval import dce_jaxpr

INLINED = {
    # primitive: the parameter that holds what it runs
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_lin": "call_jaxpr",
}
LOOPS = {"scan", "while", "cond"}
_HERE = str(Path(__file__).parent)
KEY = 8
"""Bytes of a random key, about; its type does not say."""


class Value(NamedTuple):
    """An array of the program, without its elements."""

    shape: tuple[int, ...]
    dtype: str
    bytes: int


class Literal(NamedTuple):
    """A number, or a closed-over array, that the program was traced with."""

    value: Any


Ref = int | Literal


class Block(NamedTuple):
    """Steps in their order, the values that they take in and give back."""

    ins: tuple[int, ...]
    steps: tuple["Step", ...]
    outs: tuple[Ref, ...]


class Step(NamedTuple):
    """One operation.  eqn: JAX's equation, or None for a barrier (values that are to be computed again, not shared).
    blocks: of a scan its body, of a while its condition and body, of a cond its branches."""

    number: int
    kind: str
    eqn: Any
    ins: tuple[Ref, ...]
    outs: tuple[int, ...]
    blocks: tuple[Block, ...]


class Program(NamedTuple):
    """The whole function.  captured: bytes of the arrays that it closes over."""

    block: Block
    values: tuple[Value, ...]
    captured: int


class Flattener:
    """Numbers the values and steps of a jaxpr as it walks it."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.steps = 0
        self.captured: dict[int, int] = {}

    def new(self, aval: Any) -> int:
        """A new value."""
        self.values.append(sized(aval))
        return len(self.values) - 1

    def block(self, jaxpr: Any, ins: list[Ref], consts: Any = ()) -> tuple[tuple[Step, ...], tuple[Ref, ...]]:
        """The steps of a jaxpr on these values, and what it gives back."""
        jaxpr, consts = (jaxpr.jaxpr, jaxpr.consts) if isinstance(jaxpr, core.ClosedJaxpr) else (jaxpr, consts)
        known: dict[Any, Ref] = dict(zip(jaxpr.invars, ins))
        for var, array in zip(jaxpr.constvars, consts):
            known[var] = Literal(array)
            self.captured[id(array)] = sized(var.aval).bytes
        steps: list[Step] = []
        for eqn in jaxpr.eqns:
            given = [Literal(v.val) if isinstance(v, core.Literal) else known[v] for v in eqn.invars]
            outs = self.step(eqn, given, steps)
            known |= dict(zip(eqn.outvars, outs))
        return tuple(steps), tuple(Literal(v.val) if isinstance(v, core.Literal) else known[v] for v in jaxpr.outvars)

    def step(self, eqn: Any, ins: list[Ref], steps: list[Step]) -> tuple[Ref, ...]:
        """Adds one equation, or what it calls; returns its results."""
        kind = eqn.primitive.name
        if kind in INLINED:
            if kind in ("remat2", "checkpoint") and eqn.params["differentiated"] and _any(eqn.params["prevent_cse"]):
                ins = self.barrier(ins, steps)
            inner, outs = self.block(eqn.params[INLINED[kind]], ins)
            steps += inner
            return outs
        blocks = self.blocks(kind, eqn, ins)
        outs = tuple(self.new(v.aval) for v in eqn.outvars)
        self.steps += 1
        steps.append(Step(self.steps, kind, eqn, tuple(ins), outs, blocks))
        return outs

    def barrier(self, ins: list[Ref], steps: list[Step]) -> list[Ref]:
        """New values for these, so that what is computed from them is not taken for what was computed before."""
        given = tuple(r for r in ins if isinstance(r, int))
        new = {r: self.copy(r) for r in given}
        self.steps += 1
        if given:
            steps.append(Step(self.steps, "barrier", None, given, tuple(new[r] for r in given), ()))
        return [new[r] if isinstance(r, int) else r for r in ins]

    def copy(self, ref: int) -> int:
        """A new value like another."""
        self.values.append(self.values[ref])
        return len(self.values) - 1

    def blocks(self, kind: str, eqn: Any, ins: list[Ref]) -> tuple[Block, ...]:
        """The blocks of a loop or of branches. Constants of a while and operands of a cond are the outer values themselves."""
        if kind == "scan":
            body = eqn.params["jaxpr"]
            inner = [self.new(v.aval) for v in body.jaxpr.invars]
            return (Block(tuple(inner), *self.block(body, inner)),)
        if kind == "while":
            n, m = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
            carried = eqn.params["body_jaxpr"].jaxpr.invars[m:]
            one, two = ([self.new(v.aval) for v in carried] for _ in range(2))
            return (
                Block(tuple(one), *self.block(eqn.params["cond_jaxpr"], [*ins[:n], *one])),
                Block(tuple(two), *self.block(eqn.params["body_jaxpr"], [*ins[n : n + m], *two])),
            )
        if kind == "cond":
            return tuple(Block((), *self.block(branch, ins[1:])) for branch in eqn.params["branches"])
        return ()


def _any(said: Any) -> bool:
    return any(said) if isinstance(said, (tuple, list)) else bool(said)


def sized(aval: Any) -> Value:
    """An abstract value's shape, type and bytes."""
    shape = tuple(getattr(aval, "shape", ()))
    dtype = getattr(aval, "dtype", None)
    try:
        width = np.dtype(dtype).itemsize
    except TypeError:
        width = KEY
    return Value(shape, str(dtype), math.prod(shape) * width)


def walk(block: Block) -> Iterator[Step]:
    """Every step, those inside blocks before the step that holds them."""
    for step in block.steps:
        for inner in step.blocks:
            yield from walk(inner)
        yield step


def trace(fn: Callable, args: list[Any], tree: Any) -> tuple[Program, Any, list[Any]]:
    """fn on these flat arguments (shapes and types): the program, the tree of its results, and their shapes and types.
    Raises ValueError, with the user's line, where JAX cannot trace it."""
    told: list[Any] = []

    def flat(*leaves):
        out, out_tree = jax.tree.flatten(fn(*tree.unflatten(leaves)))
        told.append(out_tree)
        return out

    try:
        closed, shapes = jax.make_jaxpr(flat, return_shape=True)(*args)
    except (TypeError, ValueError, IndexError, KeyError, AttributeError, NotImplementedError, jax.errors.JaxRuntimeError) as e:
        raise ValueError(untraceable(fn, e)) from e
    jaxpr, used = dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    one = Flattener()
    ins = [one.new(v.aval) for v in closed.jaxpr.invars]
    kept = [i for i, keep in zip(ins, used) if keep]
    steps, outs = one.block(jaxpr, list(kept), closed.consts)
    program = Program(Block(tuple(ins), steps, outs), tuple(one.values), sum(one.captured.values()))
    return program, told[-1], list(shapes)


def untraceable(fn: Callable, error: BaseException) -> str:
    """Why a function cannot be traced, with the line of the user's that JAX stopped at."""
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if "/site-packages/" not in f.filename and not f.filename.startswith(_HERE)
    ]
    at = frames[-1] if frames else None
    where = f" at {at.filename}:{at.lineno}, `{at.line}`" if at else ""
    first = str(error).strip().splitlines()[0] if str(error).strip() else ""
    name = getattr(fn, "__name__", type(fn).__name__)
    hint = _HINTS.get(type(error).__name__, "Change that line, or give what it needs to know as a number in static_argnums.")
    return f"'{name}' cannot be traced{where}: {type(error).__name__}: {first} {hint}"


_HINTS = {
    "TracerBoolConversionError": "A branch of Python on an array's elements has no one program: use jnp.where or jax.lax.cond.",
    "TracerArrayConversionError": "NumPy cannot work on a traced array: use jax.numpy there.",
    "TracerIntegerConversionError": "A traced array cannot be a Python integer: use jax.lax.dynamic_slice or jnp.take.",
    "ConcretizationTypeError": "An element's value is not known while tracing: keep it an array, or make it a static argument.",
    "NonConcreteBooleanIndexError": "How many elements a mask keeps is not known while tracing: use jnp.where with three arguments.",
}
