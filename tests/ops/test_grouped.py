"""Rows in groups times a matrix a group: every row of the table against plain NumPy, values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshloom.ops.grouped import BLOCK, KERNELS, PREFERRED, TALL, grouped

SIZES = {
    "uneven": [5, 0, 70, 3, 200],
    "none": [0, 0, 0, 0, 0],
    "one": [0, 0, 300, 0, 0],
    "whole blocks": [BLOCK, TALL, 0, 2 * BLOCK, BLOCK],
}
ROWS = 2 * TALL + 3 * BLOCK


def case(sizes: list[int]):
    rng = np.random.default_rng(0)
    x, w, dy = (rng.standard_normal(s, np.float32) for s in ((ROWS, 12), (5, 12, 7), (ROWS, 7)))
    owner = np.repeat(np.arange(5), sizes)
    return x, w, dy, owner, np.asarray(sizes, np.int32)


@pytest.mark.parametrize("row", KERNELS)
@pytest.mark.parametrize("name", SIZES)
def test_each_row_meets_its_groups_matrix(row: str, name: str) -> None:
    x, w, dy, owner, sizes = case(SIZES[name])
    y, back = jax.vjp(lambda x, w: KERNELS[row](x, w, sizes), jnp.asarray(x), jnp.asarray(w))
    dx, dw = back(jnp.asarray(dy))
    want_y, want_dx, want_dw = np.zeros_like(dy), np.zeros_like(x), np.zeros_like(w)
    for i, g in enumerate(owner):
        want_y[i], want_dx[i] = x[i] @ w[g], w[g] @ dy[i]
        want_dw[g] += np.outer(x[i], dy[i])
    for got, want in ((y, want_y), (dx, want_dx), (dw, want_dw)):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_rows_that_belong_to_no_group_may_hold_anything() -> None:
    x, w, dy, owner, sizes = case(SIZES["uneven"])
    x[len(owner) :] = 1e30
    y, back = jax.vjp(lambda x, w: KERNELS["blocks"](x, w, sizes), jnp.asarray(x), jnp.asarray(w))
    assert not np.asarray(y)[len(owner) :].any() and np.isfinite(np.asarray(back(jnp.asarray(dy))[1])).all()


def test_a_platform_has_its_row() -> None:
    x, w, _, _, sizes = case(SIZES["uneven"])
    assert PREFERRED["cpu"] == "blocks"
    np.testing.assert_allclose(grouped("cpu", x, w, sizes), grouped("gpu", x, w, sizes), rtol=1e-4, atol=1e-4)
