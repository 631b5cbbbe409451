"""Every attention row against the reference: values and gradients over grouped heads, odd lengths, windows, packed documents, caches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from meshloom.ops import attention as A
from meshloom.ops.blocks import block_size, causal_blocks
from meshloom.ops.dropout import AttentionDropout

SIZE = 16
NOWHERE = 1 << 30  # a slot after every query, so never seen


def arrays(t, h, g, b=2, s=None, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(t * h + g), 4)
    shapes = (b, t, h, SIZE), (b, s or t, g, SIZE), (b, s or t, g, SIZE), (b, t, h, SIZE)
    return [jax.random.normal(k, shape, dtype) for k, shape in zip(keys, shapes)]


def documents(t, b=2):
    """[b, t] document numbers: several lengths, padding (0) at the end."""
    cuts = [0, t // 5, t // 2, t - t // 7, t]
    row = np.repeat([1, 2, 3, 0], np.diff(cuts))
    return jnp.asarray(np.stack([np.roll(row, 0) if i == 0 else np.where(row == 2, 1, row) for i in range(b)]))


def both(f, q, k, v, w):
    """The result of f and its three gradients, compiled as one program (op by op is slow)."""

    def run(q, k, v, w):
        y, back = jax.vjp(f, q, k, v)
        return (y, *back(w))

    return jax.jit(run)(q, k, v, w)


def same(got, want, tolerance=2e-6):
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(float(jnp.abs(b).max()), 1.0))


@pytest.mark.parametrize(
    "t, h, g, block, packed, window, keep",
    [
        (67, 6, 2, 16, False, None, True),  # odd length: the last block has 3 queries
        (67, 6, 2, 16, False, None, False),
        (67, 6, 2, 16, True, 7, True),
        (67, 6, 2, 16, True, 40, False),
        (64, 4, 4, 64, False, 1, True),
        (64, 4, 4, 32, True, None, False),
        (33, 4, 1, 10, False, 500, False),
        (33, 4, 1, 10, True, None, True),
        (5, 2, 2, 64, False, 2, False),
    ],
)
def test_blocks_equal_reference(t, h, g, block, packed, window, keep):
    q, k, v, w = arrays(t, h, g)
    segments = (documents(t),) * 2 if packed else None
    got = both(lambda q, k, v: causal_blocks(q, k, v, segments, scale=0.3, window=window, block=block, keep=keep), q, k, v, w)
    same(got, both(lambda q, k, v: A.attention(q, k, v, scale=0.3, window=window, segments=segments), q, k, v, w))


@pytest.mark.parametrize("t, packed, window", [(66, False, None), (66, True, 7), (64, True, None)])
def test_stream_equals_reference(t, packed, window):
    """The row for lengths whose scores do not fit: memory as of a ring of one device."""
    q, k, v, w = arrays(t, 6, 2)
    segments = (documents(t),) * 2 if packed else None
    drop = AttentionDropout(0.3, jax.random.key(3), jnp.arange(2), jnp.arange(6), jnp.arange(t), jnp.arange(t))
    for dropout in (None, drop):
        run = lambda row: both(lambda q, k, v: row(q, k, v, scale=0.3, window=window, segments=segments, dropout=dropout), q, k, v, w)  # noqa: B023
        same(run(A.KERNELS["stream"].run), run(A.attention))


def test_reference_equals_plain_softmax():
    q, k, v, _ = arrays(9, 4, 2)
    scores = jnp.einsum("bthk,bshk->bhts", q, k.repeat(2, 2)) * 0.25
    p = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((9, 9), bool)), scores, -jnp.inf))
    same([A.attention(q, k, v, scale=0.25)], [jnp.einsum("bhts,bshk->bthk", p, v.repeat(2, 2))])
    p = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((9, 9), bool)) & ~jnp.tril(jnp.ones((9, 9), bool), -3), scores, -jnp.inf))
    same([A.attention(q, k, v, scale=0.25, window=3)], [jnp.einsum("bhts,bshk->bthk", p, v.repeat(2, 2))])


@pytest.mark.parametrize("row", ["reference", "blocks"])
def test_a_neighbour_document_has_exactly_no_effect(row):
    q, k, v, w = arrays(67, 4, 2)
    segments = documents(67)
    mine = (segments == 2)[..., None, None]
    run = lambda *a: A.KERNELS[row].run(*a, scale=0.25, segments=(segments, segments))
    first = both(run, q, k, v, w * mine)
    other = both(run, *(jnp.where(mine, x, x * 3 + 1) for x in (q, k, v)), w * mine)
    for a, b in zip(first, other):
        assert (jnp.where(mine, a, 0) == jnp.where(mine, b, 0)).all()
    assert all((jnp.where(mine, 0, g) == 0).all() for g in first[1:])


@pytest.mark.parametrize("row", ["reference", "decode"])
@pytest.mark.parametrize("window", [None, 6])
def test_cache_equals_whole_sequence(row, window):
    """Queries at places 20 and 21 against a cache of 32 slots, of which 22 are filled, rows of unequal start (padding is document 0)."""
    q, k, v, _ = arrays(32, 4, 2)
    segments = jnp.stack([jnp.ones(32, int), (jnp.arange(32) >= 5).astype(int)])
    places = jnp.broadcast_to(jnp.arange(32), (2, 32))
    want = A.attention(q, k, v, scale=0.25, window=window, segments=(segments, segments))[:, 20:22]
    positions = places[:, 20:22], jnp.where(places < 22, places, NOWHERE)
    got = A.KERNELS[row].run(q[:, 20:22], k, v, scale=0.25, window=window, segments=(segments[:, 20:22], segments), positions=positions)
    same([got], [want])
    # one row alone has sums of its own
    q, k, v, segments, now, then = (x[1:] for x in (q, k, v, segments, *positions))
    alone = A.KERNELS[row].run(q[:, 20:22], k, v, scale=0.25, window=window, segments=(segments[:, 20:22], segments), positions=(now, then))
    same([alone], [want[1:]])


def test_a_query_that_sees_nothing_returns_zero():
    q, k, v, _ = arrays(2, 4, 2, s=8)
    positions = jnp.zeros((2, 2), int), jnp.full((2, 8), NOWHERE)
    for row in ("reference", "decode"):
        assert (A.KERNELS[row].run(q, k, v, scale=0.25, positions=positions) == 0).all()


@pytest.mark.parametrize("packed", [False, True])
def test_over_devices(packed):
    q, k, v, w = arrays(32, 8, 4, b=4)
    segments = (documents(32, 4),) * 2 if packed else None
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spec, rows = P("data", None, "tensor"), (P("data"),) * 2 if packed else None
    run = lambda q, k, v, s: causal_blocks(q, k, v, s, scale=0.25, block=8)
    f = jax.shard_map(run, mesh=mesh, in_specs=(spec, spec, spec, rows), out_specs=spec)
    got = both(lambda q, k, v: f(q, k, v, segments), q, k, v, w)
    same(got, both(lambda q, k, v: A.attention(q, k, v, scale=0.25, segments=segments), q, k, v, w))


def test_kv_heads_repeated_for_a_device_that_holds_few_query_heads():
    q, k, v, _ = arrays(16, 8, 2)
    whole = A.attention(q, k, v, scale=0.25)
    for first in range(0, 8, 2):
        index = A.kv_index(first, 2, 8, 2)
        same([A.attention(q[:, :, first : first + 2], k[:, :, index], v[:, :, index], scale=0.25)], [whole[:, :, first : first + 2]])


def test_dropout_does_not_depend_on_the_cut():
    q, k, v, _ = arrays(16, 4, 2, b=4)
    drop = AttentionDropout(0.5, jax.random.key(3), jnp.arange(4), jnp.arange(4), jnp.arange(16), jnp.arange(16))
    whole = A.attention(q, k, v, scale=0.25, dropout=drop)
    part = A.attention(
        q[2:, :, 2:], k[2:, :, 1:], v[2:, :, 1:], scale=0.25, dropout=drop._replace(samples=drop.samples[2:], heads=drop.heads[2:])
    )
    same([part], [whole[2:, :, 2:]])
    assert not np.allclose(whole, A.attention(q, k, v, scale=0.25))


def test_bfloat16():
    q, k, v, w = arrays(40, 4, 2, dtype=jnp.bfloat16)
    got = both(lambda *a: causal_blocks(*a, scale=0.25, block=16), q, k, v, w)
    want = both(lambda *a: A.attention(*a, scale=0.25), *(x.astype(jnp.float32) for x in (q, k, v, w)))
    assert all(g.dtype == jnp.bfloat16 for g in got)
    same([g.astype(jnp.float32) for g in got], want, 2e-2)


CASE = A.Case(platform="cpu", queries=256, keys=256, heads=8, kv_heads=4, head=64)


@pytest.mark.parametrize(
    "changes, name",
    [
        (dict(), "blocks"),
        (dict(segments=True, window=True), "blocks"),
        (dict(dropout=True), "reference"),
        (dict(queries=1, positions=True), "decode"),
        (dict(queries=32, positions=True), "reference"),
        (dict(platform="gpu", dtype="bfloat16"), "cudnn"),
        (dict(platform="gpu", dtype="bfloat16", head=256), "blocks"),
        (dict(platform="gpu"), "blocks"),
        (dict(queries=1 << 15, keys=1 << 15), "stream"),  # scores of one block of 4,096 queries: 4 GiB
        (dict(queries=1 << 15, keys=1 << 15, window=True), "blocks"),
        (dict(queries=1 << 13, keys=1 << 13, dropout=True), "stream"),
        (dict(platform="gpu", dtype="bfloat16", segments=True, batch=64, queries=8192, keys=8192), "stream"),
    ],
)
def test_choice(changes, name):
    choice = A.choose(A.Case(**{**CASE.__dict__, **changes}))
    assert choice.name == name
    before = A.PREFERRED[: A.PREFERRED.index(name)]
    assert [n for n, _ in choice.passed_over] == list(before) and all(why in choice.explain() and why for _, why in choice.passed_over)


def test_rows_refuse_what_they_cannot_do():
    q, k, v, _ = arrays(4, 2, 2)
    with pytest.raises(ValueError, match="'blocks' cannot do positions"):
        A.KERNELS["blocks"].run(q, k, v, scale=1.0, positions=(jnp.zeros((2, 4)),) * 2)


def test_block_size():
    assert block_size(256, None) == 64 and block_size(2048, None) == 256 and block_size(5, None) == 5
    assert block_size(8192, 300) == 300 and block_size(8192, 8) == 256
