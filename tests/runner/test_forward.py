"""From tokens to logits on one device."""

import jax.numpy as jnp
import numpy as np
from programs import config, rows, weights

from meshloom.runner.forward import logits


def test_logits_of_packed_rows_do_not_see_their_neighbours() -> None:
    model, c = config("llama")
    w, batch = weights("llama"), rows(2, 1)
    tokens, segments, positions = (jnp.asarray(a[0, 1:]) for a in (batch.tokens, batch.segments, batch.positions))
    packed = logits(model, c, w, tokens, segments, positions)
    assert packed.shape == (1, 16, 257) and packed.dtype == jnp.float32
    alone = logits(model, c, w, tokens[:, 5:])
    np.testing.assert_allclose(packed[:, 5:], alone, atol=2e-5)
    assert np.abs(logits(model, c, w, tokens)[:, 5:] - alone).max() > 1e-2, "without segments they do"
