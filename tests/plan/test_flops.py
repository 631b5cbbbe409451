"""Operations counted from the matrices: by hand for one model, and by XLA's own count of the compiled forward pass."""

import jax
import jax.numpy as jnp
import pytest

from meshloom.core.spec import abstract
from meshloom.models.freeze import frozen
from meshloom.models.table import MODELS
from meshloom.plan.flops import forward_flops, train_flops, visible_keys
from meshloom.runner.forward import logits
from tiny import recipe


def test_visible_keys():
    assert visible_keys(4, None) == 2.5
    assert visible_keys(4, 2) == (1 + 2 + 2 + 2) / 4


def test_by_hand(tmp_path):
    """Two layers of q 32x32, k and v 32x16, o 32x32, three MLP matrices 32x48; head 4224x32 (padded); attention over (32+1)/2 keys."""
    c = recipe(tmp_path).model.config
    matrices = 2 * (32 * 32 * 2 + 2 * 32 * 16 + 3 * 32 * 48) + 4224 * 32
    attention = 2 * 4 * 32 * 16.5
    assert forward_flops(MODELS["llama"], c, 32) == 2 * matrices + attention
    whole = train_flops(MODELS["llama"], c, 32)
    assert whole == 3 * forward_flops(MODELS["llama"], c, 32)
    some = frozen(MODELS["llama"], c, ["embed", "layers.mlp.up"])
    assert train_flops(some, c, 32) == whole - 2 * (4224 * 32 + 2 * 32 * 48), "two for each element of a gradient that is not made"


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
def test_near_the_compilers_count(family, tmp_path):
    """XLA counts elementwise work and the whole score matrix too, so it counts somewhat more; never less, and not by half. (One layer: it counts
    the body of a loop once.)"""
    model = next(m for name, m in MODELS.items() if name.startswith(family[:3]))
    c = model.Config(layers=1, embed=128, heads=4, head=32, kv_heads=4, ffn=512, vocab=257, max_seq=64)
    tokens = jax.ShapeDtypeStruct((1, 64), jnp.int32)
    compiled = jax.jit(lambda w, t: logits(model, c, w, t)).lower(abstract(model.specs(c)), tokens).compile()
    ratio = compiled.cost_analysis()["flops"] / (64 * forward_flops(model, c, 64))
    assert 0.95 < ratio < 1.5
