"""Smaller pieces that families share: the MLPs, the embedding, dropout of the residual stream."""

import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from meshloom.core.layout import Layout
from meshloom.core.leaf import add_up, dot, put, split_seq
from meshloom.core.spec import ONES
from meshloom.core.tree import pytree
from meshloom.core.vary import alike
from meshloom.models.base import Ctx, ModelConfig
from meshloom.ops.act import ACTIVATIONS, swiglu
from meshloom.ops.dropout import Cells, at, dropout
from meshloom.ops.norm import layer_norm

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

    @staticmethod
    def specs(c: ModelConfig, bias: bool = False) -> "GatedMlp":
        """The Specs of one layer."""
        wide, narrow = (c.zeros("ffn"), c.zeros("embed")) if bias else (None, None)
        return GatedMlp(c.spec("embed ffn"), c.spec("embed ffn"), c.spec("ffn embed"), wide, wide, narrow)


JOIN = 64
"""Rows of x from which several products of it become one; below, joining the weights costs more than it saves (decoding)."""


def products(lay: Layout, x: jax.Array, parts: Sequence[tuple[str, Any, jax.Array | None]]) -> list[jax.Array]:
    """Several products of one x, each plus its bias.  x: (batch whole_seq embed).  parts: (as for `dot`, weight, bias or None).

    Where all weights are arrays and x has many rows, they are one product with the weights side by side: x is read once, and its gradient is one
    product instead of a sum of several. Measured: 1 % of a train step.
    """
    biases = [bias.reshape(-1) for _, _, bias in parts if bias is not None]
    alone = x.shape[0] * x.shape[1] < JOIN or not all(isinstance(w, jax.Array) for _, w, _ in parts)
    if alone or len(biases) not in (0, len(parts)):
        return [plus(dot(lay, eq, x, w), bias) for eq, w, bias in parts]
    columns = [w.shape[1:] for _, w, _ in parts]
    y = dot(lay, "bTd,dn->bTn", x, jnp.concatenate(alike(*(w.reshape(w.shape[0], -1) for _, w, _ in parts)), 1))
    y = plus(y, jnp.concatenate(alike(*biases))) if biases else y
    split = lax.split(y, [math.prod(shape) for shape in columns], axis=2)
    return [a.reshape(*a.shape[:2], *shape) for a, shape in zip(split, columns, strict=True)]


def plus(x: jax.Array, bias: jax.Array | None) -> jax.Array:
    """x + bias over x's last axes, flattened: then the bias's gradient sums the array that the product before it needs, and not a transposed one."""
    return x if bias is None else (x.reshape(-1, bias.size) + bias.reshape(-1)).reshape(x.shape)


def gated_mlp(lay: Layout, w: GatedMlp, x: jax.Array) -> jax.Array:
    """SwiGLU: down(silu(gate x) * up x).  x: (batch whole_seq embed) -> (batch seq embed).  Source: Shazeer 2020, arXiv 2002.05202."""
    gate, up = products(lay, x, (("bTd,df->bTf", w.gate, w.gate_bias), ("bTd,df->bTf", w.up, w.up_bias)))
    return plus(dot(lay, "bTf,fd->btd", swiglu(gate, up), w.down), w.down_bias)


@pytree
class Mlp:
    """up: [embed, ffn]. down: [ffn, embed]. With biases."""

    up: Any
    down: Any
    up_bias: Any
    down_bias: Any

    @staticmethod
    def specs(c: ModelConfig) -> "Mlp":
        """The Specs of one layer."""
        return Mlp(c.spec("embed ffn"), c.spec("ffn embed"), c.zeros("ffn"), c.zeros("embed"))


def mlp(lay: Layout, act: str, w: Mlp, x: jax.Array) -> jax.Array:
    """down(act(up x)).  x: (batch whole_seq embed) -> (batch seq embed)."""
    hidden = ACTIVATIONS[act](dot(lay, "bTd,df->bTf", x, w.up) + w.up_bias)
    return dot(lay, "bTf,fd->btd", hidden, w.down) + w.down_bias


@pytree
class LayerNorm:
    """gain, bias: [embed]."""

    gain: Any
    bias: Any

    @staticmethod
    def specs(c: ModelConfig) -> "LayerNorm":
        """The Specs of one norm."""
        return LayerNorm(c.spec("embed", ONES), c.zeros("embed"))


def normed(c: ModelConfig, w: LayerNorm, x: jax.Array) -> jax.Array:
    """Layer norm with a bias.  x: (batch seq embed) -> same."""
    return layer_norm(x, w.gain, w.bias, c.norm_eps)


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
    return add_up(lay, x, "t", "btd", axes)


def drop(c: ModelConfig, lay: Layout, x: jax.Array, ctx: Ctx, place: str) -> jax.Array:
    """Dropout of the residual stream in training.  x: (batch seq embed).  place: names the mask; each layer has its own."""
    if ctx.key is None or not c.dropout:
        return x
    first = lax.axis_index(split_seq(lay)) * x.shape[1] if split_seq(lay) else 0
    cells = Cells(ctx.samples, first + jnp.arange(x.shape[1]), jnp.arange(x.shape[2]))
    return dropout(x, at(jax.random.fold_in(ctx.key, ctx.layer), place), c.dropout, cells)
