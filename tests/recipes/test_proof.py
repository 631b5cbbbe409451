"""A proof must fail where something is wrong."""

import numpy as np

from meshloom.recipes.proof import same_bits, same_logits, sample_tokens


def test_equal_trees_are_equal_and_the_smallest_difference_is_named() -> None:
    a = {"x": np.float32([1.0, 2.0]), "y": np.float32([0.0])}
    assert same_bits(a, {name: value.copy() for name, value in a.items()}, "t").equal
    proof = same_bits(a, {**a, "y": np.float32([-0.0])}, "t")
    assert not proof.equal and proof.lines == ("t: 1 of 2 parameters DIFFER: y",)
    assert not same_bits(a, {"x": a["x"]}, "t").equal


def test_logits_are_compared_at_every_position() -> None:
    x = np.random.default_rng(0).normal(size=(2, 8, 11)).astype(np.float32)
    assert same_logits(x, x, 1e-4).equal
    y = x.copy()
    y[1, 7, 3] += 1e-3
    proof = same_logits(x, y, 1e-4)
    assert (
        not proof.equal and "largest difference 1.00e-03 (limit 1.0e-04)" in proof.lines[0] and "same first token 100.00%" in proof.lines[0]
    )


def test_larger_logits_round_in_proportion() -> None:
    x = np.random.default_rng(0).normal(size=(2, 8, 11)).astype(np.float32)
    x[0, 0, 0] = 50.0
    assert same_logits(x, x + np.float32(4e-4), 1e-4).equal and not same_logits(x, x + np.float32(6e-4), 1e-4).equal


def test_the_sample_exists_and_fits() -> None:
    tokens = sample_tokens(11, 64)
    assert tokens.shape == (2, 64) and tokens.min() >= 0 and tokens.max() < 11
