"""GPT-2: learned positions, layer norms and biases, a plain MLP, tied embedding.  Source: Radford et al. 2019."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from pydantic import Field

from meshloom.core.layout import Layout
from meshloom.core.leaf import put
from meshloom.core.spec import Init, stack
from meshloom.core.tree import pytree
from meshloom.models.attention import Attention, attend
from meshloom.models.base import Ctx, Kind, Model, ModelConfig, Row, alike
from meshloom.models.hf import activation, only, plain_heads, take
from meshloom.models.parts import Activation, LayerNorm, Mlp, drop, lookup, mlp, normed


class Config(ModelConfig):
    """Sizes and constants of a GPT-2 model."""

    family: Literal["gpt2"] = "gpt2"
    """The family's name."""
    max_seq: int = Field(1024, ge=1)
    """Learned positions: the longest sequence that the model can take, tokens."""
    act: Activation = "gelu_new"
    """Activation of the MLP."""


@pytree
class Block:
    """One layer."""

    attn: Attention
    mlp: Mlp
    attn_norm: LayerNorm
    mlp_norm: LayerNorm

    @staticmethod
    def specs(c: Config) -> "Block":
        """The Specs of one layer. What ends in the residual stream starts smaller by sqrt(2 x layers)."""
        small, norm = Init(c.init_std / math.sqrt(2 * c.layers)), LayerNorm.specs(c)
        attn = dataclasses.replace(Attention.specs(c, qkv_bias=True, o_bias=True), o=c.spec("heads head embed", small))
        return Block(attn, dataclasses.replace(Mlp.specs(c), down=c.spec("ffn embed", small)), norm, norm)


def block(c: Config, lay: Layout, kind: Kind, w: Block, x: jax.Array, ctx: Ctx) -> tuple[jax.Array, Ctx]:
    """x + attention(norm(x)), then + mlp(norm(.)).  x: (batch seq embed) -> same."""
    y, cache = attend(c, lay, kind, w.attn, put(lay, "btd->bTd", normed(c, lay, w.attn_norm, x)), ctx)
    x = x + drop(c, lay, y, ctx, "attention/out")
    y = mlp(lay, c.act, w.mlp, put(lay, "btd->bTd", normed(c, lay, w.mlp_norm, x)))
    return x + drop(c, lay, y, ctx, "mlp/out"), dataclasses.replace(ctx, cache=cache)


@pytree
class Gpt2:
    """The whole model. embed: [vocab, embed]. positions: [position, embed]. layers: stacked blocks. head: [vocab, embed], or None when tied."""

    embed: Any
    positions: Any
    layers: Block
    norm: LayerNorm
    head: Any


def specs(c: Config) -> Gpt2:
    """The Specs of the model."""
    table = c.spec("vocab embed")
    return Gpt2(table, c.spec("position embed"), stack(Block.specs(c), c.layers), LayerNorm.specs(c), None if c.tied else table)


def embed(c: Config, lay: Layout, w: Gpt2, tokens: jax.Array, ctx: Ctx) -> jax.Array:
    """tokens: (batch whole_seq) -> (batch seq embed).  Raises ValueError for a sequence longer than the learned positions."""
    if tokens.shape[1] > c.max_seq:
        raise ValueError(
            f"A sequence of {tokens.shape[1]} tokens is longer than the {c.max_seq} positions that this GPT-2 has learned (max_seq)."
        )
    x = lookup(lay, w.embed, tokens) + jnp.take(w.positions, put(lay, "bT->bt", ctx.positions), axis=0, mode="clip")
    return drop(c, lay, x, dataclasses.replace(ctx, layer=c.layers), "embed")


def final(c: Config, lay: Layout, w: Gpt2, x: jax.Array) -> jax.Array:
    """The last norm."""
    return normed(c, lay, w.norm, x)


NAMES = {
    "layers": "n_layer",
    "embed": "n_embd",
    "heads": "n_head",
    "ffn": "n_inner",
    "vocab": "vocab_size",
    "max_seq": "n_positions",
    "tied": "tie_word_embeddings",
    "norm_eps": "layer_norm_epsilon",
    "init_std": "initializer_range",
    "dropout": "resid_pdrop",
    "attention_dropout": "attn_pdrop",
    "act": "activation_function",
}
DEFAULTS = {
    "n_inner": None,
    "n_positions": 1024,
    "tie_word_embeddings": True,
    "layer_norm_epsilon": 1e-5,
    "initializer_range": 0.02,
    "resid_pdrop": 0.1,
    "attn_pdrop": 0.1,
    "activation_function": "gelu_new",
}
ALLOWED = {"scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,)}


def rows(c: Config) -> tuple[Row, ...]:
    """The rows of the Hugging Face map. Their linear layers hold [in, out]; q, k and v are one."""
    layer = "transformer.h.{layer}."
    qkv, qkv_bias = (("layers.attn.q" + b, "layers.attn.k" + b, "layers.attn.v" + b) for b in ("", "_bias"))
    return (
        Row("embed", "transformer.wte.weight", "v d -> v d"),
        Row("positions", "transformer.wpe.weight", "p d -> p d"),
        Row("layers.attn_norm.gain", layer + "ln_1.weight", "d -> d"),
        Row("layers.attn_norm.bias", layer + "ln_1.bias", "d -> d"),
        Row(qkv, layer + "attn.c_attn.weight", "d (n h k) -> n d h k"),
        Row(qkv_bias, layer + "attn.c_attn.bias", "(n h k) -> n h k"),
        Row("layers.attn.o", layer + "attn.c_proj.weight", "(h k) d -> h k d"),
        Row("layers.attn.o_bias", layer + "attn.c_proj.bias", "d -> d"),
        Row("layers.mlp_norm.gain", layer + "ln_2.weight", "d -> d"),
        Row("layers.mlp_norm.bias", layer + "ln_2.bias", "d -> d"),
        Row("layers.mlp.up", layer + "mlp.c_fc.weight", "d f -> d f"),
        Row("layers.mlp.up_bias", layer + "mlp.c_fc.bias", "f -> f"),
        Row("layers.mlp.down", layer + "mlp.c_proj.weight", "f d -> f d"),
        Row("layers.mlp.down_bias", layer + "mlp.c_proj.bias", "d -> d"),
        Row("norm.gain", "transformer.ln_f.weight", "d -> d"),
        Row("norm.bias", "transformer.ln_f.bias", "d -> d"),
        Row("head", "lm_head.weight", "v d -> v d"),
        Row("", layer + "attn.bias", ""),
        Row("", layer + "attn.masked_bias", ""),
    )


def from_hf(given: Mapping[str, Any]) -> Config:
    """config.json -> configuration. Raises ValueError for what is not implemented."""
    only(given, ALLOWED)
    fields = take(given, NAMES, DEFAULTS)
    if given.get("embd_pdrop", 0.1) != fields["dropout"]:
        raise ValueError(
            f"config.json has resid_pdrop {fields['dropout']} and embd_pdrop {given.get('embd_pdrop', 0.1)}; Meshloom has one rate for both. "
            f"Make them equal (they matter in training only)."
        )
    fields["act"] = activation(fields["act"])
    return Config(**{ours: value for ours, value in fields.items() if value is not None})


def to_hf(c: Config, old: bool) -> dict[str, Any]:
    """config.json of a configuration; both schemas have the same keys.  Raises ValueError where GPT-2 cannot say it."""
    plain_heads("GPT-2", c)
    names = {theirs: getattr(c, ours) for ours, theirs in NAMES.items()}
    return {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", **names, "embd_pdrop": c.dropout}


MODEL = Model("gpt2", Config, specs, embed, lambda c, positions: None, block, final, alike, hf=rows, from_hf=from_hf, to_hf=to_hf)
