"""The pieces that families share, against plain arithmetic."""

import functools
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from meshloom.core.layout import ONE_DEVICE, Layout
from meshloom.core.mesh import make_mesh
from meshloom.models.base import Ctx, ModelConfig
from meshloom.models.parts import JOIN, Activation, GatedMlp, Mlp, drop, gated_mlp, lookup, mlp, products
from meshloom.ops.act import ACTIVATIONS

C = ModelConfig(layers=1, embed=8, heads=2, ffn=12, vocab=16, vocab_multiple=1, dropout=0.5)


def random(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), jnp.float32)


def test_the_names_of_activations_are_the_rows_of_the_table() -> None:
    assert set(get_args(Activation)) == set(ACTIVATIONS)


@pytest.mark.parametrize("bias", [False, True])
def test_the_gated_mlp_is_what_it_says(bias: bool) -> None:
    up, gate, down = random(8, 12), random(8, 12) + 1, random(12, 8)
    b = (random(12), random(12) - 1, random(8)) if bias else (None, None, None)
    x = random(2, 3, 8)
    zero = lambda v: 0 if v is None else v
    want = (jax.nn.silu(x @ gate + zero(b[1])) * (x @ up + zero(b[0]))) @ down + zero(b[2])
    got = jax.jit(functools.partial(gated_mlp, ONE_DEVICE))(GatedMlp(up, gate, down, *b), x)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [JOIN - 1, JOIN])
@pytest.mark.parametrize("biases", [(True, True), (False, False), (True, False)])
def test_several_products_of_one_x_are_as_each_alone(rows: int, biases: tuple[bool, bool]) -> None:
    """Joined or not, values and gradients of x, weights and biases."""
    x, q, k = random(1, rows, 8), random(8, 2, 3), random(8, 5)
    b = [random(*w.shape[1:]) + 1 if has else None for w, has in zip((q, k), biases, strict=True)]
    zero = lambda v: 0 if v is None else v

    def alone(x, q, k, b):
        return jnp.einsum("bTd,dhk->bThk", x, q) + zero(b[0]), x @ k + zero(b[1])

    def together(x, q, k, b):
        return tuple(products(ONE_DEVICE, x, (("bTd,dhk->bThk", q, b[0]), ("bTd,df->bTf", k, b[1]))))

    def both(f):
        y, back = jax.vjp(f, x, q, k, b)
        return y, back(jax.tree.map(jnp.sin, y))

    for want, got in zip(jax.tree.leaves(both(alone)), jax.tree.leaves(jax.jit(lambda: both(together))()), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


class Half:
    """A leaf with a `dot` of its own."""

    def __init__(self, w: jax.Array) -> None:
        self.w = w

    def dot(self, eq: str, x: jax.Array) -> jax.Array:
        return jnp.einsum(eq, x, self.w) / 2


def test_a_leaf_with_its_own_product_is_left_alone() -> None:
    x, q, k = random(1, JOIN, 8), random(8, 4), random(8, 5)
    a, b = products(ONE_DEVICE, x, (("bTd,df->bTf", Half(q), None), ("bTd,df->bTf", k, None)))
    np.testing.assert_allclose(a, x @ q / 2, rtol=2e-5, atol=1e-5)
    np.testing.assert_allclose(b, x @ k, rtol=2e-5, atol=1e-5)


def test_the_mlp_is_what_it_says() -> None:
    w, x = Mlp(random(8, 12), random(12, 8), random(12), random(8)), random(2, 3, 8)
    want = jax.nn.gelu(x @ w.up + w.up_bias, approximate=False) @ w.down + w.down_bias
    np.testing.assert_allclose(jax.jit(functools.partial(mlp, ONE_DEVICE, "gelu"))(w, x), want, rtol=2e-5, atol=1e-5)


def test_a_split_embedding_gives_the_same_rows() -> None:
    lay = Layout(dict(tensor=4), acts=dict(vocab=("tensor",), heads=("tensor",)))
    table, tokens = random(16, 8), jnp.arange(16).reshape(2, 8)
    split = jax.shard_map(functools.partial(lookup, lay), mesh=make_mesh(lay), in_specs=(P("tensor"), P()), out_specs=P())
    np.testing.assert_array_equal(jax.jit(split)(table, tokens), table[tokens])
    np.testing.assert_array_equal(lookup(ONE_DEVICE, table, tokens), table[tokens])


def test_dropout_is_for_training_and_each_place_has_its_own() -> None:
    x = jnp.ones((2, 4, 8))
    ctx = Ctx(None, None, None, jnp.arange(2), jax.random.key(0), 3, None, None)
    a, b = drop(C, ONE_DEVICE, x, ctx, "a"), drop(C, ONE_DEVICE, x, ctx, "b")
    assert set(np.unique(a)) == {0.0, 2.0} and (a != b).any()
    assert drop(C, ONE_DEVICE, x, Ctx(None, None, None, None, None, 3, None, None), "a") is x
