"""Who may see whom in causal attention: the one rule of every row of the attention table."""

import jax.numpy as jnp
from jax import Array

LOW = -1e30
"""Score of what may not be seen; its exponential is exactly 0."""

Pair = tuple[Array, Array]
"""(of the queries [b, T], of the keys [b, S])"""


def visible(queries: int, keys: int, window: int | None, segments: Pair | None, positions: Pair | None) -> Array:
    """Which key each query sees, bool [b or 1, T, S]: one at its own or an earlier position, of its own segment, less than `window` positions back.
    queries, keys: how many, T and S.  segments: document numbers.  positions: not given: indices."""
    at, of = positions if positions is not None else (jnp.arange(queries)[None], jnp.arange(keys)[None])
    back = at[:, :, None] - of[:, None, :]
    mask = back >= 0
    if window is not None:
        mask &= back < window
    if segments is not None:
        mask &= segments[0][:, :, None] == segments[1][:, None, :]
    return mask
