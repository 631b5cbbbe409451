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
from meshloom.models.parts import Activation, GatedMlp, Mlp, drop, gated_mlp, lookup, mlp, plus
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


def test_a_bias_is_added_over_the_last_axes() -> None:
    x, bias = random(2, 3, 4, 5), random(4, 5)
    np.testing.assert_array_equal(plus(x, bias), x + bias)
    np.testing.assert_allclose(jax.grad(lambda b: jnp.sum(plus(x, b) ** 2))(bias), 2 * (x + bias).sum((0, 1)), rtol=1e-5)
    assert plus(x, None) is x


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
