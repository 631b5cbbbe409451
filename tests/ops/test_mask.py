"""Who sees whom, on cases small enough to write down."""

import jax.numpy as jnp

from meshloom.ops.mask import visible


def seen(*how) -> list:
    return visible(*how).astype(int).tolist()


def test_causal_window_segments_positions() -> None:
    assert seen(2, 3, None, None, None) == [[[1, 0, 0], [1, 1, 0]]]
    assert seen(3, 3, 2, None, None) == [[[1, 0, 0], [1, 1, 0], [0, 1, 1]]]
    documents = jnp.array([[1, 2, 2]])
    assert seen(3, 3, None, (documents, documents), None) == [[[1, 0, 0], [0, 1, 0], [0, 1, 1]]]
    assert seen(1, 3, None, None, (jnp.array([[7]]), jnp.array([[6, 7, 8]]))) == [[[1, 1, 0]]]
