"""The equations of any JAX function: floating-point operations of each, and the bytes that pass in front of each.  Traces; computes nothing."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from meshloom.core.tree import Tree, named_leaves

INLINED = ("jit", "closed_call", "core_call")
"""Calls that change nothing: their equations stand in the caller's place. Others (scan, cond, remat, custom derivatives) are one equation."""
ELEMENTS = frozenset(
    "add add_any sub mul div rem pow integer_pow max min neg sign abs exp exp2 expm1 log log1p logistic tanh sin cos tan asin acos atan atan2 sinh cosh sqrt rsqrt "
    "cbrt square erf erfc erf_inv lgamma digamma floor ceil round clamp nextafter and or xor not eq ne lt le gt ge select_n is_finite cumsum cumprod cumlogsumexp "
    "cummax cummin reduce_precision".split()
)
"""Primitives of one operation for each element of the result; a transcendental counts as one."""
REDUCED = frozenset("reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin".split())
"""Primitives of one operation for each element of the operand."""


class Counted(NamedTuple):
    """flops: of each equation. zero: primitive -> equations that counted as no work (moves of data, and what has no row here). once: loops whose number of
    turns is not known before they run, counted as one turn."""

    flops: np.ndarray
    zero: Mapping[str, int]
    once: int

    @property
    def said(self) -> str:
        """What was not counted, in a line; empty for nothing."""
        names = ", ".join(f"{name} ({n})" for name, n in sorted(self.zero.items()))
        return "; ".join(
            [*([f"no flops: {names}"] if names else []), *([f"while loops counted as one turn: {self.once}"] if self.once else [])]
        )


def traced(fn: Callable, *args: Any) -> jex.ClosedJaxpr:
    """The equations of a function, calls of INLINED in their place.  args: arrays or their shapes."""
    closed = jax.make_jaxpr(fn)(*args)
    if not any(e.primitive.name in INLINED for e in closed.jaxpr.eqns):
        return closed
    return jax.make_jaxpr(lambda *flat: _run(closed.jaxpr, closed.consts, flat))(*jax.tree.leaves(args))


def _run(jaxpr: Any, consts: Any, args: Any) -> list[Any]:
    """Evaluates equations, those of inlined calls one by one."""
    env: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args)))
    read = lambda v: v.val if isinstance(v, jex.Literal) else env[v]
    for e in jaxpr.eqns:
        given = [read(v) for v in e.invars]
        if e.primitive.name in INLINED:
            inner = e.params.get("jaxpr", e.params.get("call_jaxpr"))
            out = _run(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), given)
        else:
            with e.ctx.manager:
                out = e.primitive.bind(*given, **e.primitive.get_bind_params(e.params))
            out = out if e.primitive.multiple_results else [out]
        env.update(zip(e.outvars, out))
    return [read(v) for v in jaxpr.outvars]


def count(closed: jex.ClosedJaxpr) -> Counted:
    """Operations of each equation; those inside loops as often as they run, of a condition those of its heaviest branch."""
    zero: Counter[str] = Counter()
    flops = np.array([_flops(e, zero) for e in closed.jaxpr.eqns], float)
    once = zero.pop("while", 0)
    return Counted(flops, dict(zero), once)


def _flops(e: Any, zero: Counter[str]) -> float:
    """Operations of one equation; primitives that count as none are noted."""
    name, out = e.primitive.name, sum(_elements(v) for v in e.outvars)
    if name in COUNTS:
        return COUNTS[name](e, zero)
    if name in ELEMENTS:
        return out
    if name in REDUCED:
        return sum(_elements(v) for v in e.invars)
    inner = list(_inner(e))
    if inner and name != "pallas_call":
        return sum(_all(jaxpr, zero) for jaxpr in inner)
    zero[name] += 1
    return 0.0


def _all(jaxpr: Any, zero: Counter[str]) -> float:
    return sum(_flops(e, zero) for e in getattr(jaxpr, "jaxpr", jaxpr).eqns)


def _inner(e: Any) -> Iterator[Any]:
    """The equations inside an equation."""
    for value in e.params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            if hasattr(one, "eqns") or hasattr(one, "jaxpr"):
                yield one


def _dot(e: Any, zero: Counter[str]) -> float:
    """2 x result x contracted."""
    (contracted, _), _ = e.params["dimension_numbers"]
    return 2.0 * _elements(e.outvars[0]) * math.prod(e.invars[0].aval.shape[i] for i in contracted)


def _conv(e: Any, zero: Counter[str]) -> float:
    """2 x result x what a result element reads of the kernel."""
    kernel = e.invars[1].aval.shape
    return 2.0 * _elements(e.outvars[0]) * math.prod(kernel) / kernel[e.params["dimension_numbers"].rhs_spec[0]]


def _ragged(e: Any, zero: Counter[str]) -> float:
    """As if every row met one group's matrix: 2 x rows x matrix."""
    rows, matrices = e.invars[0].aval.shape, e.invars[1].aval.shape
    return 2.0 * rows[0] * math.prod(matrices[1:])


def _sort(e: Any, zero: Counter[str]) -> float:
    """n log2 n comparisons a row."""
    shape = e.invars[0].aval.shape
    length = shape[e.params.get("dimension", -1)] if shape else 1
    return math.prod(shape) * math.log2(max(length, 2))


def _scan(e: Any, zero: Counter[str]) -> float:
    return e.params["length"] * _all(e.params["jaxpr"], zero)


def _while(e: Any, zero: Counter[str]) -> float:
    zero["while"] += 1
    return _all(e.params["body_jaxpr"], zero) + _all(e.params["cond_jaxpr"], zero)


def _cond(e: Any, zero: Counter[str]) -> float:
    return max(_all(branch, zero) for branch in e.params["branches"])


COUNTS: dict[str, Callable[[Any, Counter[str]], float]] = {
    "dot_general": _dot,
    "conv_general_dilated": _conv,
    "ragged_dot": _ragged,
    "ragged_dot_general": _ragged,
    "sort": _sort,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}
"""Primitive -> its operations."""


class Program(NamedTuple):
    """A function of parameters and data as a chain of operators: equations that depend on both. What depends on one of them or none (a cast of a weight, a
    mask) is computed wherever it is read, crosses nothing, and its work is that of the first operator that reads it.

    closed: the equations. chain: numbers of the operators. flops: of each. front: bytes that pass in front of each: made before it, read from there on.
    params, data: name -> the variable. counted: all equations. needs: equation -> those beside the chain that it reads, in order."""

    closed: jex.ClosedJaxpr
    chain: tuple[int, ...]
    flops: np.ndarray
    front: np.ndarray
    params: Mapping[str, Any]
    data: Mapping[str, Any]
    counted: Counted
    needs: Mapping[int, tuple[int, ...]]


def program(fn: Callable[[Tree, Tree], Any], params: Tree, data: Mapping[str, Any]) -> Program:
    """The operators of fn(params, data).  Raises ValueError where nothing depends on both."""
    closed = traced(fn, params, dict(data))
    jaxpr, names = closed.jaxpr, list(named_leaves(params))
    given = dict(zip(names, jaxpr.invars)), dict(zip(sorted(data), jaxpr.invars[len(names) :]))  # leaves are in the order of keys
    counted, maker = count(closed), {}
    on = {v: (True, False) for v in given[0].values()} | {v: (False, True) for v in given[1].values()}
    chain, needs, linked = [], {}, set()
    for at, e in enumerate(jaxpr.eqns):
        read = [v for v in e.invars if not isinstance(v, jex.Literal)]
        depends = tuple(any(on.get(v, (False, False))[i] for v in read) for i in (0, 1))
        beside = {n for v in read if v in maker and maker[v] not in linked for n in (*needs[maker[v]], maker[v])}
        needs[at] = tuple(sorted(beside))
        for v in e.outvars:
            on[v], maker[v] = depends, at
        if all(depends):
            chain.append(at)
            linked.add(at)
    if not chain:
        raise ValueError(
            "There is no operator to cut into layers: nothing that the function computes depends on both parameters and data. Give a function "
            "(parameters, data) -> loss that uses them."
        )
    flops, owned = np.zeros(len(chain)), set()
    for i, at in enumerate(chain):
        mine = {at, *needs[at]} - owned
        owned |= mine
        flops[i] = counted.flops[sorted(mine)].sum()
    return Program(closed, tuple(chain), flops, _front(jaxpr, chain), *given, counted, needs)


def _front(jaxpr: Any, chain: list[int]) -> np.ndarray:
    """Bytes that are made by operators before each and read by it or a later one."""
    place, front = {at: i for i, at in enumerate(chain)}, np.zeros(len(chain) + 1)
    for v, (made, read) in spans(jaxpr, place).items():
        front[made + 1 : read + 1] += size_of(v)
    return front[:-1]


def spans(jaxpr: Any, place: Mapping[int, int]) -> dict[Any, tuple[int, int]]:
    """Of each value that an operator makes and another reads: which made it, which reads it last; a result is read behind the last.
    place: equation -> its place in the chain."""
    made = {v: place[at] for at, e in enumerate(jaxpr.eqns) if at in place for v in e.outvars}
    last: dict[Any, int] = {}
    for at, e in enumerate(jaxpr.eqns):
        for v in e.invars:
            if not isinstance(v, jex.Literal) and v in made:
                last[v] = place[at]
    last |= {v: len(place) for v in jaxpr.outvars if not isinstance(v, jex.Literal) and v in made}
    return {v: (made[v], read) for v, read in last.items()}


def size_of(v: Any) -> int:
    """Bytes of a value; of a key, its data."""
    a = v.aval
    if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        return _elements(v) * 8
    return _elements(v) * np.dtype(a.dtype).itemsize


def _elements(v: Any) -> int:
    return math.prod(getattr(v.aval, "shape", ()))
