"""Names and shapes against NumPy, under layouts; what each change of layout moves."""

import numpy as np
import pytest

import meshloom as ml
from named.held import floats, held, leaves

X, Y = floats("a b", 8, 16), floats("a b", 8, 8)
x, y = np.asarray(X.array("a b")), np.asarray(Y.array("a b"))
BOTH = ("a:rows b:cols", "b:cols,rows")


def moved(array: np.ndarray, steps: int) -> np.ndarray:
    """Along the last axis, zeros coming in."""
    out = np.zeros_like(array)
    n = array.shape[1]
    for i in range(n):
        if 0 <= i - steps < n:
            out[:, i] = array[:, i - steps]
    return out


CASES = {
    # name: (program, its result with axes in alphabetical order, layouts)
    "rename": (lambda t: ml.rename(t, b="c"), x, ("a:rows b:cols", "a:rows c:cols", "b:cols,rows c:cols")),
    "swap": (lambda t: ml.rename(t, a="b", b="a"), x.T, ("a:rows b:cols", "a:cols,rows")),
    "split": (lambda t: ml.split(t, "b", "c d", c=4), x.reshape(8, 4, 4), ("b:cols", "c:cols", "b:rows,cols a:", "d:cols b:rows")),
    "split over both": (lambda t: ml.split(t, "b", "c d", c=2), x.reshape(8, 2, 8), ("b:rows,cols c:rows d:cols", "b:cols,rows")),
    "merge": (lambda t: ml.merge(t, "a b", "c"), x.reshape(-1), ("a:rows b:cols", "b:cols c:cols", "a:rows c:cols", "c:rows,cols")),
    "merge inner first": (lambda t: ml.merge(t, "b a", "c"), x.T.reshape(-1), ("a:rows b:cols",)),
    "slice": (lambda t: ml.slice(t, "b", 4, 12), x[:, 4:12], BOTH),
    "pad": (lambda t: ml.pad(t, "b", 3, 5, 1.5), np.pad(x, ((0, 0), (3, 5)), constant_values=1.5), BOTH),
    "concat": (lambda t: ml.concat([t, ml.slice(t, "b", 0, 8), t], "b"), np.concatenate([x, x[:, :8], x], 1), BOTH),
    "shift": (lambda t: ml.shift(t, "b", 1), moved(x, 1), BOTH),
    "shift back": (lambda t: ml.shift(t, "b", -5), moved(x, -5), BOTH),
    "shift by a part": (lambda t: ml.shift(t, "b", 4), moved(x, 4), BOTH),
    "shift out": (lambda t: ml.shift(t, "b", 20), moved(x, 20), ("b:cols",)),
    "shift in a ring": (lambda t: ml.shift(t, "b", -3, wrap=True), np.roll(x, -3, 1), BOTH),
    "cumsum": (lambda t: ml.cumsum(t, "b"), np.cumsum(x, 1), BOTH),
}


@pytest.mark.parametrize("name", CASES)
def test_matches_numpy_under_every_layout(name: str) -> None:
    fn, want, layouts = CASES[name]
    np.testing.assert_allclose(leaves(fn(X))[0], want, rtol=1e-5, atol=1e-6)
    held(fn, (X,), *(rule.removesuffix(" a:") for rule in layouts))


@pytest.mark.parametrize(
    "rules, moves",
    [
        ("a:rows", {}),
        ("a:rows c:cols", {}),
        ("a:rows b:cols", {("all-gather", ("cols",)): (1, 4 * 16 * 4)}),
        ("b:cols d:cols", {("all-to-all", ("cols",)): (1, 8 * 4 * 4)}),
    ],
)
def test_what_a_new_name_moves(rules: str, moves: dict) -> None:
    (told,) = held(lambda t: ml.rename(t, b="c", a="d" if "d:" in rules else "a"), (X,), rules)
    assert told.total == moves


def test_a_sum_still_owed_is_scattered_by_a_new_name() -> None:
    (told,) = held(lambda t: ml.rename(ml.einsum(t, ml.rename(t, a="c"), out="a c"), c="d"), (X,), "b:cols d:cols")
    assert told.total == {("reduce-scatter", ("cols",)): (1, 8 * 8 * 4)}


def test_a_gathered_axis_meets_what_is_split_and_its_gradient_is_scattered() -> None:
    """ZeRO-3 in one line: a weight split along `rest` is gathered for use, and its gradient, different on each device, reduce-scattered."""

    def loss(w, t):
        return ml.sum(ml.tanh(ml.einsum(t, ml.rename(w, rest="b"), out="a c")))

    told = ml.explain(ml.grad(loss), floats("rest c", 16, 8), X, mesh="data=8", rules="a:data rest:data")
    assert told.total == {("all-gather", ("data",)): (1, 512), ("reduce-scatter", ("data",)): (1, 512)}
    held(loss, (floats("rest c", 16, 8), X), "a:data rest:data", mesh="data=8")


def test_only_what_crosses_a_border_moves() -> None:
    (told,) = held(lambda t: ml.shift(t, "b", 1), (X,), "b:cols")
    assert told.total == {("collective-permute", ("cols",)): (1, 8 * 4)}


@pytest.mark.parametrize(
    "fn, sentence",
    [
        (lambda: ml.rename(X, c="d"), "ml.rename: There is no axis in this tensor, 'c'."),
        (lambda: ml.rename(X, a="b"), "'b' stands twice in 'b b'"),
        (lambda: ml.split(X, "b", "c d", c=3), "ml.split: 'd' has no size. Give one: d=8."),
        (lambda: ml.split(X, "b", "c d", c=2, d=9), "'b' of size 16 is not c=2 x d=9"),
        (lambda: ml.slice(X, "b", 4, 20), "4 to 20 is not within 'b' of size 16"),
        (lambda: ml.pad(X, "b", -1), "neither may be negative. ml.slice takes elements away"),
        (lambda: ml.concat([X, floats("a c", 8, 4)], "b"), "There is no axis in this tensor, 'b'"),
        (lambda: ml.concat([X, floats("a b c", 8, 4, 2)], "b"), "one tensor has axes (a b), another (a b c)"),
        (lambda: ml.concat([X, floats("a b", 4, 16)], "b"), "ml.concat: 'a' has size 8 in one tensor and 4 in another"),
    ],
)
def test_refuses(fn, sentence: str) -> None:
    with pytest.raises(ValueError) as told:
        fn()
    assert sentence in str(told.value)


def test_a_new_name_whose_devices_do_not_divide_its_size_is_refused() -> None:
    with pytest.raises(ValueError, match="Axis 'c' of size 3 cannot be split over 2 devices"):
        ml.explain(lambda t: ml.rename(t, b="c"), floats("b", 3), mesh="rows=2", rules="c:rows")
