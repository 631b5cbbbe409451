"""Dispatch against the reference (every expert on every token), values and gradients; what a capacity drops, by a loop."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshloom.ops.moe import by_capacity, by_expert, capacity, collect, experts_mlp, reference, spread

TOKENS, TOP, EXPERTS, EMBED, FFN = 24, 2, 5, 8, 6


def case():
    rng = np.random.default_rng(0)
    expert = np.stack([rng.permutation(EXPERTS)[:TOP] for _ in range(TOKENS)]).astype(np.int32)
    expert[::7] = EXPERTS  # padding
    weight = np.where(expert < EXPERTS, rng.random((TOKENS, TOP)), 0).astype(np.float32)
    shapes = (TOKENS, EMBED), (EXPERTS, EMBED, FFN), (EXPERTS, EMBED, FFN), (EXPERTS, FFN, EMBED)
    return expert, weight, *(0.3 * rng.standard_normal(s, np.float32) for s in shapes)


def through(moves, x, weight, gate, up, down):
    return collect(experts_mlp("cpu", spread(x, moves), moves.sizes, gate, up, down), weight, moves)


@pytest.mark.parametrize("how", ["dropless", "room for all"])
def test_equals_every_expert_on_every_token(how: str) -> None:
    expert, weight, x, gate, up, down = case()
    moves = by_expert(expert, EXPERTS) if how == "dropless" else by_capacity(expert, EXPERTS, 3, TOKENS // 3)
    loss = lambda fn: jax.jit(jax.value_and_grad(lambda *a: jnp.sum(jnp.sin(fn(*a))), (0, 1, 2, 3, 4)))
    got = loss(functools.partial(through, moves))(x, weight, gate, up, down)
    want = loss(lambda x, weight, *w: reference(x, expert, weight, *w))(x, weight, gate, up, down)
    # the weight of padding is 0 whatever it goes through
    mask = (expert < EXPERTS).astype(np.float32)
    got, want = ((v, (g[0], g[1] * mask, *g[2:])) for v, g in (got, want))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def test_parts_of_the_experts_add_up() -> None:
    expert, weight, x, gate, up, down = case()
    parts = [
        through(by_expert(expert, n, first), x, weight, *(w[first : first + n] for w in (gate, up, down))) for first, n in ((0, 2), (2, 3))
    ]
    np.testing.assert_allclose(sum(parts), reference(x, expert, weight, gate, up, down), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("room", [1, 2, 3])
def test_who_comes_late_in_its_sequence_is_dropped(room: int) -> None:
    expert, *_ = case()
    rows, seq = 3, TOKENS // 3
    moves, taken, kept = by_capacity(expert, EXPERTS, rows, room), {}, np.zeros((TOKENS, TOP), bool)
    for n in range(TOKENS):
        for j in range(TOP):
            e = int(expert[n, j])
            if e < EXPERTS:
                place = taken.get((e, n // seq), 0)
                taken[e, n // seq] = place + 1
                kept[n, j] = place < room
    np.testing.assert_array_equal(np.asarray(moves.slot) < moves.source.size, kept)
    for slot, source in enumerate(np.asarray(moves.source)):
        if source < TOKENS * TOP:
            e, row = slot // (rows * room), slot // room % rows
            assert expert.reshape(-1)[source] == e and source // TOP // seq == row and moves.slot.reshape(-1)[source] == slot


def test_the_places_of_an_expert() -> None:
    assert capacity(64, 2, 8, 1.0) == 16 and capacity(64, 2, 8, 1.01) == 17 and capacity(64, 2, 8, 100.0) == 64
