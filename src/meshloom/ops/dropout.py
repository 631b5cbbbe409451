"""Dropout whose mask is a pure function of (key, sample, token, feature), never of how the array is cut or how often it is computed.

A row's key comes from the framework's own generator (Threefry, folded by sample and token); inside a row a 32-bit mixing function of the
feature's number is enough and several times cheaper on a CPU.  Source: Salmon 2011, "Parallel random numbers: as easy as 1, 2, 3" for the
idea of counters; the mixing constants are Chris Wellons' "hash prospector" lowbias32."""

import functools
import zlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from meshloom.core.vary import vary, varying


class Cells(NamedTuple):
    """Which samples, tokens and features a local array holds, by their numbers in the whole."""

    samples: Array
    """[b] int: number of each sample in the run's order."""
    tokens: Array
    """[t] int: place in the row, counted from 0 over the whole row (not within a document)."""
    features: Array
    """[d] int."""


class AttentionDropout(NamedTuple):
    """Dropout of attention weights: rate in [0, 1), a key, and the numbers in the whole of what the local arrays hold."""

    rate: float
    key: Array
    samples: Array
    """[b]"""
    heads: Array
    """[h] number of each query head."""
    queries: Array
    """[T] place of each query in the row."""
    keys: Array
    """[S] place of each key in the row."""


def at(key: Array, path: str) -> Array:
    """A key for the place `path` in the model, e.g. "attention/out"; adding another place changes none."""
    return jax.random.fold_in(key, zlib.crc32(path.encode()))


def dropout(x: Array, key: Array, rate: float, cells: Cells) -> Array:
    """x with each element zeroed with probability `rate`, the others divided by 1 - rate.  x: [b, t, d].  Same shape and dtype.
    key: of this layer, step and place (`at`); micro-batches differ by their samples.  The backward pass makes the mask again.
    Raises ValueError for a rate outside [0, 1).  Source: Srivastava 2014, JMLR 15."""
    _check(rate)
    if rate == 0:
        return x
    rows = row_keys(key, cells.samples, cells.tokens)
    marks = varying(x) | varying(rows) | varying(cells.features)
    return _drop(vary(x, marks), vary(rows, marks), vary(cells.features, marks), rate)


def attention_mask(cells: AttentionDropout) -> Array:
    """Factors on attention weights, [b, h, T, S] fp32: 0, or 1 / (1 - rate)."""
    _check(cells.rate)
    rows = row_keys(cells.key, cells.samples, cells.heads, cells.queries)
    return keep(rows, cells.keys, cells.rate) / (1 - cells.rate)


def row_keys(key: Array, *numbers: Array) -> Array:
    """The key folded with every combination of the numbers.  numbers: integer arrays [n1], [n2], ...  Returns uint32 [n1, n2, ..., 2]."""
    for depth, those in enumerate(numbers):
        fold = jax.vmap(jax.random.fold_in, (None, 0))
        for _ in range(depth):
            fold = jax.vmap(fold, (0, None))
        key = fold(key, those)
    return jax.random.key_data(key)


def keep(rows: Array, features: Array, rate: float) -> Array:
    """Whether each element stays, bool [..., d].  rows: [..., 2] uint32 from `row_keys`.  features: [d] int."""
    bits = _mix(_mix(features.astype(jnp.uint32) * jnp.uint32(0x9E3779B9) + rows[..., :1]) ^ rows[..., 1:])
    return bits >= jnp.uint32(round(rate * 2**32))


def _mix(x: Array) -> Array:
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def _check(rate: float) -> None:
    if not 0 <= rate < 1:
        raise ValueError(f"A dropout rate of {rate} is impossible. Use a number from 0 (no dropout) up to, not including, 1.")


def _masked(x: Array, rows: Array, features: Array, rate: float) -> Array:
    return jnp.where(keep(rows, features, rate), x / (1 - rate), 0).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _drop(x, rows, features, rate):
    return _masked(x, rows, features, rate)


def _drop_backward(rate, kept, dy):
    return _masked(dy, *kept, rate), None, None


_drop.defvjp(lambda x, rows, features, rate: (_masked(x, rows, features, rate), (rows, features)), _drop_backward)
