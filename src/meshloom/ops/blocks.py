"""Causal attention on whole sequences, cut into unrolled blocks of queries; each sees only the stretch of keys that it may see.

The triangle above the diagonal and what lies before the window are never computed, kv heads are never repeated, and the backward pass
is written out: it keeps exp(scores) for short sequences and computes them again for long ones.  Source: the recomputation is
FlashAttention's, Dao 2022, arXiv 2205.14135, section 3.1; blocks are large because the compiler, not we, tiles a dot."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from meshloom.core.apart import apart
from meshloom.core.vary import alike, vary, varying
from meshloom.ops.mask import LOW, Pair, visible


class _How(NamedTuple):
    """Static parts of a call."""

    scale: float
    window: int | None
    block: int
    keep: bool


def causal_blocks(
    q: Array,
    k: Array,
    v: Array,
    segments: Pair | None = None,
    *,
    scale: float,
    window: int | None = None,
    block: int | None = None,
    keep: bool | None = None,
) -> Array:
    """Attention of query i to keys (i - window, i] of its own segment.  q: [b, T, h, k].  k, v: [b, T, g, k].  segments: [b, T] each.
    block: queries a block, any number (not given: `block_size`).  keep: hold exp(scores) for the backward pass, b*h*T*T/2 numbers
    (not given: up to 512 tokens).  Returns [b, T, h, k].  Source: see the top of this file."""
    t = q.shape[1]
    how = _How(scale, window, block or block_size(t, window), t <= 512 if keep is None else keep)
    q, k, v = alike(q, k, v)
    if segments is None:
        return _attend(q, k, v, None, how)
    marks = varying(q) | varying(segments[0]) | varying(segments[1])
    return _attend(*(vary(x, marks) for x in (q, k, v)), tuple(vary(s, marks) for s in segments), how)


def block_size(length: int, window: int | None) -> int:
    """Queries a block: an eighth of the sequence, or the window where that is shorter, but at least 64 and at most 32 blocks."""
    size = math.ceil(length / 8)
    if window is not None:
        size = min(size, max(window, math.ceil(length / 32)))
    return min(length, max(64, size))


def _spans(length: int, how: _How) -> list[tuple[int, int, int]]:
    """(first key, first query, end of both) of each block."""
    starts = range(0, length, how.block)
    reach = length if how.window is None else how.window - 1
    return [(max(0, a - reach), a, min(a + how.block, length)) for a in starts]


def _dot(a: Array, b: Array, i: int, j: int) -> Array:
    return lax.dot_general(a, b, (((i,), (j,)), ((0,), (0,))), preferred_element_type=jnp.float32)


def _rows(x: Array, g: int) -> Array:
    """[b, c, h, k] -> [b g, (h/g) c, k]: all queries of a kv head together."""
    b, c, h, size = x.shape
    return x.reshape(b, c, g, h // g, size).transpose(0, 2, 3, 1, 4).reshape(b * g, -1, size)


def _unrows(x: Array, b: int, c: int) -> Array:
    """[b g, (h/g) c, k] -> [b, c, h, k]."""
    return x.reshape(b, x.shape[0] // b, -1, c, x.shape[2]).transpose(0, 3, 1, 2, 4).reshape(b, c, -1, x.shape[2])


def _heads_first(x: Array) -> Array:
    """[b, t, g, k] -> [b g, t, k]."""
    return x.transpose(0, 2, 1, 3).reshape(-1, x.shape[1], x.shape[3])


def _scores(q: Array, k: Array, segments: Pair | None, span: tuple[int, int, int], how: _How) -> Array:
    """Scaled and masked scores of one block's rows q [b g, r c, k] against its keys k [b g, s, k], fp32 [b g, r c, s]."""
    lo, a, z = span
    s = _dot(q, k, 2, 2) * how.scale
    here = None if segments is None else (segments[0][:, a:z], segments[1][:, lo:z])
    mask = visible(z - a, z - lo, how.window, here, (jnp.arange(a, z)[None], jnp.arange(lo, z)[None]))
    by_query = s.reshape(mask.shape[0], -1, z - a, z - lo)
    return jnp.where(mask[:, None], by_query, LOW).reshape(s.shape)


def _forward(q, k, v, segments, how):
    b, t, _, _ = q.shape
    kt, vt = _heads_first(k), _heads_first(v)
    rows, outs, kept, y = [], [], [], []
    for lo, a, z in _spans(t, how):
        qr = _rows(q[:, a:z], k.shape[2])
        s = _scores(qr, kt[:, lo:z], segments, (lo, a, z), how)
        m = s.max(-1, keepdims=True)
        e = jnp.exp(s - m)
        total = e.sum(-1, keepdims=True)
        out = (_dot(e.astype(v.dtype), vt[:, lo:z], 2, 1) / total).astype(q.dtype)
        rows, outs = [*rows, qr], [*outs, out]
        kept.append((e, total) if how.keep else m + jnp.log(total))
        y.append(_unrows(out, b, z - a))
    return jnp.concatenate(y, 1), (rows, kt, vt, outs, kept, segments)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(q, k, v, segments, how):
    return _forward(q, k, v, segments, how)[0]


def _backward(how, saved, dy):
    """Gradients.  Those of k and v are made as [b g, s, k]: as [b g, k, s] the products are faster on a CPU, but turning them costs more."""
    rows, kt, vt, outs, kept, segments = saved
    (b, length), g = dy.shape[:2], kt.shape[0] // dy.shape[0]
    dq: list[Array] = []
    dk: Array | float = 0.0
    dv: Array | float = 0.0
    for span, q, out, aux in zip(_spans(length, how), rows, outs, kept):
        lo, a, z = span
        k, v, d = kt[:, lo:z], vt[:, lo:z], _rows(dy[:, a:z], g)
        p = aux[0] / aux[1] if how.keep else jnp.exp(_scores(q, k, segments, span, how) - aux)
        delta = (d.astype(jnp.float32) * out).sum(-1, keepdims=True)
        ds = (p * (_dot(d, v, 2, 2) - delta) * how.scale).astype(q.dtype)
        dq.append(_unrows(_dot(ds, k, 2, 1), b, z - a))
        place = ((0, 0), (lo, length - z), (0, 0))
        dk, dv = dk + jnp.pad(_dot(ds, q, 1, 1), place), dv + jnp.pad(_dot(p.astype(d.dtype), d, 1, 1), place)
    sums = apart(lambda *sums: sums, jnp.asarray(dk), jnp.asarray(dv))
    back = [x.reshape(b, g, length, -1).transpose(0, 2, 1, 3).astype(kt.dtype) for x in sums]
    return jnp.concatenate(dq, 1).astype(kt.dtype), *back, None


_attend.defvjp(_forward, _backward)
