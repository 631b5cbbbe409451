"""A whole forward pass: packed documents never see each other, and padding of the vocabulary is never scored."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from goldens import small
from meshloom.runner.forward import logits
from meshloom.weights.load import load


@pytest.mark.parametrize("name", ["gpt2", "neox", "qwen3_windows_biases"])
def test_packed_documents_are_scored_as_if_alone(name: str) -> None:
    source = small.source(name)
    run = jax.jit(functools.partial(logits, source.model, source.config, load(source).weights))
    tokens, where = jnp.asarray(np.random.default_rng(1).integers(0, 257, (1, 24)), jnp.int32), jnp.arange(24)[None]
    packed = run(tokens, jnp.where(where < 10, 1, 2), jnp.where(where < 10, where, where - 10))
    assert packed.shape == (1, 24, 257)
    # what follows a document cannot change it, so each is alone at the start of a row of the same length
    first, second = (run(row, jnp.ones_like(where), where) for row in (tokens, jnp.roll(tokens, -10, 1)))
    np.testing.assert_allclose(packed[:, :10], first[:, :10], atol=3e-5)
    np.testing.assert_allclose(packed[:, 10:], second[:, :14], atol=3e-5)
