"""Weights in the forms of decoding multiply as they do in those of training, and only what gains by it changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshloom.core.layout import ONE_DEVICE
from meshloom.core.leaf import dot, dots
from meshloom.models import gpt2, llama, moe
from meshloom.serve import forms
from meshloom.serve.engine import unrolled
from serve.made import made_up

SIZES = dict(layers=1, embed=16, heads=4, vocab=61, max_seq=64)
RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 3, 16), np.float32)


def first_layer(model, c):
    """The first layer's weights."""
    return jax.tree.map(jnp.asarray, made_up(unrolled(model, c)).layers[0])


@pytest.mark.parametrize(
    "eq, shape, turn", [("BTf,fd->btd", (16, 5), (1, 0)), ("BThk,hkd->btd", (2, 8, 5), (2, 0, 1)), ("BTD,vD->BTv", (7, 16), (1, 0))]
)
def test_a_turned_weight_multiplies_as_the_weight_did(eq, shape, turn):
    w = RNG.standard_normal(shape, np.float32)
    x = X.reshape(2, 3, *(shape[:-1] if eq[-1] == "d" else shape[1:]))
    got = dot(ONE_DEVICE, eq, x, forms.Turned(jnp.asarray(w.transpose(turn))))
    np.testing.assert_allclose(got, np.einsum(eq.lower(), x, w), rtol=1e-5, atol=1e-5)


def test_joined_weights_multiply_as_each_did():
    w = first_layer(llama.MODEL, llama.Config(**SIZES, kv_heads=2, ffn=40))
    attn = forms.layer(w).attn
    assert isinstance(attn.q, forms.Joined) and attn.q.w.shape == (16, 16 + 8 + 8) and attn.k is None and attn.v is None
    equations = ("bTd,dhk->BThk", "bTd,dgk->BTgk", "bTd,dgk->BTgk")
    together = dots(ONE_DEVICE, X, *zip(equations, (attn.q, attn.k, attn.v), strict=True))
    for eq, got, one in zip(equations, together, (w.attn.q, w.attn.k, w.attn.v), strict=True):
        np.testing.assert_allclose(got, np.einsum(eq.lower(), X, one), rtol=1e-5, atol=1e-5)


def test_what_makes_little_of_much_is_turned():
    w = first_layer(llama.MODEL, llama.Config(**SIZES, ffn=40))
    made = forms.layer(w)
    assert made.mlp.gate.w.shape == (16, 80) and made.mlp.up is None
    np.testing.assert_array_equal(made.mlp.down.w, np.asarray(w.mlp.down).T)
    np.testing.assert_array_equal(made.attn.o, w.attn.o)  # 16 of 16
    narrow = forms.layer(first_layer(llama.MODEL, llama.Config(**SIZES, ffn=8)))
    assert narrow.mlp.down.shape == (8, 16)
    table = jnp.asarray(RNG.standard_normal((64, 16), np.float32))
    np.testing.assert_array_equal(forms.head(table).w, table.T)
    assert forms.head(table.T).shape == (16, 64)


def test_a_plain_mlp_keeps_its_first_matrix_and_experts_keep_all():
    made = forms.layer(first_layer(gpt2.MODEL, gpt2.Config(**SIZES)))
    assert made.mlp.up.shape == (16, 64) and isinstance(made.mlp.down, forms.Turned)
    w = first_layer(moe.MODEL, moe.Config(**SIZES, experts=4, top=2, expert_ffn=8, shared=1))
    made = forms.layer(w)
    assert isinstance(made.attn.q, forms.Joined)
    same = jax.tree.map(lambda a, b: (np.asarray(a) == np.asarray(b)).all(), made.mlp, w.mlp)
    assert all(jax.tree.leaves(same)) and made.mlp.dense.down.shape == (8, 16)
