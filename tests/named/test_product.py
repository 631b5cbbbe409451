"""einsum: the results, which collective each split implies, what is refused."""

import numpy as np
import pytest

import meshloom as ml
from named.held import floats, held

X, Y, Z = floats("a b", 8, 16), floats("b c", 16, 8), floats("a c", 8, 8)
x, y, z = (np.asarray(t.array(" ".join(t.names))) for t in (X, Y, Z))
FP32 = 4
CASES = {
    "matrix": (lambda X, Y: ml.einsum(X, Y, out="c a"), (X, Y), "ab,bc->ca"),
    "batched": (lambda X, Y: ml.einsum(X, Y, out="c a b"), (X, Y), "ab,bc->cab"),
    "three": (lambda X, Y, Z: ml.einsum(X, Y, Z, out="b"), (X, Y, Z), "ab,bc,ac->b"),
    "to a number": (lambda X, Y: ml.einsum(X, Y, out=""), (X, Y), "ab,bc->"),
    "one": (lambda X: ml.einsum(X, out="b"), (X,), "ab->b"),
}


@pytest.mark.parametrize("name", CASES)
def test_matches_numpy_under_every_layout(name: str) -> None:
    fn, args, eq = CASES[name]
    got = fn(*args)
    np.testing.assert_allclose(got.array(" ".join(got.names)), np.einsum(eq, *(t.part for t in args)), rtol=1e-4)
    held(fn, args, "a:rows b:cols", "b:cols,rows" if name != "batched" else "b:cols")


@pytest.mark.parametrize(
    "rules, parts, moves",
    [
        ("a:rows", 2, {}),
        ("a:rows c:cols", 8, {}),
        ("b:cols", 4, {("all-reduce", ("cols",)): (1, 8 * 8 * FP32)}),
        ("a:rows b:cols", 8, {("all-reduce", ("cols",)): (1, 4 * 8 * FP32)}),
        ("b:rows,cols", 8, {("all-reduce", ("rows", "cols")): (1, 8 * 8 * FP32)}),
        ("a:rows,cols", 8, {}),
    ],
)
def test_a_split_sum_is_one_all_reduce_of_the_result(rules: str, parts: int, moves: dict) -> None:
    (told,) = held(lambda X, Y: ml.einsum(X, Y, out="a c"), (X, Y), rules)
    assert told.total == moves and told.whole == 2 * 8 * 16 * 8 == told.flops * parts


def test_a_summed_name_on_the_mesh_axis_of_a_kept_one_is_gathered() -> None:
    """a and d never meet in one tensor, so the rules are legal; the product still needs both. The gather is [8] fp32 over cols."""
    (told,) = held(lambda u, v: ml.einsum(u, v, out="d"), (floats("a", 8), floats("d", 16)), "a:cols d:cols")
    assert told.total == {("all-gather", ("cols",)): (1, 32)}


def test_refuses_unknown_names_and_sizes_that_differ() -> None:
    with pytest.raises(ValueError, match="There is no axis in its tensors, 'hiden'. Did you mean 'hidden'"):
        ml.einsum(floats("hidden", 4), out="hiden")
    with pytest.raises(ValueError, match="'b' has size 16 in one tensor and 8 in another"):
        ml.einsum(X, floats("b", 8), out="a")
    with pytest.raises(ValueError, match="'a' stands twice in 'a a'"):
        ml.einsum(X, out="a a")
    with pytest.raises(ValueError, match="split both 'a' and 'c' over mesh axis 'rows'"):
        ml.explain(lambda X, Y: ml.einsum(X, Y, out="a c"), X, Y, mesh="rows=2", rules="a:rows c:rows")
