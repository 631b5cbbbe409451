"""Marks of which mesh axes a value differs over."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from meshloom.core.vary import alike, vary, varying


def test_outside_a_mesh_nothing_happens():
    x = jnp.ones(3)
    assert vary(x, ()) is x and varying(x) == frozenset() and alike(x, x) == (x, x)


def test_marks_and_sums_the_cotangent_once():
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def f(x, w):
        assert varying(x) == {"data"} and varying(w) == set()
        a, b = alike(x, w)
        assert varying(a) == varying(b) == {"data"}
        assert varying(vary(b, ("data", "tensor"))) == {"data", "tensor"}
        return jax.lax.psum((a * b).sum(), "data")

    g = jax.jit(jax.grad(lambda w: jax.shard_map(f, mesh=mesh, in_specs=(P("data"), P()), out_specs=P())(jnp.arange(8.0), w)))
    assert (g(jnp.ones(4)) == jnp.array([0 + 4, 1 + 5, 2 + 6, 3 + 7.0])).all()
