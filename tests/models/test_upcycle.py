"""A dense model as a mixture of copies: the same logits, the same bits in every expert, and what is refused."""

import functools

import jax
import numpy as np
import pytest

from goldens import small
from meshloom.models import gpt2, llama, moe
from meshloom.models.upcycle import config, weights
from meshloom.runner.forward import logits
from meshloom.weights.load import load


@pytest.mark.parametrize("name, variant", [("llama", "mixtral"), ("mistral", "mixtral"), ("qwen3", "qwen3_moe"), ("qwen2", "plain")])
def test_logits_are_those_of_the_dense_model(name: str, variant: str) -> None:
    source = small.source(name)
    dense = load(source).weights
    c = config(source.model, source.config, 5, 3)
    made = weights(c, dense)
    assert c.variant == variant and (c.experts, c.top, c.expert_ffn) == (5, 3, source.config.ffn)
    tokens = np.load(small.FOLDER / name / "logits.npz")["tokens"]
    run = lambda model, c, w: np.asarray(jax.jit(functools.partial(logits, model, c))(w, tokens))
    assert np.abs(run(moe.MODEL, c, made) - run(source.model, source.config, dense)).max() < 1e-4
    for layer in range(c.layers):
        for expert in range(5):
            np.testing.assert_array_equal(made.layers.sparse.mlp.up[layer, expert], dense.layers.mlp.up[layer])
    assert np.unique(made.layers.sparse.mlp.router).size > c.embed, "random, so that experts come apart"


@pytest.mark.parametrize(
    "model, given, message",
    [
        (gpt2.MODEL, {}, "Only models of the llama family become mixtures, and this one is of family gpt2"),
        (llama.MODEL, dict(mlp_bias=True), r"has biases in the MLP \(mlp_bias\)"),
        (llama.MODEL, dict(variant="smollm3", rotary_layers=(True, False)), r"has rotary positions in some layers only \(rotary_layers\)"),
    ],
)
def test_refuses(model, given, message) -> None:
    with pytest.raises(ValueError, match=message):
        config(model, model.Config(layers=2, embed=8, heads=2, vocab=16, **given), 4, 2)


def test_more_choices_than_experts_are_refused() -> None:
    with pytest.raises(ValueError, match="A token cannot go to 3 of 2 experts"):
        config(llama.MODEL, llama.MODEL.Config(layers=2, embed=8, heads=2, vocab=16), 2, 3)
