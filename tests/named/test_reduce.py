"""Reductions by name against NumPy and jax.nn, under layouts, with what they move."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshloom as ml
from named.held import floats, held, leaves

X = floats("a b", 8, 16)
x = np.asarray(X.array("a b"))
TIES = ml.tensor("a b", np.round(x * 2) / 2 + 0.0)  # no -0.0, which NumPy holds for equal to 0.0
ties = np.asarray(TIES.array("a b"))
LAYOUTS = ("a:rows b:cols", "b:cols,rows")
CASES = {
    "sum": (lambda t: ml.sum(t, "b"), x.sum(1)),
    "sum of all": (lambda t: ml.sum(t), x.sum()),
    "mean": (lambda t: ml.mean(t, "b"), x.mean(1)),
    "max": (lambda t: ml.max(t, "b"), x.max(1)),
    "min of all": (lambda t: ml.min(t, "a b"), x.min()),
    "any": (lambda t: ml.any(t > 1.5, "b"), (x > 1.5).any(1)),
    "all": (lambda t: ml.all(t > -1.5, "b"), (x > -1.5).all(1)),
    "logsumexp": (lambda t: ml.logsumexp(t, "b"), np.log(np.exp(x).sum(1))),
    "softmax": (lambda t: ml.softmax(t, "b"), np.exp(x) / np.exp(x).sum(1, keepdims=True)),
    "log_softmax": (lambda t: ml.log_softmax(t, "a b"), x - np.log(np.exp(x).sum())),
    "sort": (lambda t: ml.sort(t, "b", descending=True), -np.sort(-x, 1)),
}


@pytest.mark.parametrize("name", CASES)
def test_matches_numpy_under_every_layout(name: str) -> None:
    fn, want = CASES[name]
    np.testing.assert_allclose(leaves(fn(X))[0], want, rtol=1e-5, atol=1e-6)
    held(fn, (X,), *LAYOUTS)


@pytest.mark.parametrize("fn", [lambda t: ml.max(t, "b"), lambda t: ml.min(t)])
def test_equal_largest_values_share_the_gradient(fn) -> None:
    np.testing.assert_allclose(ml.grad(lambda t: ml.sum(ml.max(t, "b")))(TIES).part, jax.grad(lambda t: jnp.max(t, 1).sum())(ties))
    held(fn, (TIES,), *LAYOUTS)


def test_argmax_is_the_first_of_equal_ones() -> None:
    np.testing.assert_array_equal(ml.argmax(TIES, "b").array("a"), ties.argmax(1))
    (told,) = held(lambda t: ml.argmax(t, "b"), (TIES,), "a:rows b:cols")
    assert told.total == {("all-reduce", ("cols",)): (2, 2 * 4 * 4)}  # 4 of 8 rows: largest values, then their places


@pytest.mark.parametrize("k", [3, 7])
def test_top_k_keeps_the_order_of_equal_ones(k: int) -> None:
    """7 is more than a device's part of b."""
    values, where = ml.top_k(TIES, "b", k, to="k")
    order = np.argsort(-ties, 1, kind="stable")[:, :k]
    np.testing.assert_array_equal(where.array("a k"), order)
    np.testing.assert_array_equal(values.array("a k"), np.take_along_axis(ties, order, 1))
    held(lambda t: ml.top_k(t, "b", k, to="k"), (TIES,), *LAYOUTS)


def test_a_row_of_minus_infinity_has_no_nan() -> None:
    masked = ml.where(ml.range("a", 8) < 7, X, -jnp.inf)
    assert np.isneginf(ml.logsumexp(masked, "b").array("a")[7])
    held(lambda t: ml.logsumexp(ml.where(ml.range("a", 8) < 7, t, -jnp.inf), "b"), (X,), "b:cols")


def test_what_they_move() -> None:
    """A device has 4 x 4 of 8 x 16 elements: sums of 4 rows are 16 bytes."""
    for fn, kinds in ((lambda t: ml.sum(t, "b"), 1), (lambda t: ml.max(t, "b"), 1), (lambda t: ml.softmax(t, "b"), 2)):
        told = ml.explain(fn, X, mesh="rows=2 cols=4", rules="a:rows b:cols")
        assert told.total == {("all-reduce", ("cols",)): (kinds, 16 * kinds)}
    late = ml.explain(lambda t: ml.sum(ml.sum(t, "b"), "a"), X, mesh="rows=2 cols=4", rules="a:rows b:cols")
    assert late.total == {("all-reduce", ("rows", "cols")): (1, 4)}  # the sum over b was not needed by itself


def test_refuses() -> None:
    with pytest.raises(ValueError, match="ml.sum: There is no axis in this tensor, 'batc'. Did you mean 'batch'"):
        ml.sum(floats("batch", 2), "batc")
    with pytest.raises(ValueError, match="ml.top_k: 'b' has 16 elements, and k is 17. Use 1 to 16"):
        ml.top_k(X, "b", 17, to="k")
