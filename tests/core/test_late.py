"""Weights whose gradient is made later."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshloom.core.late import Late, waits
from meshloom.core.layout import ONE_DEVICE
from meshloom.core.matmul import contract
from meshloom.core.spec import is_spec
from meshloom.core.tree import named_leaves
from meshloom.parallel.table import build
from programs import config

X, W, G = (
    jnp.asarray(np.random.default_rng(i).standard_normal(shape), jnp.float32)
    for i, shape in enumerate(((2, 3, 5), (5, 4, 2), (2, 3, 4, 2)))
)
EQ = "btd,dhk->bthk"


def test_is_the_same_product() -> None:
    np.testing.assert_array_equal(Late(W, jnp.float32(1)).dot(EQ, X), contract(EQ, X, W))
    turned = jnp.moveaxis(W.reshape(5, 8), 0, 1)
    np.testing.assert_allclose(Late(turned, jnp.float32(1)).dot("btd,fd->btf", X), contract(EQ, X, W).reshape(2, 3, 8), rtol=1e-6)


@pytest.mark.parametrize("loop", [False, True])
def test_the_gradient_of_the_input_comes_first_and_that_of_the_weight_when_asked(loop) -> None:
    """Two layers, in a loop or one after another: what is left for later are x and dy of each product, and nothing else of their size."""
    stack = jnp.stack([W, W + 1])

    def net(stack, x, times):
        def layer(x, w):
            return jnp.tanh(jnp.einsum("bthk,hkd->btd", jnp.sin(Late(w, times).dot(EQ, x)), jnp.ones((4, 2, 5)))), None

        if loop:
            return jax.lax.scan(layer, x, stack)[0]
        return layer(layer(x, stack[0])[0], stack[1])[0]

    dy = jnp.ones_like(X)
    want = jax.vjp(lambda s, x: net(s, x, jnp.float32(1)), stack, X)[1](dy)
    (dw, dx), later = jax.linearize(lambda times: jax.vjp(lambda s, x: net(s, x, times), stack, X)[1](dy), jnp.float32(0))
    np.testing.assert_array_equal(dw, 0)
    np.testing.assert_allclose(dx, want[1], rtol=1e-5)
    np.testing.assert_allclose(later(jnp.float32(1))[0], want[0], rtol=1e-5)
    kept = sum(a.size for a in jax.tree.leaves(later))
    assert kept <= 2 * (X.size + G.size) + 32


def test_what_can_wait_are_the_matrices_of_layers() -> None:
    model, c = config("moe_mixed")
    waiting = {path for path, s in named_leaves(model.specs(c), is_spec).items() if waits(ONE_DEVICE, s)}
    assert {"layers.sparse.attn.q", "layers.dense.attn.o", "layers.dense.mlp.down"} <= waiting
    assert not any(path.endswith(("router", "norm", "sparse.mlp.up", "embed")) for path in waiting)
    llama = config("llama")[1]
    streamed = build("tensor2d=2x2:stream", llama, 16)
    assert not any(waits(streamed, s) for s in named_leaves(config("llama")[0].specs(llama), is_spec).values())
