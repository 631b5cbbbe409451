"""Routing against a loop over tokens, the load-balance loss against its definition, the bias against the rule."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshloom.ops.route import Router, balance, load, rebalanced, route

ROUTERS = {
    "softmax": Router(6, 2),
    "not normalized": Router(6, 3, normalize=False),
    "sigmoid": Router(6, 2, "sigmoid", scale=2.5),
    "groups": Router(8, 3, "sigmoid", groups=4, top_groups=2),
    "softmax groups": Router(8, 2, "softmax", False, groups=4, top_groups=1, scale=16.0),
}


def one_token(r: Router, logits: np.ndarray, bias: np.ndarray) -> dict[int, float]:
    """Expert -> weight of one token, in plain Python."""
    scores = np.exp(logits) / np.exp(logits).sum() if r.score == "softmax" else 1 / (1 + np.exp(-logits))
    wanted = scores + bias
    each = r.experts // r.groups
    worth = [sorted(wanted[g * each : (g + 1) * each])[::-1] for g in range(r.groups)]
    worth = [w[0] if r.score == "softmax" else sum(w[:2]) for w in worth]
    groups = np.argsort(worth)[::-1][: r.top_groups]
    allowed = [e for e in range(r.experts) if e // each in groups]
    chosen = sorted(allowed, key=lambda e: -wanted[e])[: r.top]
    total = sum(scores[e] for e in chosen) if r.normalize else 1.0
    return {e: r.scale * scores[e] / total for e in chosen}


@pytest.mark.parametrize("name", ROUTERS)
def test_tokens_go_where_a_loop_sends_them(name: str) -> None:
    r, rng = ROUTERS[name], np.random.default_rng(1)
    logits, bias = rng.standard_normal((20, r.experts)).astype(np.float32), 0.3 * rng.standard_normal(r.experts).astype(np.float32)
    valid = np.arange(20) % 5 > 0
    got = route(r, jnp.asarray(logits), jnp.asarray(bias), jnp.asarray(valid))
    for i in range(20):
        if not valid[i]:
            assert (got.expert[i] == r.experts).all() and not got.weight[i].any() and not got.probs[i].any() and not got.logsum[i]
            continue
        want = one_token(r, logits[i], bias)
        assert {int(e) for e in got.expert[i]} == set(want)
        np.testing.assert_allclose(got.weight[i], [want[int(e)] for e in got.expert[i]], rtol=1e-5)
        np.testing.assert_allclose(got.probs[i].sum(), 1, rtol=1e-5)
    assert load(got, r.experts).sum() == 16 * r.top


def test_the_bias_selects_and_does_not_weigh() -> None:
    r, logits = Router(4, 1, "sigmoid", normalize=False), jnp.asarray([[0.0, 1.0, 2.0, 3.0]])
    got = route(r, logits, jnp.asarray([9.0, 0, 0, 0]), jnp.ones(1, bool))
    assert got.expert[0, 0] == 0 and got.weight[0, 0] == 0.5
    slope = jax.grad(lambda b: route(r, logits, b, jnp.ones(1, bool)).weight.sum())(jnp.zeros(4))
    assert not slope.any()


def test_the_load_balance_loss_is_one_where_all_is_even_and_parts_add_up() -> None:
    even = jnp.full(4, 10.0)
    assert balance(even, jnp.full(4, 5.0), 2) == 20, "tokens times one"
    rng = np.random.default_rng(0)
    counts, probs = rng.integers(0, 9, 4).astype(np.float32), rng.random((3, 4)).astype(np.float32)
    whole = balance(counts, probs.sum(0), 2)
    np.testing.assert_allclose(sum(balance(counts, p, 2) for p in probs), whole, rtol=1e-6)
    np.testing.assert_allclose(whole, 4 * (counts / counts.sum() * probs.sum(0)).sum(), rtol=1e-6)
    assert balance(jnp.zeros(4), jnp.zeros(4), 2) == 0, "nothing but padding"


def test_the_bias_moves_towards_an_even_load() -> None:
    got = rebalanced(jnp.zeros((2, 3)), jnp.asarray([[9.0, 3, 0], [4, 4, 4]]), 0.5)
    np.testing.assert_array_equal(got, [[-0.5, 0.5, 0.5], [0, 0, 0]])
