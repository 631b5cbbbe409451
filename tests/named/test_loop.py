"""A loop over a named axis is the same as writing its rounds out, under every layout, gradients and counts included."""

import jax
import numpy as np
import pytest

import meshloom as ml
from named.held import floats, held, leaves

LAYERS = {"up": floats("layer a c", 4, 8, 16), "down": floats("c layer a", 16, 4, 8)}
X = floats("b a", 8, 8)


def block(x, w):
    """A residual layer whose carry comes out with its axes in another order, and what it keeps."""
    y = ml.tanh(ml.einsum(ml.einsum(x, w["up"], out="c b") * 0.1, w["down"], out="a b") * 0.1)
    return y + x, ml.sum(y, "a")


def looped(layers, x):
    """Four rounds."""
    return ml.scan(block, x, layers, "layer")


def written_out(layers, x):
    """The same with numbers of rounds."""
    kept = []
    for i in range(4):
        w = {k: ml.sum(ml.slice(w, "layer", i, i + 1), "layer") for k, w in layers.items()}
        x, keep = block(x, w)
        kept.append(np.asarray(keep.array("b")))
    return x, np.stack(kept, 1)


@pytest.mark.parametrize("rules", ["b:rows c:cols", "c:rows,cols", "layer:cols b:rows", "a:rows"])
def test_equals_its_rounds_written_out(rules: str) -> None:
    x, kept = written_out(LAYERS, X)
    got = looped(LAYERS, X)
    np.testing.assert_allclose(got[0].array("a b"), x.array("a b"), rtol=1e-5)
    np.testing.assert_allclose(got[1].array("b layer"), kept, rtol=1e-4, atol=1e-5)
    held(looped, (LAYERS, X), rules)


def test_what_a_round_moves_is_multiplied_out() -> None:
    (told,) = held(lambda w, x: looped(w, x)[0], (LAYERS, X), "b:rows c:cols")
    assert told.total == {("all-reduce", ("cols",)): (4, 4 * 4 * 8 * 4)}


def test_layers_may_be_computed_again_for_the_gradient() -> None:
    """jax.checkpoint around a round: the same gradients."""
    again = lambda w, x: ml.scan(jax.checkpoint(block), x, w, "layer")
    for a, b in zip(leaves(ml.grad(lambda w: ml.sum(again(w, X)[0]))(LAYERS)), leaves(ml.grad(lambda w: ml.sum(looped(w, X)[0]))(LAYERS))):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    program = ml.program(ml.value_and_grad(lambda w, x: ml.sum(ml.square(again(w, x)[0]))), "rows=2 cols=4", "b:rows c:cols")
    want = ml.value_and_grad(lambda w, x: ml.sum(ml.square(looped(w, x)[0])))(LAYERS, X)
    for a, b in zip(leaves(program(LAYERS, X)), leaves(want)):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_refuses() -> None:
    with pytest.raises(ValueError, match="ml.scan: There is no axis in this tensor, 'layr'. Did you mean 'layer'"):
        ml.scan(block, X, LAYERS, "layr")
    with pytest.raises(ValueError, match="the carry has axes .b a. before a round and .b. after it. Keep its names"):
        ml.scan(lambda x, w: (ml.sum(x, "a"), None), X, LAYERS, "layer")
