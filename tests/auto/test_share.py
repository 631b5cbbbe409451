"""Copies: one for operations that stand close, another for those far away; the compiled program moves as often."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding

from auto.cases import f32, rates
from meshloom.auto.apply import Runner, layouts, partition
from meshloom.auto.grow import grow
from meshloom.auto.price import specs
from meshloom.auto.problem import pose
from meshloom.auto.program import trace
from meshloom.auto.repeat import alone
from meshloom.auto.share import NEAR, through
from meshloom.auto.solve import search
from meshloom.plan.hlo import collectives, total


def graph(fn, *args):
    r = rates(x=4)
    program, *_ = trace(fn, *jax.tree.flatten(args))
    ins = program.block.ins
    return grow(program, r, {v: specs(program.values[v].shape, r.mesh) for v in ins}, {}, set(), dict.fromkeys(ins, "")), program


def three(x, q, k, v):
    return x @ q, x @ k, x @ v


def apart(x, w, others):
    """w is used first and last, with products between."""
    y = x @ w
    for other in others:
        y = jnp.tanh(y @ other)
    return jnp.tanh(y) @ w


def test_close_uses_share_a_copy() -> None:
    g, program = graph(three, f32(8, 16), *[f32(16, 16)] * 3)
    x = program.block.ins[0]
    copies = [i for i, n in enumerate(g.nodes) if n.kind == "copy"]
    assert len(copies) == 1
    into = [e for e in g.edges if e.value == x and e.target == copies[0]]
    out = [e for e in g.edges if e.source == copies[0]]
    assert len(into) == 1 and len(out) == 3 and not g.again
    assert set(into[0].want) == {s for e in out for s in e.want} and into[0].span[1] == max(e.span[1] for e in out)
    choice = [0] * len(g.nodes)
    assert through(g.edges, choice) == {e.at: into[0].want[0] for e in out}


def test_far_uses_do_not() -> None:
    few, many = ([f32(16, 16)] * n for n in (NEAR - 2, NEAR + 2))
    near, _ = graph(apart, f32(8, 16), f32(16, 16), few)
    far, program = graph(apart, f32(8, 16), f32(16, 16), many)
    assert any(n.kind == "copy" for n in near.nodes) and not near.again
    w = program.block.ins[1]
    assert [ref for ref, _ in far.again.values()] == [w] and not any(n.kind == "copy" for n in far.nodes)


@pytest.mark.parametrize("between, gathers", [(2, 1), (NEAR + 2, 2)])
def test_the_compiled_program_moves_as_often(between: int, gathers: int) -> None:
    """w lies split and is gathered for rows that are split, once where its uses are close, twice where they are not."""
    args, r = (f32(64, 16), f32(16, 16), [f32(16, 16)] * between), rates(0.0, x=8)
    leaves, tree = jax.tree.flatten(args)
    program, *_ = trace(apart, leaves, tree)
    ins = program.block.ins
    allowed = {v: specs(program.values[v].shape, r.mesh)[:1] for v in ins} | {ins[0]: [(0,)], ins[1]: [(0,)]}
    g = grow(program, r, allowed, {}, set(), dict.fromkeys(ins, ""))
    choice = search(*pose(g, alone(g), r), 1e9, 60, 0.0).choice
    mesh = Mesh(np.array(jax.devices()[:8]), ("x",), axis_types=(AxisType.Auto,))
    run = jax.jit(Runner(program, layouts(g, choice, r.mesh), mesh, ("x",)), in_shardings=tuple(shardings(mesh, allowed, ins, program)))
    found = total(collectives(run.lower(*leaves).compile().as_text(), {"x": 8}))
    assert found == {("all-gather", ("x",)): (gathers, gathers * 16 * 16 * 4)}


def shardings(mesh, allowed, ins, program):
    return (NamedSharding(mesh, partition(allowed[v][0], len(program.values[v].shape), ("x",))) for v in ins)
