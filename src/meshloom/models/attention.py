"""The attention block that every family uses: grouped queries, optional biases, q/k norms, rotary positions, a cache."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshloom.core.layout import Layout
from meshloom.core.leaf import dot
from meshloom.core.spec import ONES
from meshloom.core.tree import pytree
from meshloom.ops import rope
from meshloom.ops.attention import attention
from meshloom.ops.norm import rms_norm
from meshloom.models.base import Ctx, Kind, ModelConfig


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

    @staticmethod
    def specs(c: ModelConfig, qkv_bias: bool = False, o_bias: bool = False, qk_norm: bool = False) -> "Attention":
        """The Specs of one layer."""
        kv, kv_bias = c.spec("embed kv_heads head"), c.zeros("kv_heads head") if qkv_bias else None
        gain = c.spec("head", ONES) if qk_norm else None
        return Attention(
            q=c.spec("embed heads head"),
            k=kv,
            v=kv,
            o=c.spec("heads head embed"),
            q_bias=c.zeros("heads head") if qkv_bias else None,
            k_bias=kv_bias,
            v_bias=kv_bias,
            o_bias=c.zeros("embed") if o_bias else None,
            q_norm=gain,
            k_norm=gain,
        )


def attend(c: ModelConfig, lay: Layout, kind: Kind, w: Attention, x: jax.Array, ctx: Ctx) -> tuple[jax.Array, Any]:
    """Causal self-attention.  x: (batch whole_seq embed).  Returns (batch seq embed), and the layer's cache with x's keys and values added."""
    q = _plus(dot(lay, "bTd,dhk->bThk", x, w.q), w.q_bias)
    k = _plus(dot(lay, "bTd,dgk->bTgk", x, w.k), w.k_bias)
    v = _plus(dot(lay, "bTd,dgk->bTgk", x, w.v), w.v_bias)
    if w.q_norm is not None:
        q, k = rms_norm(q, w.q_norm, c.norm_eps), rms_norm(k, w.k_norm, c.norm_eps)
    if ctx.rotary is not None and kind.rotary:
        q, k = rope.apply(q, *ctx.rotary), rope.apply(k, *ctx.rotary)
    segments, positions, cache = (ctx.segments, ctx.segments), (ctx.positions, ctx.positions), ctx.cache
    if cache is not None:
        cache = cache.write(k, v)
        k, v, segments, positions = cache.k, cache.v, (ctx.segments, cache.segments), (ctx.positions, cache.positions)
    k, v = own_heads(c, lay, q, k), own_heads(c, lay, q, v)
    y = attention(q, k, v, segments=segments, positions=positions, window=kind.window, cached=cache is not None, **_dropout(c, lay, ctx))
    return _plus(dot(lay, "bThk,hkd->btd", y, w.o), w.o_bias), cache


def own_heads(c: ModelConfig, lay: Layout, q: jax.Array, kv: jax.Array) -> jax.Array:
    """Each local query head's key (or value) head, where query heads are split over more devices than there are key/value heads to split."""
    axes = lay.acts.get("heads", ())
    if not axes or lay.acts.get("kv_heads", ()):
        return kv
    local = q.shape[2]
    mine = (lax.axis_index(axes) * local + jnp.arange(local)) * c.kv_heads // c.heads
    return jnp.take(kv, mine, axis=2)


def first_head(lay: Layout, heads: int) -> jax.Array | int:
    """The global number of this device's first query head; heads: how many it has."""
    axes = lay.acts.get("heads", ())
    return lax.axis_index(axes) * heads if axes else 0


def _plus(x: jax.Array, bias: jax.Array | None) -> jax.Array:
    return x if bias is None else x + bias


def _dropout(c: ModelConfig, lay: Layout, ctx: Ctx) -> dict[str, Any]:
    """Arguments of the attention-probability dropout, empty where there is none."""
    if ctx.key is None or not c.attention_dropout:
        return {}
    heads = c.heads // lay.size(lay.acts.get("heads", ()))
    key = jax.random.fold_in(ctx.key, ctx.layer)
    return {"dropout": c.attention_dropout, "key": key, "samples": ctx.samples, "first_head": first_head(lay, heads)}
