"""The order and the numbers of `transformers`; draws that depend on a request's own seed alone."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshloom.serve.sampling import NEVER, Sampling, choose, cut, log_prob, penalised, uses, wants

CHOOSE, CUT = jax.jit(choose, static_argnums=2), jax.jit(cut)
LOGITS = np.array([[2.0, 1.0, 0.5]], np.float32)


def pick(logits, requests, made=0, seen=None, ends=()):
    """The tokens that requests choose from logits."""
    logits = np.asarray(logits, np.float32)
    batch, vocab = logits.shape
    seen = np.zeros((batch, vocab), bool) if seen is None else seen
    return np.asarray(CHOOSE(logits, wants(requests, ends, vocab), uses(requests), np.full(batch, made, np.int32), seen))


def kept(logits, top_k=0, top_p=1.0):
    """Which tokens a cut leaves."""
    logits = np.asarray(logits, np.float32)
    rows = len(logits)
    return [list(np.flatnonzero(row > NEVER)) for row in np.asarray(CUT(logits, np.full(rows, top_k), np.full(rows, top_p, np.float32)))]


def test_temperature_comes_before_top_p():
    p = np.asarray(jax.nn.softmax(LOGITS / 0.5))[0]
    np.testing.assert_allclose(p[0], 0.8438, atol=1e-4)
    assert kept(LOGITS / 0.5, top_p=0.8) == [[0]]
    np.testing.assert_allclose(np.asarray(jax.nn.softmax(LOGITS))[0, :2], [0.6285, 0.2312], atol=1e-4)
    assert kept(LOGITS, top_p=0.8) == [[0, 1]], "what temperature last would keep"
    asked = [Sampling(temperature=0.5, top_p=0.8, seed=s) for s in range(64)]
    assert set(pick(np.repeat(LOGITS, 64, 0), asked)) == {0}


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits():
    out = np.asarray(penalised(jnp.array([[2.0, -1.0, 3.0]]), jnp.array([[True, True, False]]), jnp.array([1.3])))
    np.testing.assert_allclose(out, [[1.53846, -1.3, 3.0]], atol=1e-5)


@pytest.mark.parametrize(
    "top_k,top_p,want",
    [
        (0, 1.0, [0, 1, 2, 3, 4]),
        (2, 1.0, [1, 3]),
        (9, 1.0, [0, 1, 2, 3, 4]),
        (0, 0.5, [3]),
        (0, 1e-6, [3]),
        (0, 0.88, [0, 1, 3]),
        (3, 0.88, [1, 3]),
    ],
)
def test_cuts(top_k, top_p, want):
    """Top-p counts the probabilities of what top-k has left: .60 and .25 are .885 of the best three, .85 of all."""
    logits = np.log([[0.11, 0.25, 0.03, 0.60, 0.01]])
    assert kept(logits, top_k, top_p) == [want]


def test_equal_logits_are_cut_by_number():
    assert kept(np.zeros((1, 8)), top_p=0.5) == [[0, 1, 2, 3]]
    assert kept([[1.0, 1.0, 0.0]], top_k=1) == [[0, 1]]


def test_penalty_temperature_and_cuts_equal_transformers():
    golden = np.load(Path(__file__).parents[1] / "goldens" / "sampling.npz")
    logits = golden["logits"]
    seen = np.zeros(logits.shape, bool)
    np.put_along_axis(seen, golden["ids"], True, 1)
    got = penalised(jnp.asarray(logits), jnp.asarray(seen), jnp.full(4, 1.4))
    got = CUT(got / 0.7, jnp.full(4, 20), jnp.full(4, 0.8, jnp.float32))
    np.testing.assert_allclose(np.asarray(got), golden["left"], rtol=1e-6)


def test_temperature_zero_is_argmax_beside_rows_that_draw():
    logits = np.random.default_rng(0).normal(size=(6, 50))
    asked = [Sampling(temperature=t, top_k=3, seed=5) for t in (0, 2, 0, 2, 0, 2)]
    np.testing.assert_array_equal(pick(logits, asked)[::2], logits.argmax(-1)[::2])


def test_top_p_one_and_top_k_zero_change_nothing():
    logits = np.random.default_rng(0).normal(size=(20, 50))
    plain = [Sampling(temperature=1.5, seed=s) for s in range(20)]
    beside = [*plain[:-1], Sampling(temperature=1.5, seed=19, top_k=1)]
    np.testing.assert_array_equal(pick(logits, plain)[:-1], pick(logits, beside)[:-1])


def test_a_draw_depends_on_its_own_seed_and_number_only():
    row = np.random.default_rng(0).normal(size=(1, 50))
    mine = Sampling(temperature=0.7, seed=1)
    alone = pick(row, [mine], made=3)
    for place in range(4):
        others = np.random.default_rng(9).normal(size=(4, 50))
        others[place] = row
        asked = [Sampling(temperature=1.3, seed=90 + i, top_k=i) for i in range(4)]
        asked[place] = mine
        assert pick(others, asked, made=3)[place] == alone[0]
    many = np.repeat(row, 200, 0)
    assert len(set(pick(many, [Sampling(temperature=1, seed=s) for s in range(200)]))) > 10
    assert len({int(pick(row, [mine], made=n)[0]) for n in range(30)}) > 5


def test_draws_follow_the_softmax():
    logits = np.log(np.repeat([[0.1, 0.2, 0.7]], 4000, 0))
    counts = np.bincount(pick(logits, [Sampling(temperature=1, seed=s) for s in range(4000)]), minlength=3) / 4000
    np.testing.assert_allclose(counts, [0.1, 0.2, 0.7], atol=0.03)


def test_no_end_token_before_min_tokens():
    logits = [[0.0, 5.0, 9.0]]
    asked = [Sampling(min_tokens=4, tokens=6)]
    assert pick(logits, asked, made=3, ends=(2,))[0] == 1
    assert pick(logits, asked, made=3, ends=(1, 2))[0] == 0
    assert pick(logits, asked, made=4, ends=(2,))[0] == 2
    assert pick(logits, [Sampling(min_tokens=4, ignore_end=True)], made=0, ends=(2,))[0] == 2


def test_log_probs_are_of_the_raw_model():
    np.testing.assert_allclose(np.asarray(log_prob(jnp.asarray(LOGITS), jnp.array([1]))), [np.log(0.2312)], atol=2e-4)


@pytest.mark.parametrize(
    "field,value,words",
    [
        ("temperature", -0.5, "temperature -0.5 is negative. Use 0"),
        ("temperature", float("nan"), "finite number"),
        ("top_k", -1, "top_k -1 is negative. Use 0"),
        ("top_p", 0.0, "top_p 0.0 is not above 0"),
        ("top_p", 1.5, "top_p 1.5"),
        ("repetition_penalty", 0.0, "repetition_penalty 0.0 is not positive. Use 1"),
        ("tokens", 0, "tokens 0 asks for no text"),
        ("min_tokens", -1, "min_tokens -1 is negative"),
        ("min_tokens", 500, "min_tokens 500 is more than tokens 128"),
        ("stop", ("",), "stop string is empty"),
        ("seed", -1, "seed -1"),
    ],
)
def test_refusals(field, value, words):
    with pytest.raises(ValueError, match=words):
        Sampling(**{field: value})
