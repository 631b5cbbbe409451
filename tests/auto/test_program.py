"""Tracing: calls become one list, loops and branches blocks, what cannot be traced a sentence with its line."""

import inspect

import jax
import jax.numpy as jnp
import pytest

from auto.cases import f32
from meshloom.auto.program import Literal, Value, sized, trace, untraceable, walk


def traced(fn, *args):
    return trace(fn, *jax.tree.flatten(args))


@jax.custom_vjp
def twice(x):
    return x * 2


twice.defvjp(lambda x: (x * 2, None), lambda _, g: (g * 2,))


def test_calls_are_inlined() -> None:
    def fn(x):
        return jax.jit(lambda x: jnp.sin(x))(x) + twice(jax.nn.relu(x)) + jax.checkpoint(jnp.cos)(x)

    program, tree, results = traced(fn, f32(4))
    assert [s.kind for s in walk(program.block)] == ["sin", "max", "mul", "add", "cos", "add"]
    assert tree == jax.tree.structure(0) and results[0].shape == (4,)
    assert program.values[program.block.ins[0]] == Value((4,), "float32", 16)


def test_what_is_computed_again_stands_behind_a_barrier() -> None:
    program, *_ = traced(jax.grad(lambda x: jnp.sum(jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))(x))), f32(4))
    kinds = [s.kind for s in walk(program.block)]
    assert "barrier" in kinds and kinds.index("barrier") < kinds.index("sin", kinds.index("barrier"))


def test_loops_and_branches_are_blocks() -> None:
    def fn(x, n):
        y, z = jax.lax.scan(lambda c, w: (c + w, c * w), x[0], x)
        y = jax.lax.while_loop(lambda c: c[0] < n, lambda c: c + y, y)
        return jax.lax.cond(n > 0, lambda: y, lambda: z[0])

    program, *_ = traced(fn, f32(3, 4), f32())
    blocks = {s.kind: s.blocks for s in program.block.steps if s.blocks}
    assert {k: len(b) for k, b in blocks.items()} == {"scan": 1, "while": 2, "cond": 2}
    assert [s.kind for s in blocks["scan"][0].steps] == ["add", "mul"]


def test_what_no_result_needs_is_left_out_and_captured_arrays_are_counted() -> None:
    table = jnp.ones((8, 8))

    def fn(x, unused):
        jnp.sin(x)
        return x + table[0]

    program, *_ = traced(fn, f32(8), f32(5))
    assert "sin" not in [s.kind for s in walk(program.block)] and program.captured == 256 and len(program.block.ins) == 2
    assert any(isinstance(r, Literal) for s in walk(program.block) for r in s.ins)


def test_a_random_key_has_a_size() -> None:
    assert sized(jax.eval_shape(lambda: jax.random.key(0))).bytes == 8


def branches(x):
    if x[0] > 0:
        return x
    return -x


def numbers(x):
    return jnp.zeros(x[0].astype(int))


@pytest.mark.parametrize("fn, says", [(branches, "use jnp.where or jax.lax.cond"), (numbers, "cannot be traced")])
def test_what_cannot_be_traced_points_to_the_line(fn, says) -> None:
    with pytest.raises(ValueError, match=says) as told:
        traced(fn, f32(4))
    assert f"'{fn.__name__}' cannot be traced at {__file__}:{inspect.getsourcelines(fn)[1] + 1}" in str(told.value)


def test_an_error_without_a_line_is_told_too() -> None:
    assert "'branches' cannot be traced: KeyError: 'a'" in untraceable(branches, KeyError("a"))
