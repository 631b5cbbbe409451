"""The attention block that every family uses: grouped queries, optional biases, q/k norms, rotary positions, a cache."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from meshloom.core.layout import Layout
from meshloom.core.leaf import dot, dots, put
from meshloom.core.order import places
from meshloom.core.tree import pytree
from meshloom.models.base import KV, Ctx, Kind, ModelConfig
from meshloom.models.parts import plus
from meshloom.ops import rope
from meshloom.ops.attention import KERNELS, Case, choose, kv_index
from meshloom.ops.dropout import AttentionDropout, at
from meshloom.ops.exchange import kv_heads_inside, needed_heads, to_heads, to_tokens
from meshloom.ops.mask import Pair
from meshloom.ops.norm import rms_norm
from meshloom.ops.ring import ring_attention


@pytree
class Attention:
    """q: [embed, heads, head]. k, v: [embed, kv_heads, head]. o: [heads, head, embed]. Biases and norms are None where a family has none."""

    q: Any
    k: Any
    v: Any
    o: Any
    q_bias: Any
    k_bias: Any
    v_bias: Any
    o_bias: Any
    q_norm: Any
    k_norm: Any
    beside: ClassVar = ("q", "k", "v")
    """Weights that `dots` multiplies with the same x."""
    last: ClassVar = "o"
    """The weight of the last product."""

    @staticmethod
    def specs(c: ModelConfig, qkv_bias: bool = False, o_bias: bool = False, qk_norm: bool = False) -> "Attention":
        """The Specs of one layer."""
        kv, kv_bias = c.spec("embed kv_heads head"), c.zeros("kv_heads head") if qkv_bias else None
        gain = c.gain("head") if qk_norm else None
        return Attention(
            q=c.spec("embed heads head"),
            k=kv,
            v=kv,
            o=c.spec("heads head embed"),
            q_bias=c.zeros("heads head") if qkv_bias else None,
            k_bias=kv_bias,
            v_bias=kv_bias,
            o_bias=c.zeros("embed", "ends first half") if o_bias else None,
            q_norm=gain,
            k_norm=gain,
        )


def attend(c: ModelConfig, lay: Layout, kind: Kind, w: Attention, x: jax.Array, ctx: Ctx) -> tuple[jax.Array, Any]:
    """Causal self-attention.  x: (batch whole_seq embed).  Returns (batch seq embed), and the layer's cache with x's keys and values added."""
    ctx = _own_rows(lay, ctx)
    made = dots(lay, x, ("bTd,dhk->BThk", w.q), ("bTd,dgk->BTgk", w.k), ("bTd,dgk->BTgk", w.v))
    q, k, v = map(plus, made, (w.q_bias, w.k_bias, w.v_bias))
    if w.q_norm is not None:
        q, k = rms_norm(q, w.q_norm, c.norm_eps), rms_norm(k, w.k_norm, c.norm_eps)
    if ctx.rotary is not None and kind.rotary:
        q, k = rope.apply(q, *ctx.rotary), rope.apply(k, *ctx.rotary)
    y, cache = mix(c, lay, kind, q, k, v, ctx)
    return plus(dot(lay, "BThk,hkd->btd", y, w.o), w.o_bias), cache


def mix(c: ModelConfig, lay: Layout, kind: Kind, q: jax.Array, k: jax.Array, v: jax.Array, ctx: Ctx) -> tuple[jax.Array, Any]:
    """Attention of queries (batch whole_seq heads head) to keys and values (batch whole_seq kv_heads head), and to those in the cache.  Returns
    (batch whole_seq heads head), and the layer's cache with these keys and values added.  ctx: of this device's own rows."""
    segments, positions, cache = None if ctx.segments is None else (ctx.segments, ctx.segments), None, None
    if ctx.cache is not None:
        assert ctx.slots is not None
        cache = KV(_write(ctx.cache.k, k, ctx.slots.start), _write(ctx.cache.v, v, ctx.slots.start))
        k, v, segments, positions = cache.k, cache.v, (ctx.segments, ctx.slots.segments), (ctx.positions, ctx.slots.positions)
    k, v = own_heads(c, lay, q, k), own_heads(c, lay, q, v)
    split = lay.acts.get("whole_seq")
    y = _split(c, lay, kind, q, k, v, ctx) if split else _whole(c, lay, kind, q, k, v, ctx, segments, positions)
    return y, cache


def _own_rows(lay: Layout, ctx: Ctx) -> Ctx:
    """The context of the rows that this device works on inside a layer."""
    if not lay.inner:
        return ctx
    take = lambda tree: jax.tree.map(lambda a: put(lay, "b->B", a), tree)
    slots = ctx.slots
    if slots is not None:
        slots = dataclasses.replace(slots, segments=take(slots.segments), positions=take(slots.positions))
    mine = {name: take(getattr(ctx, name)) for name in ("segments", "positions", "rotary", "samples", "documents")}
    return dataclasses.replace(ctx, **mine, slots=slots)


def _whole(
    c: ModelConfig,
    lay: Layout,
    kind: Kind,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    ctx: Ctx,
    segments: Pair | None,
    positions: Pair | None,
) -> jax.Array:
    """Attention where this device has all tokens that its queries may see."""
    dropout = _dropout(c, lay, q, ctx)
    row = _kernel(lay, kind, q, k, segments is not None, positions is not None, dropout is not None)
    return row(q, k, v, scale=c.head**-0.5, window=kind.window, segments=segments, positions=positions, dropout=dropout)


def _split(c: ModelConfig, lay: Layout, kind: Kind, q: jax.Array, k: jax.Array, v: jax.Array, ctx: Ctx) -> jax.Array:
    """Attention where devices hold parts of the sequence: heads in exchange for it over some mesh axes, a ring over others, or both."""
    if lay.exchange:
        q, k, v = (to_heads(x, lay.exchange, lay.size(lay.exchange)) for x in (q, k, v))
    if lay.ring:
        how = dict(axes=lay.ring, ring=lay.size(lay.ring), scale=c.head**-0.5, window=kind.window)
        y = ring_attention(q, k, v, segments=ctx.documents, dropout=_dropout(c, lay, q, ctx), **how)
    else:
        y = _whole(c, lay, kind, q, k, v, ctx, None if ctx.documents is None else (ctx.documents, ctx.documents), None)
    return to_tokens(y, lay.exchange) if lay.exchange else y


def own_heads(c: ModelConfig, lay: Layout, q: jax.Array, kv: jax.Array) -> jax.Array:
    """The key (or value) heads of the local query heads, where these are split over more devices than there are key/value heads to split: one
    that all share, or one for each."""
    if not lay.acts.get("heads") or lay.acts.get("kv_heads"):
        return kv
    axes, own = lay.acts["heads"], q.shape[2]
    needed = needed_heads(c.heads, c.kv_heads, lay.size(axes), False)
    return jnp.take(kv, kv_index(lax.axis_index(axes) * own, needed, c.heads, c.kv_heads), axis=2)


def training_row(c: ModelConfig, lay: Layout, kind: Kind, rows: int, seq: int, packed: bool, dtype: str) -> str:
    """Which attention row a training step takes, and why not those before it: one sentence for the plan.  rows: of a micro-batch on one device."""
    heads = c.heads // lay.size((*lay.acts.get("heads", ()), *lay.exchange))
    kv_heads = kv_heads_inside(c.heads, c.kv_heads, lay)
    if lay.ring:
        return f"attention in a ring of {lay.size(lay.ring)} devices, {heads} heads ({kv_heads} for keys) on each (no row of the table sends keys around)"
    drops = c.attention_dropout > 0
    choice = choose(Case(lay.platform, seq, seq, heads, kv_heads, c.head, dtype, rows, kind.window is not None, packed, False, drops))
    return choice._replace(passed_over=tuple(row for row in choice.passed_over if row[0] != "decode")).explain()


def _kernel(
    lay: Layout, kind: Kind, q: jax.Array, k: jax.Array, segments: bool, positions: bool, dropout: bool
) -> Callable[..., jax.Array]:
    """The attention row for these local shapes."""
    case = Case(
        platform=lay.platform,
        queries=q.shape[1],
        keys=k.shape[1],
        heads=q.shape[2],
        kv_heads=k.shape[2],
        head=q.shape[3],
        dtype=str(q.dtype),
        batch=q.shape[0],
        window=kind.window is not None,
        segments=segments,
        positions=positions,
        dropout=dropout,
    )
    return KERNELS[choose(case).name].run


def _write(cache: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
    """The cache with new entries from slot `start` on."""
    return lax.dynamic_update_slice_in_dim(cache, new.astype(cache.dtype), start, axis=1)


def _dropout(c: ModelConfig, lay: Layout, q: jax.Array, ctx: Ctx) -> AttentionDropout | None:
    """The dropout of the attention weights in training."""
    if ctx.key is None or not c.attention_dropout:
        return None
    axes = (*lay.acts.get("heads", ()), *lay.exchange)
    heads = (lax.axis_index(axes) * q.shape[2] if axes else 0) + jnp.arange(q.shape[2])
    rows = places(lay, "attend_seq", q.shape[1])
    key = at(jax.random.fold_in(ctx.key, ctx.layer), "attention/weights")
    return AttentionDropout(c.attention_dropout, key, ctx.samples, heads, rows, rows)
