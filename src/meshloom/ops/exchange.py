"""Heads in exchange for sequence: before attention each device gives away most heads of its tokens for the tokens of others, behind it the other way.

[b, t/n, h, k] -> all-to-all -> [b, t, h/n, k] -> any attention -> all-to-all -> [b, t/n, h, k].  Source: Jacobs et al. 2023, "DeepSpeed Ulysses",
arXiv 2309.14509.  Four all-to-alls of the local q, k, v and result, and four backward; their bytes do not depend on n but for what stays at home.
"""

import math

import jax.numpy as jnp
from jax import Array, lax


def needed_heads(heads: int, kv_heads: int, tensor: int, split: bool) -> int:
    """Key heads that a device of tensor parallelism uses.  heads, kv_heads: of the model.  tensor: devices.  split: whether key heads are split too;
    if not, each device takes what its query heads read: one head where they share it, one for each where they do not."""
    if split:
        return kv_heads // tensor
    own = heads // tensor
    return kv_heads if tensor == 1 else 1 if (heads // kv_heads) % own == 0 else own


def repeated(kv_heads: int, devices: int) -> int:
    """The fewest key heads, a multiple of kv_heads, that so many devices share evenly."""
    return math.lcm(kv_heads, devices)


def to_heads(x: Array, axes: tuple[str, ...], devices: int) -> Array:
    """[b, t, h, k] -> [b, t devices, h/devices, k]: all tokens of the devices along `axes`, some of their heads. Fewer heads than devices, or
    such as they do not share evenly, are repeated first, as often as needed and no more."""
    times = repeated(x.shape[2], devices) // x.shape[2]
    x = jnp.repeat(x, times, axis=2) if times > 1 else x
    return lax.all_to_all(x, axes, split_axis=2, concat_axis=1, tiled=True)


def to_tokens(x: Array, axes: tuple[str, ...]) -> Array:
    """[b, t devices, h/devices, k] -> [b, t, h, k]: the way back."""
    return lax.all_to_all(x, axes, split_axis=1, concat_axis=2, tiled=True)
