"""Flat products: every form against einsum, values and gradients; refusals; under simulated devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from meshloom.core.matmul import contract

SIZES = dict(b=2, t=5, d=12, h=3, k=4, f=10, v=9)
FORMS = ["btd,dhk->bthk", "bthk,hkd->btd", "btd,df->btf", "btf,fd->btd", "btd,vd->btv", "td,df->tf", "bthk,dhk->btd"]


def operands(eq):
    left, out = eq.split("->")
    return [jax.random.normal(jax.random.key(i), [SIZES[c] for c in s]) for i, s in enumerate([*left.split(","), out])]


def same(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * float(jnp.abs(b).max()))


@pytest.mark.parametrize("eq", FORMS)
def test_against_einsum(eq):
    x, w, dy = operands(eq)
    run = lambda f: jax.jit(lambda *a: (*jax.vjp(lambda x, w: f(eq, x, w), *a)[1](dy), f(eq, *a)))(x, w)
    same(run(contract), run(jnp.einsum))


def test_one_flat_dot_each_way():
    x, w, dy = operands("btd,dhk->bthk")
    text = jax.jit(lambda x, w: jax.vjp(lambda x, w: contract("btd,dhk->bthk", x, w), x, w)[1](dy)).lower(x, w).as_text()
    assert text.count("dot_general") == 2 and "transpose" not in text


@pytest.mark.parametrize("eq", ["btd,bdf->btf", "dbt,df->btf", "btd,fdk->btfk", "bthk,khd->btd"])
def test_refuses_what_is_not_flat(eq):
    with pytest.raises(ValueError, match="not one flat product"):
        contract(eq, jnp.ones((2, 2, 2)), jnp.ones((2, 2, 2)))


def test_replicated_weight_over_devices():
    x, w, dy = operands("btd,df->btf")
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    w = jnp.concatenate([w, w[:, :2]], 1)
    dy = jnp.concatenate([dy, dy[..., :2]], -1)
    f = jax.shard_map(
        lambda x, w: contract("btd,df->btf", x, w), mesh=mesh, in_specs=(P("data"), P(None, "tensor")), out_specs=P("data", None, "tensor")
    )
    same(*[jax.jit(lambda g: jax.vjp(g, x, w)[1](dy), static_argnums=0)(g) for g in (f, lambda x, w: jnp.einsum("btd,df->btf", x, w))])


def test_bfloat16():
    x, w, dy = (a.astype(jnp.bfloat16) for a in operands("btd,df->btf"))
    out, back = jax.vjp(lambda x, w: contract("btd,df->btf", x, w), x, w)
    assert {out.dtype, *(g.dtype for g in back(dy))} == {jnp.dtype(jnp.bfloat16)}
