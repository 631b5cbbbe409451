"""dot, put and live on local shards: values, gradients and the one collective that each implies, on four devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from meshloom.core.layout import ONE_DEVICE
from meshloom.core.leaf import dot, gathers, live, parts, put
from meshloom.core.mesh import make_mesh
from meshloom.parallel.sequence import SEQUENCE
from meshloom.parallel.tensor1d import TENSOR
from meshloom.parallel.zero import strategy
from meshloom.plan.hlo import collectives, total
from programs import compiled

TP, SP = TENSOR.layout(4), TENSOR.layout(4) | SEQUENCE.layout(4)
ZERO2, ZERO3 = strategy(2).layout(4), strategy(3).layout(4)
X, UP, DOWN = (np.random.default_rng(i).standard_normal(s, np.float32) for i, s in enumerate([(2, 8, 12), (12, 16), (16, 12)]))
WHOLE = 2 * 8 * 12 * 4


def mlp(lay, x, up, down):
    """Two products around the work region."""
    hidden = jnp.tanh(dot(lay, "bTd,df->bTf", put(lay, "btd->bTd", x), up))
    return dot(lay, "bTf,fd->btd", hidden, down)


@pytest.mark.parametrize("lay, x", [(TP, P()), (SP, P(None, "tensor"))], ids=["tensor", "sequence"])
def test_two_products_equal_one_device(lay, x) -> None:
    mesh = make_mesh(lay)
    specs = x, P(None, "tensor"), P("tensor")
    split = jax.shard_map(lambda *a: mlp(lay, *a), mesh=mesh, in_specs=specs, out_specs=x)
    loss = lambda f: jax.jit(jax.value_and_grad(lambda *a: jnp.sum(jnp.sin(f(*a))), (0, 1, 2)))
    got, want = loss(split)(X, UP, DOWN), loss(lambda *a: mlp(ONE_DEVICE, *a))(X, UP, DOWN)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


MOVES = {
    "tensor": (TP, P(), {("all-reduce", ("tensor",)): (1, WHOLE)}),
    "sequence": (SP, P(None, "tensor"), {("all-gather", ("tensor",)): (1, WHOLE), ("reduce-scatter", ("tensor",)): (1, WHOLE)}),
}


@pytest.mark.parametrize("name", MOVES)
def test_each_half_moves_the_residual_once(name) -> None:
    lay, x, want = MOVES[name]
    text = compiled(lambda *a: mlp(lay, *a), make_mesh(lay), (x, P(None, "tensor"), P("tensor")), x, X.shape, UP.shape, DOWN.shape)
    assert total(collectives(text, lay.sizes)) == want


def test_put_keeps_this_devices_part_of_the_tokens() -> None:
    tokens = np.arange(16, dtype=np.int32).reshape(2, 8)
    split = jax.shard_map(lambda t: put(SP, "bT->bt", t), mesh=make_mesh(SP), in_specs=P(), out_specs=P(None, "tensor"))
    np.testing.assert_array_equal(jax.jit(split)(tokens), tokens)
    assert put(ONE_DEVICE, "bT->bt", tokens) is tokens


@pytest.mark.parametrize("lay, kept", [(ZERO3, None), (ZERO2, "whole")], ids=["zero3", "zero2"])
def test_live_is_whole_and_its_gradient_a_shard(lay, kept) -> None:
    w, when, (axis,) = UP, np.zeros(4, np.int32), lay.sizes

    def loss(shard, whole, when):
        full = live(lay, ("embed", "ffn"), shard, whole if kept else None, when)
        scale = 1.0 + jax.lax.axis_index(axis)  # every device has other rows
        return jnp.sum(full * full) * scale

    def fn(shard, whole, when):
        value, grad = jax.value_and_grad(loss)(shard, jax.lax.pcast(whole, (axis,), to="varying"), when)
        return grad, jax.lax.psum(value, axis)

    mapped = jax.shard_map(fn, mesh=make_mesh(lay), in_specs=(P(axis), P(), P(axis)), out_specs=(P(axis), P()))
    grad, value = jax.jit(mapped)(w, w, when)
    np.testing.assert_allclose(value, 10 * np.sum(w * w), rtol=1e-5)
    np.testing.assert_allclose(grad, 20 * w, rtol=1e-5)


def test_which_gradients_are_parts_of_a_sum() -> None:
    narrow = TP.without("kv_heads")
    assert parts(narrow, ("embed", "kv_heads", "head")) == ("tensor",), "whole on each device, used for its own query heads"
    assert parts(TP, ("embed", "kv_heads", "head")) == (), "split"
    assert parts(TP, ("head",)) == ("tensor",), "a q/k norm sees its own heads"
    assert parts(TP, ("embed",)) == () and parts(SP, ("embed",)) == ("tensor",), "a norm sees all tokens, or its own"
    assert parts(ONE_DEVICE, ("head",)) == ()


def test_what_is_gathered_layer_by_layer() -> None:
    assert gathers(ZERO3) == {"zero3"} and gathers(ZERO2) == {"zero2"} and not gathers(strategy(1).layout(4)) and not gathers(TP)
