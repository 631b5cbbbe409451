"""What ZeRO gathers and scatters: arrays as they are, or in blocks of 8 or 4 bits a number with one scale each.

A matrix travels as blocks of 256 numbers: each is its block's scale times a whole number of at most 127 (8 bits) or 7 (4 bits, two in a byte), so
that it is off by half the scale at most. Scales are fp32: they hold any fp32, bf16 or fp16 number, infinities included, so that an overflow
shows behind a sum as it does without blocks.  Source: Wang et al. 2023, ZeRO++, arXiv 2306.10209, sections 3.1 and 3.3.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from meshloom.core.layout import Layout
from meshloom.core.tree import pytree

BLOCK = 256
"""Numbers that share a scale: 4 bytes beside 256 (8 bits) or 128 (4 bits)."""
TOP = {8: 127, 4: 7}
"""The largest whole number of so many bits, both signs alike."""
CARRIED = ("float32", "bfloat16", "float16")
GATHERED, SCATTERED = {"qw8": 8}, {"qg8": 8, "qg4": 4}
"""Options of a spelling -> bits of a number: of weights that are gathered, of gradients that are scattered."""


@pytree
class Blocks:
    """An array's numbers in blocks. numbers: int8 [..., blocks, bytes]. scales: fp32 [..., blocks]."""

    numbers: jax.Array
    scales: jax.Array


def bits(lay: Layout, kind: Mapping[str, int], over: tuple[str, ...], axes: tuple[str, ...], exact: bool = False) -> int:
    """Bits of a number of an array with these axes when it moves over these mesh axes; 0: it moves as it is, as vectors and `exact` weights
    (Spec.exact) always do.  kind: GATHERED or SCATTERED."""
    found = [kind[option] for axis in over for option in lay.options.get(axis, ()) if option in kind]
    return max(found, default=0) if len([a for a in axes if a != "layer"]) > 1 and not exact else 0


def exact(lay: Layout) -> Layout:
    """The same layout without the options that round what moves."""
    kept = {name: tuple(o for o in options if o not in {**GATHERED, **SCATTERED}) for name, options in lay.options.items()}
    return replace(lay, options=kept)


def cut(n: int, width: int) -> tuple[int, int]:
    """(blocks, bytes of one) that n numbers of `width` bits take."""
    block = min(BLOCK, n + n % 2)
    return -(-n // block), block * width // 8


def carried(n: int, width: int) -> int:
    """Bytes of n numbers in blocks, scales included."""
    blocks, size = cut(n, width)
    return blocks * (size + 4)


def quantize(x: jax.Array, width: int) -> Blocks:
    """x [..., n] in blocks along its last axis, to the nearest whole number.  Raises ValueError for a type that blocks do not carry."""
    if str(x.dtype) not in CARRIED:
        raise ValueError(
            f"Blocks of {width} bits carry {', '.join(CARRIED)}, and this array is {x.dtype}. Cast it first, or move it as it is."
        )
    n = x.shape[-1]
    blocks, size = cut(n, width)
    block = size * 8 // width
    x = jnp.pad(x.astype(jnp.float32), [(0, 0)] * (x.ndim - 1) + [(0, blocks * block - n)]).reshape(*x.shape[:-1], blocks, block)
    scales = jnp.max(jnp.abs(x), axis=-1) / TOP[width]
    whole = jnp.round(x / jnp.where(scales > 0, scales, 1)[..., None])
    numbers = jnp.clip(whole, -TOP[width], TOP[width]).astype(jnp.int8)
    if width == 4:
        low, high = jnp.split(numbers, 2, axis=-1)
        numbers = (low & 15) | (high << 4)
    return Blocks(numbers, scales)


def restore(blocks: Blocks, n: int, width: int, dtype: jnp.dtype) -> jax.Array:
    """The array [..., n] that blocks hold."""
    numbers, scales = blocks.numbers, blocks.scales
    if width == 4:
        numbers = jnp.concatenate([(numbers << 4) >> 4, numbers >> 4], axis=-1)
    # a product of int8 with fp32 in one operation, by which the loop over layers knows what it need not keep (runner/run.py)
    lead = tuple(range(scales.ndim))
    x = lax.dot_general(numbers, scales, (((), ()), (lead, lead)), lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    return x.reshape(*scales.shape[:-1], -1)[..., :n].astype(dtype)


def gather(x: jax.Array, axes: tuple[str, ...], dim: int, width: int = 0) -> jax.Array:
    """Shards of an array along axis `dim`, put together over mesh axes; x itself over none."""
    if not axes:
        return x
    if not width:
        return lax.all_gather(x, axes, axis=dim, tiled=True)
    return gather_blocks(quantize(x.reshape(-1), width), x.shape, axes, dim, width, x.dtype)


def gather_blocks(own: Blocks, shape: tuple[int, ...], axes: tuple[str, ...], dim: int, width: int, dtype: jnp.dtype) -> jax.Array:
    """The same from shards that are blocks already.  shape: of one shard."""
    every = Blocks(*(lax.all_gather(a, axes, axis=0) for a in (own.numbers, own.scales)))
    x = restore(every, math.prod(shape), width, dtype).reshape(-1, *shape)
    return jnp.moveaxis(x, 0, dim).reshape(*shape[:dim], -1, *shape[dim + 1 :])


def scatter(x: jax.Array, axes: tuple[str, ...], dim: int, width: int = 0) -> jax.Array:
    """Every device's x added up over mesh axes, each device keeping its part along axis `dim`; x itself over none. In blocks: each device sends
    the others their parts, which are added in fp32."""
    if not axes:
        return x
    if not width:
        return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)
    devices = lax.axis_size(axes)
    shape = (*x.shape[:dim], x.shape[dim] // devices, *x.shape[dim + 1 :])
    parts = jnp.moveaxis(x.reshape(*shape[:dim], devices, *shape[dim:]), dim, 0).reshape(devices, -1)
    sent = quantize(parts, width)
    came = Blocks(*(lax.all_to_all(a, axes, 0, 0, tiled=True) for a in (sent.numbers, sent.scales)))
    return jnp.sum(restore(came, parts.shape[1], width, jnp.dtype("float32")), axis=0).reshape(shape).astype(x.dtype)
