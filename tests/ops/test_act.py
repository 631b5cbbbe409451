"""Activations and gated units: value and gradient against plain autodiff of jax.nn's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshloom.ops.act import ACTIVATIONS, GATED

PLAIN = {
    "silu": jax.nn.silu,
    "gelu": lambda u: jax.nn.gelu(u, approximate=False),
    "gelu_new": lambda u: jax.nn.gelu(u, approximate=True),
    "gelu_pytorch_tanh": lambda u: jax.nn.gelu(u, approximate=True),
    "relu": jax.nn.relu,
    "relu2": lambda u: jnp.square(jax.nn.relu(u)),
    "tanh": jnp.tanh,
}
U, V, W = (jax.random.normal(jax.random.key(i), (5, 7, 11)) * 2 for i in range(3))


def same(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * float(jnp.abs(b).max()))


def test_tables_agree():
    assert set(PLAIN) == set(ACTIVATIONS) == set(GATED)


@pytest.mark.parametrize("name", PLAIN)
def test_against_autodiff(name):
    for act in (ACTIVATIONS[name], PLAIN[name]):
        assert act(jnp.float32(0)) == 0
    same(*[(*jax.vjp(f, U)[1](W), f(U)) for f in (ACTIVATIONS[name], PLAIN[name])])
    same(*[(*jax.vjp(f, U, V)[1](W), f(U, V)) for f in (GATED[name], lambda g, u: PLAIN[name](g) * u)])


@pytest.mark.parametrize("name", PLAIN)
def test_keeps_dtype_and_only_inputs(name):
    u = U.astype(jnp.bfloat16)
    out, back = jax.vjp(ACTIVATIONS[name], u)
    assert out.dtype == back(out)[0].dtype == jnp.bfloat16
    same(out.astype(jnp.float32), PLAIN[name](u.astype(jnp.float32)).astype(jnp.bfloat16).astype(jnp.float32))
    assert sum(x.nbytes for x in jax.tree.leaves(back)) == u.nbytes
