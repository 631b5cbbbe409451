"""Smaller pieces that families share: the MLPs, the embedding, dropout of the residual stream."""

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import lax

from meshloom.core.layout import Layout
from meshloom.core.leaf import add_up, dot, dots, put
from meshloom.core.order import places
from meshloom.core.tree import pytree
from meshloom.models.base import Ctx, ModelConfig
from meshloom.ops.act import ACTIVATIONS, GATED
from meshloom.ops.dropout import Cells, at, dropout
from meshloom.ops.norm import layer_norm
from meshloom.ops.rope import tables

Activation = Literal["gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "relu2", "silu", "tanh"]
"""Names of activations in a configuration: the rows of `ops.act.ACTIVATIONS`."""


@pytree
class GatedMlp:
    """up, gate: [embed, ffn]. down: [ffn, embed]. Biases are None where a family has none."""

    up: Any
    gate: Any
    down: Any
    up_bias: Any
    gate_bias: Any
    down_bias: Any
    beside: ClassVar = ("gate", "up")
    """Weights that `dots` multiplies with the same x."""
    last: ClassVar = "down"
    """The weight of the last product."""

    @staticmethod
    def specs(c: ModelConfig, bias: bool = False, ffn: int | None = None) -> "GatedMlp":
        """The Specs of one layer.  ffn: a width other than the configuration's."""
        wide, narrow = (c.zeros("ffn"), c.zeros("embed", "ends layer")) if bias else (None, None)
        into, out = (c.spec(axes, ffn=ffn or c.ffn) for axes in ("embed ffn", "ffn embed"))
        return GatedMlp(into, into, out, wide, wide, narrow)


def plus(x: jax.Array, bias: jax.Array | None) -> jax.Array:
    """x + bias over x's last axes, as rows: then the bias's gradient sums the same rows that the product before it needs, where XLA would make
    another transposed copy of attention's gradients (4 % of a GPT-2 step on a CPU)."""
    return x if bias is None else (x.reshape(-1, bias.size) + bias.reshape(-1)).reshape(x.shape)


def gated_mlp(lay: Layout, w: GatedMlp, x: jax.Array) -> jax.Array:
    """SwiGLU: down(silu(gate x) * up x).  x: (batch whole_seq embed) -> (batch seq embed).  Source: Shazeer 2020, arXiv 2002.05202."""
    gate, up = map(plus, dots(lay, x, ("bTd,df->BTf", w.gate), ("bTd,df->BTf", w.up)), (w.gate_bias, w.up_bias))
    return plus(dot(lay, "BTf,fd->btd", GATED["silu"](gate, up), w.down), w.down_bias)


@pytree
class Mlp:
    """up: [embed, ffn]. down: [ffn, embed]. With biases."""

    up: Any
    down: Any
    up_bias: Any
    down_bias: Any
    last: ClassVar = "down"
    """The weight of the last product."""

    @staticmethod
    def specs(c: ModelConfig) -> "Mlp":
        """The Specs of one layer."""
        return Mlp(c.spec("embed ffn"), c.spec("ffn embed"), c.zeros("ffn"), c.zeros("embed", "ends layer"))


def mlp(lay: Layout, act: str, w: Mlp, x: jax.Array) -> jax.Array:
    """down(act(up x)).  x: (batch whole_seq embed) -> (batch seq embed)."""
    hidden = ACTIVATIONS[act](plus(dot(lay, "bTd,df->BTf", x, w.up), w.up_bias))
    return plus(dot(lay, "BTf,fd->btd", hidden, w.down), w.down_bias)


@pytree
class LayerNorm:
    """gain, bias: [embed]."""

    gain: Any
    bias: Any

    @staticmethod
    def specs(c: ModelConfig) -> "LayerNorm":
        """The Specs of one norm."""
        return LayerNorm(c.gain("embed", "centred norm"), c.zeros("embed"))


def normed(c: ModelConfig, lay: Layout, w: LayerNorm, x: jax.Array) -> jax.Array:
    """Layer norm with a bias.  x: (batch seq embed) -> same."""
    return layer_norm(x, w.gain, w.bias, c.norm_eps, lay.stream)


def lookup(lay: Layout, table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Rows of the embedding.  table: (vocab embed), this device's rows.  tokens: (batch whole_seq) -> (batch seq embed).

    Where the vocabulary is split, each device looks up the ids that it has and the parts are summed (reduce-scattered over a split sequence).
    """
    axes = lay.acts.get("vocab", ())
    if not axes:
        return jnp.take(table, put(lay, "bT->bt", tokens), axis=0, mode="clip")
    rows = table.shape[0]
    local = tokens - lax.axis_index(axes) * rows
    mine = (local >= 0) & (local < rows)
    x = jnp.where(mine[..., None], jnp.take(table, jnp.clip(local, 0, rows - 1), axis=0), 0)
    return add_up(lay, x, "bT", "btd", axes)


def embed(c: ModelConfig, lay: Layout, w: Any, tokens: jax.Array, ctx: Ctx) -> jax.Array:
    """The `embed` of a family without learned positions.  tokens: (batch whole_seq) -> (batch seq embed)."""
    return drop(c, lay, lookup(lay, w.embed, tokens), dataclasses.replace(ctx, layer=c.layers), "embed")


def rotary(c: Any, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The `rotary` of a family with a field `rope`: cos and sin of every position."""
    return tables(c.rope, c.head, positions)


def drop(c: ModelConfig, lay: Layout, x: jax.Array, ctx: Ctx, place: str) -> jax.Array:
    """Dropout of the residual stream in training.  x: (batch seq embed).  place: names the mask; each layer has its own."""
    if ctx.key is None or not c.dropout:
        return x
    cells = Cells(ctx.samples, places(lay, "seq", x.shape[1]), _numbers(lay.stream, x.shape[2]))
    return dropout(x, at(jax.random.fold_in(ctx.key, ctx.layer), place), c.dropout, cells)


def _numbers(axes: tuple[str, ...], size: int) -> jax.Array:
    """The numbers in the whole of this device's part of an axis that mesh axes split."""
    return lax.axis_index(axes) * size + jnp.arange(size) if axes else jnp.arange(size)
