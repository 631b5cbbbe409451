"""Any function of parameters and data, cut into layers that run one after another: what stages of a pipeline are made of."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex

from meshloom.core.tree import Tree, named_leaves
from meshloom.plan.cluster import EPSILON, cluster
from meshloom.plan.equations import Program, program, spans
from meshloom.runner.stages import WHOLE, Stage


class Layer(NamedTuple):
    """run: (parameters, message, data) -> message to the next, a tree of arrays; the first gets (), the last returns the loss of its rows, a sum, as a
    scalar.  takes: names of the data that it reads.  params: its parameters; a dictionary where some are `tied`.
    tied: keys that other layers hold the same array under."""

    run: Callable[[Any, Any, dict[str, Any]], Tree]
    takes: tuple[str, ...]
    params: Tree
    tied: tuple[str, ...] = ()


def cut(
    fn: Callable[[Tree, dict[str, Any]], Any], params: Tree, data: Mapping[str, Any], layers: int, epsilon: float = EPSILON
) -> list[Layer]:
    """fn(parameters, data) -> loss, a sum over rows, as layers of about equal work with few bytes between them (plan/cluster.py).

    data: name -> an array, or its shape, of the rows that run at once: of one micro-batch. A parameter that several layers read is tied.  A loop (scan) or
    a remat is one operator: a model whose layers are a loop has to unroll it.  Raises ValueError for what cannot be cut, and where the loss is none."""
    p = program(fn, params, data)
    out = p.closed.jaxpr.outvars
    if len(out) != 1 or out[0].aval.shape:
        raise ValueError(
            f"The function returns {', '.join(str(v.aval) for v in out) or 'nothing'}. Let it return the loss of its rows, one number, a sum."
        )
    found = cluster(p.flops, p.front, layers, epsilon)
    leaves, ends = named_leaves(params), [*found.starts[1:], len(p.chain)]
    pieces = [_Piece(p, start, end) for start, end in zip(found.starts, ends)]
    held = [name for piece in pieces for name in piece.params]
    ties = {name for name in held if held.count(name) > 1}
    return [Layer(one.run, one.takes, {n: leaves[n] for n in one.params}, tuple(n for n in one.params if n in ties)) for one in pieces]


class _Piece:
    """Operators start to end of a program as a function of their own."""

    def __init__(self, p: Program, start: int, end: int) -> None:
        eqns, place = p.closed.jaxpr.eqns, {at: i for i, at in enumerate(p.chain)}
        crossing = spans(p.closed.jaxpr, place)
        gets = [v for v, (made, read) in crossing.items() if made < start <= read]
        last = end == len(p.chain)
        sends = list(p.closed.jaxpr.outvars) if last else [v for v, (made, read) in crossing.items() if made < end <= read]
        numbers = sorted({n for at in p.chain[start:end] for n in (*p.needs[at], at)})
        read = {v for n in numbers for v in eqns[n].invars if not isinstance(v, jex.Literal)} | {
            v for v in sends if not isinstance(v, jex.Literal)
        }
        self.params = tuple(name for name, v in p.params.items() if v in read)
        self.takes = tuple(name for name, v in p.data.items() if v in read)
        given = [*(p.params[name] for name in self.params), *gets, *(p.data[name] for name in self.takes)]
        jaxpr = p.closed.jaxpr.replace(
            invars=given, outvars=sends, eqns=[eqns[n] for n in numbers], debug_info=p.closed.jaxpr.debug_info.with_unknown_names()
        )
        self.call, self.last = jex.jaxpr_as_fun(jex.ClosedJaxpr(jaxpr, p.closed.consts)), last

    def run(self, w: Mapping[str, Any], message: Sequence[Any], data: Mapping[str, Any]) -> Tree:
        """(parameters by path, values of the operators before, data) -> the values that operators behind read; of the last the loss."""
        out = self.call(*(w[name] for name in self.params), *message, *(data[name] for name in self.takes))
        return out[0] if self.last else tuple(out)


def joined(layers: Sequence[Layer], first: int) -> tuple[Stage, Tree]:
    """Consecutive layers as one stage, and its parameters: those of layer i under "layer {i}", those tied once, under their own name.
    first: the number of the first."""
    takes = tuple(dict.fromkeys(name for layer in layers for name in layer.takes))
    params: dict[str, Any] = {}
    for i, layer in enumerate(layers, first):
        tied = {name: layer.params[name] for name in layer.tied}
        params |= tied | {f"layer {i}": {k: v for k, v in layer.params.items() if k not in tied} if tied else layer.params}

    def run(w: Any, message: Any, data: dict[str, Any]) -> Tree:
        for i, layer in enumerate(layers, first):
            own = w[f"layer {i}"]
            mine = {**own, **{name: w[name] for name in layer.tied}} if layer.tied else own
            message = layer.run(mine, message, {name: data[name] for name in layer.takes})
        return message

    return Stage(run, takes, WHOLE), params


def whole(layers: Sequence[Layer]) -> Callable[[Sequence[Tree], Mapping[str, Any]], jax.Array]:
    """(parameters of each layer, data) -> the loss: all layers on one device."""

    def run(params: Sequence[Tree], data: Mapping[str, Any]) -> jax.Array:
        message: Any = ()
        for layer, w in zip(layers, params):
            message = layer.run(w, message, {name: data[name] for name in layer.takes})
        return message

    return run
