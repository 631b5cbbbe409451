"""A batch of token sequences."""

import jax

from meshloom.core.tree import pytree


@pytree
class Batch:
    """Rows of tokens with everything that a loss or an attention needs to know about them.

    tokens, targets: int32. weights: float32, 1 where the target is scored. segments: int32, the number of the document in its row from 1; 0 is
    padding. positions: int32, from 0 in each document. All [batch, seq], or [micro, batch, seq] for a step. samples: int32 [batch], the
    global number of each row's sample (dropout keys come from it).
    """

    tokens: jax.Array
    targets: jax.Array
    weights: jax.Array
    segments: jax.Array
    positions: jax.Array
    samples: jax.Array
