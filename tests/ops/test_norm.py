"""Norms: value and gradient against plain autodiff, per head, in bf16, and under simulated devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from meshloom.core.layout import Layout
from meshloom.core.mesh import make_mesh
from meshloom.ops.norm import layer_norm, rms_norm

X = jax.random.normal(jax.random.key(0), (8, 5, 3, 16)) * 3 + 1
DY = jax.random.normal(jax.random.key(1), X.shape)
GAIN, BIAS = (jax.random.normal(jax.random.key(i), (16,)) for i in (2, 3))


def plain_rms(x, gain):
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * gain


def plain_layer(x, gain, bias):
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5) * gain + bias


CASES = [(lambda *a: rms_norm(*a, 1e-5), plain_rms, (GAIN,)), (lambda *a: layer_norm(*a, 1e-5), plain_layer, (GAIN, BIAS))]


def same(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * float(jnp.abs(b).max()))


@pytest.mark.parametrize("lean, plain, params", CASES)
def test_against_autodiff(lean, plain, params):
    same(*[(*jax.vjp(f, X, *params)[1](DY), f(X, *params)) for f in (lean, plain)])


@pytest.mark.parametrize("lean, plain, params", CASES)
def test_gain_replicated_over_devices(lean, plain, params):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    f = jax.shard_map(lean, mesh=mesh, in_specs=(P("data"), *[P()] * len(params)), out_specs=P("data"))
    same(*[jax.jit(lambda g: jax.vjp(g, X, *params)[1](DY), static_argnums=0)(g) for g in (f, plain)])


@pytest.mark.parametrize("lean, plain, params", CASES)
def test_bfloat16_has_fp32_statistics(lean, plain, params):
    x, half = (X + 100).astype(jnp.bfloat16), [p.astype(jnp.bfloat16) for p in params]
    out, back = jax.vjp(lean, x, *half)
    want = plain(x.astype(jnp.float32), *[p.astype(jnp.float32) for p in half])
    assert out.dtype == jnp.bfloat16 and all(g.dtype == jnp.bfloat16 for g in back(out))
    np.testing.assert_allclose(out.astype(jnp.float32), want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("row", [0, 1], ids=["rms", "layer"])
def test_split_features_share_their_statistics(row):
    split = [lambda x, g: rms_norm(x, g, 1e-5, ("x",)), lambda x, g, b: layer_norm(x, g, b, 1e-5, ("x",))][row]
    ours, _, args = CASES[row]
    last = P(None, None, None, "x")
    mapped = jax.shard_map(split, mesh=make_mesh(Layout({"x": 4})), in_specs=(last, *[P("x")] * len(args)), out_specs=last)
    both = lambda fn: jax.jit(lambda *a: jax.vjp(fn, *a)[1](DY))(X, *args)
    same(jax.jit(mapped)(X, *args), ours(X, *args))
    same(both(mapped), both(ours))
