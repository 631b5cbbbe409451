"""Dropout: the mask depends on numbers alone, never on the cut; rate, scale, and independence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from meshloom.ops.dropout import AttentionDropout, Cells, at, attention_mask, dropout

KEY = jax.random.key(7)
X = jax.random.normal(jax.random.key(1), (8, 32, 64))
CELLS = Cells(jnp.arange(100, 108), jnp.arange(32), jnp.arange(64))
WHOLE = jax.jit(lambda x: dropout(x, KEY, 0.5, CELLS))


def test_rate_scale_and_mean():
    y = dropout(X, KEY, 0.25, CELLS)
    kept = y != 0
    np.testing.assert_allclose(y[kept], X[kept] / 0.75, rtol=1e-6)
    assert abs(float(kept.mean()) - 0.75) < 4 * (0.25 * 0.75 / X.size) ** 0.5


def test_neighbours_are_independent():
    z = np.asarray(dropout(jnp.ones((8, 64, 256)), KEY, 0.5, Cells(jnp.arange(8), jnp.arange(64), jnp.arange(256))) - 1)
    for axis in range(3):
        for step in (1, 2):
            a, b = (np.take(z, range(*r), axis) for r in ((0, z.shape[axis] - step), (step, z.shape[axis])))
            assert abs((a * b).mean()) < 5 / a.size**0.5
    other = np.asarray(dropout(jnp.ones(z.shape), at(KEY, "other"), 0.5, Cells(jnp.arange(8), jnp.arange(64), jnp.arange(256))) - 1)
    assert abs((z * other).mean()) < 5 / z.size**0.5


@pytest.mark.parametrize("spec", [P("data"), P("data", "tensor"), P("data", None, "tensor"), P()])
def test_any_cut_gives_the_same_mask(spec):
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    parts = [P(*spec[i : i + 1]) for i in range(3)]
    f = jax.shard_map(lambda x, *c: dropout(x, KEY, 0.5, Cells(*c)), mesh=mesh, in_specs=(spec, *parts), out_specs=spec)
    for got, want in zip(*(jax.jit(lambda x: (*jax.vjp(g, x)[1](x), g(x)))(X) for g in (lambda x: f(x, *CELLS), WHOLE))):  # noqa: B023
        assert (got == want).all()


def test_gradient_uses_the_same_mask_also_under_remat():
    f = lambda x: dropout(x, KEY, 0.5, CELLS)
    want = jnp.where(f(X) != 0, 2.0, 0.0)
    assert (jax.grad(lambda x: f(x).sum())(X) == want).all()
    assert (jax.grad(jax.checkpoint(lambda x: f(x).sum()))(X) == want).all()


def test_samples_tokens_places_differ():
    ones = jnp.ones_like(X)
    a = dropout(ones, KEY, 0.5, CELLS)
    for other in (
        dropout(ones, KEY, 0.5, CELLS._replace(samples=CELLS.samples + 8)),
        dropout(ones, KEY, 0.5, CELLS._replace(tokens=CELLS.tokens + 32)),
        dropout(ones, KEY, 0.5, CELLS._replace(features=CELLS.features + 64)),
        dropout(ones, at(KEY, "mlp"), 0.5, CELLS),
    ):
        assert 0.45 < float((a == other).mean()) < 0.55


def test_attention_mask_by_global_numbers():
    whole = attention_mask(AttentionDropout(0.5, KEY, jnp.arange(4), jnp.arange(6), jnp.arange(10), jnp.arange(10)))
    part = attention_mask(AttentionDropout(0.5, KEY, jnp.arange(2, 4), jnp.arange(3, 5), jnp.arange(7, 10), jnp.arange(10)))
    assert whole.shape == (4, 6, 10, 10)
    assert (part == whole[2:4, 3:5, 7:10]).all() and set(np.unique(whole)) == {0.0, 2.0}


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5])
def test_refuses_rates(rate):
    with pytest.raises(ValueError, match="from 0"):
        dropout(X, KEY, rate, CELLS)
