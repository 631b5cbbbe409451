"""Multi-head latent attention: keys and values of all heads are made from one narrow vector a token.  Source: DeepSeek-V2, arXiv 2405.04434, 2.1.

A head's query and key are a part without positions (`nope`) and a rotary part (`rope`), which all heads' keys share. Here keys and values are made
whole, values padded to a key's width, and go through the attention of every family: its kernels, its cache, its context parallelism. So the
cache holds heads x (nope + rope) numbers twice, where the paper's would hold the narrow vector alone.
"""

import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from meshloom.core.layout import Layout
from meshloom.core.leaf import dot
from meshloom.core.spec import ONES
from meshloom.core.tree import pytree
from meshloom.models.attention import mix
from meshloom.models.base import Ctx, Kind
from meshloom.models.parts import plus
from meshloom.ops import rope
from meshloom.ops.norm import rms_norm

EPS = 1e-6
"""Of the norms of the narrow vectors: DeepSeek's own default, whatever the model's norm_eps."""


@pytree
class Latent:
    """q: [embed, heads, head], or None where it goes through q_in [embed, query_rank], q_norm [query_rank], q_out [query_rank, heads, head].
    kv_in: [embed, latent], to key_rank features and the shared rotary ones. kv_norm: [key_rank]. kv_out: [key_rank, heads, key_value], to a head's
    key without positions and its value. o: [heads, value, embed]. Biases are None where a model has none."""

    q: Any
    q_in: Any
    q_norm: Any
    q_out: Any
    kv_in: Any
    kv_norm: Any
    kv_out: Any
    o: Any
    q_bias: Any
    kv_bias: Any
    o_bias: Any
    last: ClassVar = "o"
    """The weight of the last product."""

    @staticmethod
    def specs(c: Any) -> "Latent":
        """The Specs of one layer."""
        sizes = dict(
            query_rank=c.query_rank or 1, key_rank=c.key_rank, latent=c.key_rank + c.rope_head, key_value=c.nope_head + c.value_head
        )
        one = lambda axes, init=None: c.spec(axes, init, value=c.value_head, **sizes)
        low = c.query_rank is not None
        zeros = lambda axes: c.zeros(axes, **sizes) if c.attention_bias else None
        return Latent(
            q=None if low else one("embed heads head"),
            q_in=one("embed query_rank") if low else None,
            q_norm=one("query_rank", ONES) if low else None,
            q_out=one("query_rank heads head") if low else None,
            kv_in=one("embed latent"),
            kv_norm=one("key_rank", ONES),
            kv_out=one("key_rank heads key_value"),
            o=one("heads value embed"),
            q_bias=zeros("query_rank") if low else None,
            kv_bias=zeros("latent"),
            o_bias=c.zeros("embed", "ends first half") if c.attention_bias else None,
        )


def attend(c: Any, lay: Layout, kind: Kind, w: Latent, x: jax.Array, ctx: Ctx) -> tuple[jax.Array, Any]:
    """Causal self-attention.  x: (batch whole_seq embed).  Returns (batch seq embed), and the layer's cache with x's keys and values added."""
    q = _queries(lay, w, x)
    narrow = plus(dot(lay, "bTd,dc->bTc", x, w.kv_in), w.kv_bias)
    both = dot(lay, "bTz,zhu->BThu", rms_norm(narrow[..., : c.key_rank], w.kv_norm, EPS), w.kv_out)
    turned = _turn(c, narrow[..., None, c.key_rank :], ctx)
    q = jnp.concatenate([q[..., : c.nope_head], _turn(c, q[..., c.nope_head :], ctx)], -1) * _sharper(c.rope)
    k = jnp.concatenate([both[..., : c.nope_head], jnp.broadcast_to(turned, (*both.shape[:3], c.rope_head)).astype(both.dtype)], -1)
    v = jnp.pad(both[..., c.nope_head :], ((0, 0),) * 3 + ((0, c.head - c.value_head),))
    y, cache = mix(c, lay, kind, q.astype(k.dtype), k, v, ctx)
    return plus(dot(lay, "BThw,hwd->btd", y[..., : c.value_head], w.o), w.o_bias), cache


def _queries(lay: Layout, w: Latent, x: jax.Array) -> jax.Array:
    """Queries (batch whole_seq heads head), made directly or through a narrow vector."""
    if w.q is not None:
        return dot(lay, "bTd,dhk->BThk", x, w.q)
    narrow = plus(dot(lay, "bTd,da->bTa", x, w.q_in), w.q_bias)
    return dot(lay, "bTa,ahk->BThk", rms_norm(narrow, w.q_norm, EPS), w.q_out)


def _turn(c: Any, x: jax.Array, ctx: Ctx) -> jax.Array:
    """Rotary positions on x [batch, tokens, heads, rope]; neighbours are a pair where `interleaved`, else halves are. (Which features come first does
    not matter: queries and keys are turned alike.)"""
    if c.interleaved:
        x = jnp.concatenate([x[..., 0::2], x[..., 1::2]], -1)
    return rope.apply(x, *ctx.rotary)


def _sharper(r: rope.Rope) -> float:
    """What a stretched yarn multiplies the scores by, beside its factor on cosines.  Source: DeepSeek-V2's modelling code, as in `transformers`."""
    if r.kind == "default" or not r.mscale_all_dim or r.factor <= 1:
        return 1.0
    return (0.1 * r.mscale_all_dim * math.log(r.factor) + 1.0) ** 2
