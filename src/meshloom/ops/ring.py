"""Causal attention over a sequence that is split over a ring of devices: queries stay, keys and values go around.

Device r of P holds pieces r and 2P-1-r of the row (`core.order`). At step s it has the keys of device r-s: its second piece of queries sees all of
their first piece, and of the other two pairs of pieces just one is seen, whole: the first on the first where that device is before it, the
second on the second where it is behind. So every device multiplies the same number of blocks at every step, and none in vain.

Scores exist for one block of queries and one of keys. Forward keeps q, k, v, the result and each query's log-sum of exponentials; backward sends k and
v around again, and their gradients, in fp32, with them.  Source: ring attention, Liu et al. 2023, arXiv 2310.01889; the running softmax is
Milakov and Gimelshein's, arXiv 1805.02867; the backward pass is FlashAttention's, Dao 2022, arXiv 2205.14135, section 3.1.

Traffic of one call on a device, S steps (P-1, fewer where a window hides whole steps), arrays of k's size: 2 S forward, 2 S backward and 2 S of fp32.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from meshloom.core.order import BLOCK
from meshloom.core.vary import vary, varying
from meshloom.ops.dropout import AttentionDropout, keep, row_keys
from meshloom.ops.mask import LOW, visible

KEPT = "attended"
"""The name of what forward keeps: a rematerialisation that keeps it runs no ring again."""


class _How(NamedTuple):
    """Static parts of a call. axes: mesh axes of the ring. ring: devices on it. half: tokens of a piece. block: tokens of a block."""

    axes: tuple[str, ...]
    ring: int
    half: int
    block: int
    scale: float
    window: int | None
    rate: float


class _Facts(NamedTuple):
    """What masks are made of. segments: [ring, blocks, b, block], or None. rows: dropout's keys of the queries [blocks, b g, r block, 2], or None."""

    segments: Array | None
    rows: Array | None


def ring_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    axes: tuple[str, ...],
    ring: int,
    scale: float,
    window: int | None = None,
    segments: Array | None = None,
    dropout: AttentionDropout | None = None,
    block: int | None = None,
) -> Array:
    """Attention as `ops.attention.attention` has it, on this device's tokens, in the order of `core.order`; with ring 1 and no axes, of whole rows.
    q: [b, T, h, k].  k, v: [b, T, g, k].
    axes, ring: mesh axes and their devices.  segments: [b, ring T], of all devices in their order.  block: tokens, a divisor of T/2 (not given:
    the largest up to BLOCK).  dropout: its `keys` are not read.  Returns [b, T, h, k].  Raises ValueError for an odd T."""
    b, t = q.shape[:2]
    if t % 2:
        raise ValueError(f"{t} tokens on a device of a ring cannot be two pieces. Use a sequence that is a multiple of {2 * ring}.")
    how = _How(axes, ring, t // 2, block or _block(t // 2), scale, window, dropout.rate if dropout else 0.0)
    g, n = k.shape[2], t // how.block
    marks = frozenset(axes).union(*(varying(x) for x in (q, k, v)), *(varying(x) for x in (segments,) if x is not None))
    if segments is not None:
        segments = vary(segments.reshape(b, ring, n, how.block).transpose(1, 2, 0, 3), marks)
    rows = None
    if dropout is not None:
        keys = row_keys(dropout.key, dropout.samples, dropout.heads, dropout.queries).transpose(0, 2, 1, 3)
        rows = vary(_blocked(keys, g, how.block), marks)
    return _ring(*(vary(x, marks) for x in (q, k, v)), _Facts(segments, rows), how)


def _block(half: int) -> int:
    """The largest divisor of a piece up to BLOCK."""
    return next(n for n in range(min(half, BLOCK), 0, -1) if half % n == 0)


def steps(ring: int, half: int, window: int | None) -> list[int]:
    """The steps in which some device sees a key, of 1 .. ring-1: all, or those that a window reaches.  half: tokens of a piece."""

    def seen(step: int) -> bool:
        far = half * 2 * ring
        for device in range(ring):
            source = (device - step) % ring
            far = min(far, abs(device - source), 2 * ring - 1 - device - source)
        return window is None or (far - 1) * half + 1 < window

    return [step for step in range(1, ring) if seen(step)]


def runs(ring: int, half: int, window: int | None) -> list[tuple[int, int, int]]:
    """The steps as (first, how many, hop from the last one to the next run's first, or home) of consecutive ones."""
    found: list[list[int]] = []
    for step in steps(ring, half, window):
        if found and found[-1][-1] == step - 1:
            found[-1].append(step)
        else:
            found.append([step])
    after = [run[0] for run in found[1:]] + [ring]
    return [(run[0], len(run), next_ - run[-1]) for run, next_ in zip(found, after)]


def _diagonal(how: _How) -> Array:
    """(query block, key block) pairs of a device's own tokens, each query block's own keys first."""
    n = 2 * how.half // how.block
    reach = n if how.window is None else (how.window - 2) // how.block + 2
    return jnp.asarray(np.array([(i, j) for i in range(n) for j in range(i, max(-1, i - reach), -1)], np.int32))


def _after(pairs: Array, x: Array) -> Array:
    """The pairs, not before x is known. Masks are made from pairs alone, and JAX would move what does not depend on a layer's input out of the
    loop over layers, for all pairs at once: the whole matrix that blocks are there to avoid."""
    marks = varying(x)
    return lax.optimization_barrier((vary(pairs, marks), x.ravel()[0]))[0]


def _pairs(how: _How, me: Array, source: Array) -> Array:
    """The pairs of one step: the second piece of queries on the first of keys, then the pieces of equal number that are seen."""
    n = how.half // how.block
    grid = np.stack(np.meshgrid(np.arange(n), np.arange(n), indexing="ij"), -1).reshape(-1, 2).astype(np.int32)
    return jnp.concatenate([jnp.asarray(grid + np.array([n, 0], np.int32)), jnp.asarray(grid) + jnp.where(source < me, 0, n)])


def _start(how: _How, device: Array, i: Array) -> Array:
    """The place in the row of the first token of a device's block i."""
    n = how.half // how.block
    piece = jnp.where(i < n, device, 2 * how.ring - 1 - device)
    return piece * how.half + (i % n) * how.block


def _blocked(x: Array, g: int, block: int) -> Array:
    """[b, t, h, k] -> [blocks, b g, (h/g) block, k]: all queries of a kv head in a block together."""
    b, t, h, size = x.shape
    return x.reshape(b, t // block, block, g, h // g, size).transpose(1, 0, 3, 4, 2, 5).reshape(t // block, b * g, -1, size)


def _unblocked(x: Array, b: int, block: int) -> Array:
    """[blocks, b g, r block, k] -> [b, t, g r, k]."""
    n, bg, _, size = x.shape
    return x.reshape(n, b, bg // b, -1, block, size).transpose(1, 0, 4, 2, 3, 5).reshape(b, n * block, -1, size)


def _dot(a: Array, b: Array, i: int, j: int) -> Array:
    return lax.dot_general(a, b, (((i,), (j,)), ((0,), (0,))), preferred_element_type=jnp.float32)


def _at(x: Array, i: Array) -> Array:
    return lax.dynamic_index_in_dim(x, i, keepdims=False)


def _put(x: Array, new: Array, i: Array) -> Array:
    return lax.dynamic_update_index_in_dim(x, new, i, 0)


def _rotate(how: _How, hop: int, *xs: Array) -> tuple[Array, ...]:
    """What device r has, on device r + hop.  The pairs of a hop backward stand in another order, or two devices would make the same of both."""
    devices = range(how.ring) if hop > 0 else reversed(range(how.ring))
    pairs = [(r, (r + hop) % how.ring) for r in devices]
    return tuple(lax.ppermute(x, how.axes, pairs) for x in xs)


class _Block(NamedTuple):
    """One block of queries against one of keys. scores: fp32 [b g, r block, block], masked. factor: dropout's on weights, or None."""

    scores: Array
    factor: Array | None


def _score(how: _How, facts: _Facts, q: Array, k: Array, i: Array, j: Array, me: Array, source: Array, own: bool) -> _Block:
    """Scores of query block i and key block j of device `source`.  own: whether these are the device's own tokens."""
    s = _dot(q, k, 2, 2) * how.scale
    of = _start(how, source, j) + jnp.arange(how.block)
    if own or how.window is not None or facts.segments is not None:
        at = _start(how, me, i) + jnp.arange(how.block)
        known = facts.segments
        documents = None if known is None else (_at(_at(known, me), i), _at(_at(known, source), j))
        mask = visible(how.block, how.block, how.window, documents, (at[None], of[None]))
        by_query = s.reshape(mask.shape[0], -1, how.block, how.block)
        s = jnp.where(mask[:, None], by_query, LOW).reshape(s.shape)
    if facts.rows is None:
        return _Block(s, None)
    return _Block(s, keep(_at(facts.rows, i), of, how.rate) / (1 - how.rate))


def _me(how: _How) -> Array:
    return lax.axis_index(how.axes) if how.axes else jnp.int32(0)


def _around(how: _How, way: int, moving: Any, resting: Any, step: Callable, send: Callable) -> Any:
    """Runs step(moving k and v, resting, source) -> resting for every step of the ring.  send(resting, hop) -> resting, behind each step.
    Keys for the next step are on their way while one is computed.  way: 1, or -1 for the other way around: a compiler that sees both passes
    at once then does not keep for the second what arrived in the first, and what a step moves does not depend on how it is compiled."""
    at = 0
    source = lambda s: (_me(how) - way * s) % how.ring
    for first, count, hop in runs(how.ring, how.half, how.window):
        moving = _rotate(how, way * (first - at), *moving)

        def one(carry: Any, s: Array) -> tuple[Any, None]:
            moving, resting = carry
            after = _rotate(how, way, *moving)
            return (after, send(step(moving, resting, source(s)), way)), None

        if count > 1:
            (moving, resting), _ = lax.scan(one, (moving, resting), first + jnp.arange(count - 1))
        at = first + count - 1
        resting = send(step(moving, resting, source(at)), way * hop)
    return resting


def _forward(q: Array, k: Array, v: Array, facts: _Facts, how: _How) -> tuple[Array, Any]:
    b, g, me = q.shape[0], k.shape[2], _me(how)
    qs, ks, vs = _blocked(q, g, how.block), _blocked(k, g, how.block), _blocked(v, g, how.block)
    marks = varying(qs)
    rows = qs.shape[:3]
    begin = (jnp.zeros(qs.shape, jnp.float32), jnp.full(rows, LOW, jnp.float32), jnp.zeros(rows, jnp.float32))

    def sweep(state: Any, ks: Array, vs: Array, source: Array, pairs: Array, own: bool) -> Any:
        def pair(state: Any, ij: Array) -> tuple[Any, None]:
            i, j = ij[0], ij[1]
            o, top, total = (_at(x, i) for x in state)
            s, factor = _score(how, facts, _at(qs, i), _at(ks, j), i, j, me, source, own)
            new = jnp.maximum(top, s.max(-1))
            e, fix = jnp.exp(s - new[..., None]), jnp.exp(top - new)
            weights = e if factor is None else e * factor
            o = o * fix[..., None] + _dot(weights.astype(v.dtype), _at(vs, j), 2, 1)
            return tuple(_put(x, y, i) for x, y in zip(state, (o, new, total * fix + e.sum(-1)))), None

        return lax.scan(pair, state, pairs)[0]

    state = sweep(tuple(vary(x, marks) for x in begin), ks, vs, me, _after(_diagonal(how), qs), True)
    step = lambda kv, state, source: sweep(state, *kv, source, _after(_pairs(how, me, source), qs), False)
    o, top, total = _around(how, 1, (ks, vs), state, step, lambda state, hop: state)
    out = checkpoint_name(_unblocked((o / total[..., None]).astype(q.dtype), b, how.block), KEPT)
    return out, (q, k, v, out, checkpoint_name(top + jnp.log(total), KEPT), facts)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _ring(q, k, v, facts, how):
    return _forward(q, k, v, facts, how)[0]


def _backward(how: _How, saved: Any, dy: Array) -> tuple:
    q, k, v, out, lse, facts = saved
    b, g, me = q.shape[0], k.shape[2], _me(how)
    qs, ds = _blocked(q, g, how.block), _blocked(dy, g, how.block)
    ks, vs = _blocked(k, g, how.block), _blocked(v, g, how.block)
    delta = (ds.astype(jnp.float32) * _blocked(out, g, how.block)).sum(-1)
    marks = varying(qs)
    zeros = lambda x: vary(jnp.zeros(x.shape, jnp.float32), marks)

    def sweep(grads: Any, ks: Array, vs: Array, source: Array, pairs: Array, own: bool) -> Any:
        def pair(grads: Any, ij: Array) -> tuple[Any, None]:
            i, j = ij[0], ij[1]
            q, k, v, d = _at(qs, i), _at(ks, j), _at(vs, j), _at(ds, i)
            s, factor = _score(how, facts, q, k, i, j, me, source, own)
            p = jnp.exp(s - _at(lse, i)[..., None])
            dp, weights = _dot(d, v, 2, 2), p
            if factor is not None:
                dp, weights = dp * factor, p * factor
            slope = (p * (dp - _at(delta, i)[..., None]) * how.scale).astype(q.dtype)
            more = _dot(slope, k, 2, 1), _dot(slope, q, 1, 1), _dot(weights.astype(d.dtype), d, 1, 1)
            return tuple(_put(x, _at(x, n) + y, n) for x, y, n in zip(grads, more, (i, j, j))), None

        return lax.scan(pair, grads, pairs)[0]

    dq, own_k, own_v = sweep((zeros(qs), zeros(ks), zeros(vs)), ks, vs, me, _after(_diagonal(how), qs), True)
    step = lambda kv, grads, source: sweep(grads, *kv, source, _after(_pairs(how, me, source), qs), False)
    send = lambda grads, hop: (grads[0], *_rotate(how, hop, *grads[1:]))
    dq, dk, dv = _around(how, -1, (ks, vs), (dq, zeros(ks), zeros(vs)), step, send)
    back = dq, own_k + dk, own_v + dv
    return (*(_unblocked(x, b, how.block).astype(q.dtype) for x in back), _Facts(None, None))


_ring.defvjp(_forward, _backward)
