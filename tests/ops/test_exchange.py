"""Heads in exchange for sequence: there and back, key heads repeated no more than needed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from meshloom.core.mesh import make_mesh
from meshloom.ops.attention import attention
from meshloom.ops.exchange import needed_heads, repeated, to_heads, to_tokens
from meshloom.parallel.ulysses import ULYSSES
from meshloom.plan.hlo import collectives, total

SPLIT = P(None, "ulysses")


def over(n, fn, *arrays):
    mesh = make_mesh(ULYSSES.layout(n))
    return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=(SPLIT,) * len(arrays), out_specs=SPLIT))


@pytest.mark.parametrize("n, h, g", [(2, 4, 2), (4, 8, 2), (4, 4, 1), (3, 6, 2), (2, 6, 3)])
def test_any_attention_in_between_equals_one_device(n, h, g) -> None:
    rng = np.random.default_rng(0)
    q, k, v, w = (rng.standard_normal((2, 12, heads, 8)).astype(np.float32) for heads in (h, g, g, h))

    def local(q, k, v):
        return to_tokens(attention(*(to_heads(x, ("ulysses",), n) for x in (q, k, v)), scale=0.3), ("ulysses",))

    def run(fn):
        def both(q, k, v, w):
            y, back = jax.vjp(fn, q, k, v)
            return (y, *back(w))

        return jax.jit(both)(q, k, v, w)

    mapped = over(n, local, q, k, v)
    for a, b in zip(run(mapped), run(lambda *x: attention(*x, scale=0.3)), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6 * np.abs(b).max())
    found = total(collectives(mapped.lower(q, k, v).compile().as_text(), {"ulysses": n}))
    size = 2 * 12 // n * 8 * 4 * (2 * h + 2 * repeated(g, n))
    assert found == {("all-to-all", ("ulysses",)): (4, size)}


def test_there_and_back_changes_nothing() -> None:
    x = np.arange(2 * 8 * 4 * 3, dtype=np.float32).reshape(2, 8, 4, 3)
    np.testing.assert_array_equal(over(4, lambda x: to_tokens(to_heads(x, ("ulysses",), 4), ("ulysses",)), x)(x), x)
    whole = over(4, lambda x: to_heads(x, ("ulysses",), 4)[:, :, 0], x)(x).reshape(2, 4, 8, 3)
    np.testing.assert_array_equal(whole, jnp.asarray(x).transpose(0, 2, 1, 3))


def test_key_heads_are_repeated_as_little_as_makes_them_even() -> None:
    assert [repeated(g, n) for g, n in ((8, 4), (2, 4), (3, 2), (4, 6), (1, 8))] == [8, 4, 6, 12, 8]


@pytest.mark.parametrize("tensor, split, have", [(1, False, 2), (2, True, 1), (4, False, 1), (8, False, 1)])
def test_key_heads_that_a_tensor_device_reads(tensor, split, have) -> None:
    assert needed_heads(8, 2, tensor, split) == have


def test_key_heads_that_no_whole_number_of_queries_shares() -> None:
    assert needed_heads(12, 3, 2, False) == 6, "query heads 0 to 5 read key heads 0 and 1 in unequal parts: each takes its own"
