"""Blocks of 8 and 4 bits: the bound on their error, their bytes in a compiled program, infinities, refusals; gathers and scatters of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from meshloom.core.compress import BLOCK, GATHERED, SCATTERED, TOP, bits, carried, cut, gather, quantize, restore, scatter
from meshloom.core.layout import Layout
from meshloom.core.mesh import make_mesh
from meshloom.plan.hlo import collectives, total
from programs import compiled

LAY = Layout({"zero3": 4}, options={"zero3": ("qw8", "qg4")})
MESH = make_mesh(LAY)


def numbers(*shape, seed=0):
    """Normal numbers of sizes that differ from block to block."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * np.exp(3 * rng.standard_normal((*shape[:-1], 1)))).astype(np.float32)


def plain(x, width):
    """The same in NumPy: what comes back, and each number's scale."""
    size, block = cut(x.size, width)[0], cut(x.size, width)[1] * 8 // width
    padded = np.pad(x, (0, size * block - x.size)).reshape(size, block)
    scale = np.abs(padded).max(-1, keepdims=True) / np.float32(TOP[width])
    back = np.round(padded / np.where(scale > 0, scale, 1)) * scale
    return back.reshape(-1)[: x.size], np.broadcast_to(scale, padded.shape).reshape(-1)[: x.size]


@pytest.mark.parametrize("width", TOP)
@pytest.mark.parametrize("n", [1, 7, BLOCK, 3 * BLOCK + 5])
def test_off_by_half_a_blocks_scale_at_most(n, width) -> None:
    x = numbers(n)
    got = np.asarray(restore(quantize(jnp.asarray(x), width), n, width, jnp.float32))
    want, scale = plain(x, width)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert np.all(np.abs(got - x) <= scale / 2 * (1 + 1e-5)) and (n == 1 or np.abs(got - x).max() > 0.2 * scale.max())


@pytest.mark.parametrize("width", TOP)
def test_extremes_come_back(width) -> None:
    x = jnp.asarray([0.0] * BLOCK + [1.0, -1.0] * (BLOCK // 2))
    np.testing.assert_array_equal(restore(quantize(x, width), 2 * BLOCK, width, jnp.float32), x)
    for bad in (np.inf, -np.inf, np.nan):
        back = restore(quantize(x.at[3].set(bad), width), 2 * BLOCK, width, jnp.float32)
        assert not np.isfinite(back[3]) and np.isfinite(back[BLOCK:]).all(), "an overflow shows, in its block alone"


def test_four_bits_are_two_in_a_byte() -> None:
    assert [carried(1024, width) for width in (8, 4)] == [1024 + 16, 512 + 16]
    assert quantize(jnp.ones((3, 1024)), 4).numbers.nbytes == 3 * 512 and carried(7, 4) == 4 + 4 and carried(7, 8) == 8 + 4


@pytest.mark.parametrize("dtype", ["int32", "float8_e4m3fn", "bool"])
def test_refuses_what_blocks_do_not_carry(dtype) -> None:
    with pytest.raises(ValueError, match=f"Blocks of 8 bits carry float32, bfloat16, float16, and this array is {dtype}. Cast it first"):
        quantize(jnp.zeros(4, dtype), 8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_keeps_the_type(dtype) -> None:
    x = jnp.asarray(numbers(300), dtype)
    assert restore(quantize(x, 8), 300, 8, x.dtype).dtype == dtype


def test_matrices_alone_are_cut() -> None:
    assert bits(LAY, GATHERED, ("zero3",), ("layer", "embed", "ffn")) == 8 and bits(LAY, SCATTERED, ("zero3",), ("embed", "ffn")) == 4
    assert bits(LAY, GATHERED, ("zero3",), ("layer", "embed")) == 0 and bits(LAY, GATHERED, ("tensor",), ("embed", "ffn")) == 0


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_gathers_what_each_device_rounded(dim) -> None:
    x = numbers(8, 12, 20)
    where = P(*("zero3" if i == dim else None for i in range(3)))
    run = lambda width: jax.jit(
        jax.shard_map(lambda a: gather(a, ("zero3",), dim, width), mesh=MESH, in_specs=where, out_specs=P(), check_vma=False)
    )
    np.testing.assert_array_equal(run(0)(x), x)
    shards = np.split(x, 4, axis=dim)
    want = np.concatenate([plain(s.reshape(-1), 8)[0].reshape(s.shape) for s in shards], axis=dim)
    np.testing.assert_allclose(run(8)(x), want, rtol=1e-6)


@pytest.mark.parametrize("width", TOP)
@pytest.mark.parametrize("dim", [0, 1])
def test_a_scatter_is_off_by_half_a_scale_of_each_device(dim, width) -> None:
    x = np.stack([numbers(16, 24, seed=i) for i in range(4)])
    out = P("zero3") if dim == 0 else P(None, "zero3")
    run = lambda few: jax.jit(jax.shard_map(lambda a: scatter(a[0], ("zero3",), dim, few), mesh=MESH, in_specs=P("zero3"), out_specs=out))
    np.testing.assert_allclose(run(0)(x), x.sum(0), rtol=1e-5, atol=1e-5)
    rounded = [[plain(part.reshape(-1), width) for part in np.split(one, 4, axis=dim)] for one in x]
    shape = np.split(x[0], 4, axis=dim)[0].shape
    joined = lambda which: np.concatenate([sum(one[i][which] for one in rounded).reshape(shape) for i in range(4)], axis=dim)
    got = np.asarray(run(width)(x))
    np.testing.assert_allclose(got, joined(0), rtol=1e-5, atol=1e-5)
    assert np.all(np.abs(got - x.sum(0)) <= joined(1) / 2 * (1 + 1e-4) + 1e-6)


@pytest.mark.parametrize("width, times", [(8, 3.9), (4, 7.7)])
def test_bytes_in_the_program_are_a_quarter_and_an_eighth(width, times) -> None:
    shape, whole = (64, 4, 256), 64 * 256 * 4
    text = compiled(lambda a: scatter(a[:, 0], ("zero3",), 0, width), MESH, P(None, "zero3"), P("zero3"), shape)
    assert total(collectives(text, LAY.sizes)) == {("all-to-all", ("zero3",)): (2, 4 * carried(16 * 256, width))}
    assert whole / (4 * carried(16 * 256, width)) > times
    text = compiled(lambda a: gather(a, ("zero3",), 0, 8)[None], MESH, P("zero3"), P("zero3"), (64, 256))
    assert total(collectives(text, LAY.sizes)) == {("all-gather", ("zero3",)): (2, 4 * carried(16 * 256, 8))}
