"""Elementwise operations: axes meet by name, sums wait for each other, and what cannot meet is refused."""

import jax.numpy as jnp
import numpy as np
import pytest

import meshloom as ml
from named.held import floats, held

X, Y, Z = floats("a b", 8, 16), floats("b c", 16, 8), floats("a c", 8, 8)
V = floats("b", 16)


def test_operators_match_numpy_by_name() -> None:
    x, v = np.asarray(X.array("a b")), np.asarray(V.array("b"))
    cases = {
        "add": (X + V, x + v), "radd": (2 + X, 2 + x), "sub": (V - X, v - x), "rsub": (1 - X, 1 - x), "mul": (V * X, v * x), "div": (X / V, x / v),
        "rdiv": (1 / X, 1 / x), "pow": (X**2, x**2), "mod": (X % 2, x % 2), "floor": (X // 2, x // 2), "neg": (-X, -x), "abs": (abs(X), abs(x)),
        "lt": (X < V, x < v), "ge": (X >= 0, x >= 0), "eq": (X == X, x == x), "ne": (X != V, x != v), "and": ((X > 0) & (V > 0), (x > 0) & (v > 0)),
        "not": (~(X > 0), ~(x > 0)), "map": (ml.map(jnp.arctan2, X, V), np.arctan2(x, v)), "clip": (ml.clip(X, -1, 1), np.clip(x, -1, 1)),
        "where": (ml.where(X > V, X, 0), np.where(x > v, x, 0)), "astype": (ml.astype(X, "int32"), x.astype("int32")),
    }  # fmt: skip
    for name, (got, want) in cases.items():
        np.testing.assert_allclose(got.array("a b"), want, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("rules", ["a:rows b:cols", "b:rows,cols", "a:cols"])
def test_no_layout_changes_the_result(rules: str) -> None:
    held(lambda x, v: (ml.where(x > v, ml.exp(x), v) * 2 - v, ml.silu(v) + x), (X, V), rules)


def test_two_partial_sums_share_one_all_reduce() -> None:
    """[8, 8] fp32 results whose summed axis is split: one all-reduce of 256 bytes for the sum of three, scaled."""

    def fn(x, y, z):
        return (ml.einsum(x, y, out="a c") + ml.einsum(y, x * 2, out="c a") / 3 - ml.einsum(x, y, out="a c") * 0.5) + z

    (told,) = held(fn, (X, Y, Z), "b:cols")
    assert told.total == {("all-reduce", ("cols",)): (1, 256)}


def test_a_sum_that_two_uses_need_is_added_up_once() -> None:
    def fn(x, y):
        product = ml.einsum(x, y, out="a c")
        return ml.sigmoid(product) + ml.tanh(product)

    (told,) = held(fn, (X, Y), "b:cols a:rows")
    assert told.total == {("all-reduce", ("cols",)): (1, 128)}


def test_sums_over_different_mesh_axes_do_not_wait() -> None:
    (told,) = held(lambda x, y, z: ml.einsum(x, y, out="c") + ml.sum(z, "a"), (X, Y, Z), "b:cols a:rows")
    assert told.total == {("all-reduce", ("rows", "cols")): (1, 32), ("all-reduce", ("rows",)): (1, 32)}


@pytest.mark.parametrize(
    "fn, sentence",
    [
        (lambda: X + floats("b", 8), "'b' has size 16 in one tensor and 8 in another"),
        (lambda: X + np.ones((8, 16)), "an array of shape (8, 16) without names. Name its axes: ml.tensor("),
        (lambda: X + "one", "was given a str. It takes tensors (ml.tensor) and numbers"),
        (lambda: ml.map(jnp.sum, X), "into (), so it is not elementwise"),
        (lambda: bool(X > 0), "is neither true nor false. Use ml.where"),
    ],
)
def test_refuses(fn, sentence: str) -> None:
    with pytest.raises(ValueError) as told:
        fn()
    assert sentence in str(told.value)


def test_a_result_with_two_names_on_one_mesh_axis_is_refused() -> None:
    with pytest.raises(ValueError, match="split both 'b' and 'c' over mesh axis 'cols'"):
        ml.explain(lambda x, v: ml.sum(x, "a") + v, X, floats("c", 8), mesh="rows=2 cols=4", rules="b:cols c:cols")


def test_numbers_keep_the_type() -> None:
    assert (ml.astype(X, "bfloat16") * 2).dtype == jnp.bfloat16 and (ml.mean(ml.astype(X, "bfloat16"), "a")).dtype == jnp.bfloat16
