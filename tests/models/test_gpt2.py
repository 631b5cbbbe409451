"""The GPT-2 against `transformers`, from saved small models."""

import jax
import jax.numpy as jnp
import pytest

from goldens import small
from meshloom.core.spec import is_spec
from meshloom.models import gpt2
from meshloom.runner.forward import logits


@pytest.mark.parametrize("name", small.names("gpt2"))
def test_logits_equal_those_of_transformers_at_every_position(name: str) -> None:
    assert small.difference(name) < 1e-4


def test_a_sequence_longer_than_the_learned_positions_is_refused() -> None:
    c = gpt2.Config(layers=1, embed=8, heads=2, vocab=11, max_seq=4)
    w = jax.tree.map(lambda s: jnp.zeros(s.shape), gpt2.specs(c), is_leaf=is_spec)
    with pytest.raises(ValueError, match="5 tokens is longer than the 4 positions"):
        logits(gpt2.MODEL, c, w, jnp.zeros((1, 5), jnp.int32))


def test_what_hugging_face_cannot_say_is_refused() -> None:
    c = gpt2.Config(layers=1, embed=8, heads=2, kv_heads=1, vocab=11)
    with pytest.raises(ValueError, match="Use the llama family"):
        gpt2.to_hf(c, False)


@pytest.mark.parametrize(
    "key, value", [("scale_attn_by_inverse_layer_idx", True), ("add_cross_attention", True), ("scale_attn_weights", False)]
)
def test_features_that_change_the_result_are_refused(key: str, value: bool) -> None:
    with pytest.raises(ValueError, match=f"{key} = {value}"):
        gpt2.from_hf({**small.said("gpt2"), key: value})


def test_two_rates_of_dropout_are_refused() -> None:
    with pytest.raises(ValueError, match="one rate for both"):
        gpt2.from_hf({**small.said("gpt2"), "embd_pdrop": 0.5})


def test_what_ends_in_the_residual_stream_starts_smaller() -> None:
    specs = gpt2.specs(gpt2.Config(layers=8, embed=8, heads=2, vocab=11))
    assert specs.layers.attn.o.init.std == specs.layers.mlp.down.init.std == pytest.approx(0.02 / 4)
    assert specs.layers.attn.q.init.std == 0.02
