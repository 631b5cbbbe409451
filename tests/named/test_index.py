"""Reading by number against NumPy, indices outside included."""

import numpy as np
import pytest

import meshloom as ml
from named.held import floats, held, leaves, whole

TABLE, ROWS = floats("v d", 16, 8), floats("b v", 8, 16)
NUMBERS, TOKENS = whole("b", 16, 8), whole("b t", 16, 8, 4)
table, rows, numbers, tokens = (np.asarray(t.part) for t in (TABLE, ROWS, NUMBERS, TOKENS))
inside = lambda i: (i >= 0) & (i < 16)
clip = lambda i: np.clip(i, 0, 15)


def test_take_from_one_table() -> None:
    want = np.where(inside(tokens)[..., None], table[clip(tokens)], 0)
    np.testing.assert_array_equal(ml.take(TABLE, TOKENS, "v").array("b t d"), want)
    told = held(lambda t, i: ml.take(t, i, "v"), (TABLE, TOKENS), "v:cols b:rows", "v:rows,cols", "d:cols t:rows")
    assert told[0].total == {("all-reduce", ("cols",)): (1, 4 * 4 * 8 * 4)} and told[2].total == {}


def test_take_of_each_row_from_its_own_table() -> None:
    want = np.where(inside(tokens), np.take_along_axis(rows, clip(tokens), 1), 0)
    np.testing.assert_array_equal(ml.take(ROWS, TOKENS, "v").array("b t"), want)
    held(lambda t, i: ml.take(t, i, "v"), (ROWS, TOKENS), "v:cols b:rows", "v:rows t:cols")


def test_a_table_split_over_the_mesh_axis_of_the_result_is_gathered() -> None:
    (told,) = held(lambda t, i: ml.take(t, i, "v"), (TABLE, NUMBERS), "v:cols b:cols")
    assert told.total == {("all-gather", ("cols",)): (1, 16 * 8 * 4)}


def test_one_hot_is_take_without_a_table() -> None:
    hot = ml.one_hot(NUMBERS, "v", 16)
    np.testing.assert_array_equal(hot.array("b v"), np.eye(18)[numbers][:, :16] * inside(numbers)[:, None])
    told = held(lambda i, t: ml.einsum(ml.one_hot(i, "v", 16), t, out="b d"), (NUMBERS, TABLE), "v:cols b:rows", "d:rows,cols")
    assert told[0].total == {("all-reduce", ("cols",)): (1, 4 * 8 * 4)}


def test_range_zeros_and_full() -> None:
    def fn(t):
        return t * ml.range("v", 16) + ml.zeros("b", b=8) + ml.full("v", 2.0, v=16)

    np.testing.assert_allclose(leaves(fn(ROWS))[0], rows * np.arange(16) + 2, rtol=1e-5)
    told = held(fn, (ROWS,), "v:cols b:rows")
    assert not told[0].total  # each device keeps its part of what is whole


@pytest.mark.parametrize(
    "fn, sentence",
    [
        (lambda: ml.take(TABLE, floats("b", 8), "v"), "indices are whole numbers; these are float32. Use ml.astype"),
        (lambda: ml.take(TABLE, ml.range("v", 3), "v"), "the indices have the axis 'v' themselves. Rename it there"),
        (lambda: ml.take(TABLE, NUMBERS, "w"), "ml.take: There is no axis in this tensor, 'w'"),
        (lambda: ml.zeros("a b", a=2), "'b' needs to be in both"),
    ],
)
def test_refuses(fn, sentence: str) -> None:
    with pytest.raises(ValueError) as told:
        fn()
    assert sentence in str(told.value)
