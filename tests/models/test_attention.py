"""The attention block: which parameters it has, dropout, and key/value heads that are fewer than the devices. (Its arithmetic: the goldens.)"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from meshloom.core.layout import ONE_DEVICE, Layout
from meshloom.core.mesh import make_mesh
from meshloom.core.spec import is_spec
from meshloom.core.tree import named_leaves
from meshloom.models.attention import Attention, attend, own_heads, training_row
from meshloom.models.base import Ctx, Kind, ModelConfig

C = ModelConfig(layers=1, embed=16, heads=4, kv_heads=2, vocab=11, init_std=0.5, attention_dropout=0.3)


def test_a_family_has_the_biases_and_norms_that_it_asks_for() -> None:
    names = lambda **given: set(named_leaves(Attention.specs(C, **given), is_spec))
    assert names() == {"q", "k", "v", "o"}
    assert names(qkv_bias=True) - names() == {"q_bias", "k_bias", "v_bias"}
    assert names(o_bias=True) - names() == {"o_bias"} and names(qk_norm=True) - names() == {"q_norm", "k_norm"}
    assert Attention.specs(C).k.shape == (16, 2, 4)


def test_dropout_is_for_training() -> None:
    specs, ones = Attention.specs(C), jnp.ones((1, 6), jnp.int32)
    w = jax.tree.map(lambda s: jnp.asarray(np.random.default_rng(s.size).normal(size=s.shape), jnp.float32), specs, is_leaf=is_spec)

    @jax.jit
    def run(key: jax.Array) -> list[jax.Array]:
        ctx = Ctx(ones, jnp.cumsum(ones, 1) - 1, None, jnp.arange(1), key, 0, None, None)
        x = jnp.sin(jnp.arange(96.0)).reshape(1, 6, 16)
        return [attend(C, ONE_DEVICE, Kind(), w, x, dataclasses.replace(ctx, key=k))[0] for k in (key, None)]

    (a, plain), (b, _), (again, _) = run(jax.random.key(3)), run(jax.random.key(4)), run(jax.random.key(3))
    assert (a == again).all() and (a != b).any() and (a != plain).any()


def test_each_query_head_finds_its_key_head_where_there_are_more_devices_than_key_heads() -> None:
    lay = Layout(dict(tensor=4), acts=dict(heads=("tensor",)))
    q, kv = jnp.zeros((1, 1, 4, 4)), jnp.arange(8.0).reshape(1, 1, 2, 4)

    def local(q: jax.Array, kv: jax.Array) -> jax.Array:
        return own_heads(C, lay, q, kv)

    heads = P(None, None, "tensor")
    got = jax.jit(jax.shard_map(local, mesh=make_mesh(lay), in_specs=(heads, P()), out_specs=heads))(q, kv)
    np.testing.assert_array_equal(got, jnp.repeat(kv, 2, axis=2))
    assert own_heads(C, ONE_DEVICE, q, kv) is kv


def test_the_row_of_a_training_step_is_told_with_the_reasons():
    """No silent fallback: what was preferred and why it cannot serve."""
    c = C.model_copy(update={"head": 8, "attention_dropout": 0.0})
    assert training_row(c, Layout(), Kind(), 2, 64, True, "float32") == "attention by 'blocks' (not cudnn: needs an NVIDIA GPU, here cpu)"
    dropping = c.model_copy(update={"attention_dropout": 0.1})
    assert "attention by 'reference'" in training_row(dropping, Layout(), Kind(), 2, 64, True, "float32")
    assert "attention by 'cudnn'" in training_row(c, Layout(platform="gpu"), Kind(), 2, 64, True, "bfloat16")
