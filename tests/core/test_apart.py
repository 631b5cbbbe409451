"""Computations that stay whole in the compiled program."""

import jax
import jax.numpy as jnp

from meshloom.core.apart import apart


def tables(a):
    return jnp.cos(a), jnp.sin(a)


def users(x, a, made):
    """Two uses that would each compute every cosine again for every head."""
    c, s = (t[:, None] for t in made(a))
    return x * c - s, x * s + c


def test_a_computation_apart_is_compiled_once_and_changes_nothing():
    x, a = jnp.ones((64, 8, 32)), jnp.linspace(0, 9, 64 * 32).reshape(64, 32)
    program = jax.jit(lambda x, a: users(x, a, lambda a: apart(tables, a))).lower(x, a).compile()
    assert program.as_text().count(" cosine(") == 1
    for got, want in zip(program(x, a), users(x, a, tables)):
        assert jnp.allclose(got, want, atol=1e-6)


def test_it_has_a_gradient():
    got = jax.jit(jax.grad(lambda a: sum(t.sum() for t in apart(tables, a))))(jnp.arange(3.0))
    assert jnp.allclose(got, jnp.cos(jnp.arange(3.0)) - jnp.sin(jnp.arange(3.0)), atol=1e-6)
