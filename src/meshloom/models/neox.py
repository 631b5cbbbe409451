"""GPT-NeoX and Pythia: parallel residual, partial rotary positions, untied head.  Source: Black et al. 2022, arXiv 2204.06745."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax
from pydantic import model_validator

from meshloom.core.layout import Layout
from meshloom.core.leaf import put
from meshloom.core.spec import stack
from meshloom.core.tree import pytree
from meshloom.models.attention import Attention, attend
from meshloom.models.base import Ctx, Kind, Model, ModelConfig, Row, alike
from meshloom.models.hf import activation, plain_heads, read_rope, take, write_rope
from meshloom.models.parts import Activation, LayerNorm, Mlp, drop, embed, mlp, normed, rotary
from meshloom.ops.rope import Rope, check_pairs


class Config(ModelConfig):
    """Sizes and constants of a GPT-NeoX model."""

    family: Literal["neox"] = "neox"
    """The family's name."""
    tied: bool = False
    """Whether the output head is the embedding."""
    act: Activation = "gelu"
    """Activation of the MLP."""
    parallel: bool = True
    """Whether attention and MLP read the same input and are added together."""
    attention_bias: bool = True
    """Biases on the attention's projections."""
    rope: Rope = Rope(partial=0.25)
    """Rotary positions; `partial` is the fraction of each head that is turned."""

    @model_validator(mode="after")
    def _pairs(self) -> "Config":
        check_pairs(self.rope, self.head)
        return self


@pytree
class Block:
    """One layer."""

    attn: Attention
    mlp: Mlp
    attn_norm: LayerNorm
    mlp_norm: LayerNorm

    @staticmethod
    def specs(c: Config) -> "Block":
        """The Specs of one layer."""
        norm = LayerNorm.specs(c)
        return Block(Attention.specs(c, c.attention_bias, c.attention_bias), Mlp.specs(c), norm, norm)


def block(c: Config, lay: Layout, kind: Kind, w: Block, x: jax.Array, ctx: Ctx) -> tuple[jax.Array, Ctx]:
    """x + attention(norm(x)) + mlp(norm(x)); the MLP reads what attention added where it is not parallel.  x: (batch seq embed) -> same."""
    y, cache = attend(c, lay, kind, w.attn, put(lay, "btd->bTd", normed(c, lay, w.attn_norm, x)), ctx)
    attended = x + drop(c, lay, y, ctx, "attention/out")
    y = mlp(lay, c.act, w.mlp, put(lay, "btd->bTd", normed(c, lay, w.mlp_norm, x if c.parallel else attended)))
    return attended + drop(c, lay, y, ctx, "mlp/out"), dataclasses.replace(ctx, cache=cache)


@pytree
class Neox:
    """The whole model. embed: [vocab, embed]. layers: blocks stacked on a leading axis. head: [vocab, embed], or None when tied."""

    embed: Any
    layers: Block
    norm: LayerNorm
    head: Any


def specs(c: Config) -> Neox:
    """The Specs of the model."""
    table = c.spec("vocab embed")
    return Neox(table, stack(Block.specs(c), c.layers), LayerNorm.specs(c), None if c.tied else table)


def final(c: Config, lay: Layout, w: Neox, x: jax.Array) -> jax.Array:
    """The last norm."""
    return normed(c, lay, w.norm, x)


NAMES = {
    "layers": "num_hidden_layers",
    "embed": "hidden_size",
    "heads": "num_attention_heads",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
    "max_seq": "max_position_embeddings",
    "tied": "tie_word_embeddings",
    "norm_eps": "layer_norm_eps",
    "init_std": "initializer_range",
    "dropout": "hidden_dropout",
    "attention_dropout": "attention_dropout",
    "act": "hidden_act",
    "parallel": "use_parallel_residual",
    "attention_bias": "attention_bias",
}
DEFAULTS = {
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "layer_norm_eps": 1e-5,
    "initializer_range": 0.02,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "hidden_act": "gelu",
    "use_parallel_residual": True,
    "attention_bias": True,
}


def rows(c: Config) -> tuple[Row, ...]:
    """The rows of the Hugging Face map. q, k and v are one tensor, interleaved head by head."""
    layer = "gpt_neox.layers.{layer}."
    at, mlp_ = layer + "attention.", layer + "mlp."
    qkv, qkv_bias = (("layers.attn.q" + b, "layers.attn.k" + b, "layers.attn.v" + b) for b in ("", "_bias"))
    biases = (Row(qkv_bias, at + "query_key_value.bias", "(h n k) -> n h k"), Row("layers.attn.o_bias", at + "dense.bias", "d -> d"))
    return (
        Row("embed", "gpt_neox.embed_in.weight", "v d -> v d"),
        Row("layers.attn_norm.gain", layer + "input_layernorm.weight", "d -> d"),
        Row("layers.attn_norm.bias", layer + "input_layernorm.bias", "d -> d"),
        Row("layers.mlp_norm.gain", layer + "post_attention_layernorm.weight", "d -> d"),
        Row("layers.mlp_norm.bias", layer + "post_attention_layernorm.bias", "d -> d"),
        Row(qkv, at + "query_key_value.weight", "(h n k) d -> n d h k"),
        Row("layers.attn.o", at + "dense.weight", "d (h k) -> h k d"),
        *(biases if c.attention_bias else ()),
        Row("layers.mlp.up", mlp_ + "dense_h_to_4h.weight", "f d -> d f"),
        Row("layers.mlp.up_bias", mlp_ + "dense_h_to_4h.bias", "f -> f"),
        Row("layers.mlp.down", mlp_ + "dense_4h_to_h.weight", "d f -> f d"),
        Row("layers.mlp.down_bias", mlp_ + "dense_4h_to_h.bias", "d -> d"),
        Row("norm.gain", "gpt_neox.final_layer_norm.weight", "d -> d"),
        Row("norm.bias", "gpt_neox.final_layer_norm.bias", "d -> d"),
        Row("head", "embed_out.weight", "v d -> v d"),
        *(Row("", at + name, "") for name in ("bias", "masked_bias", "rotary_emb.inv_freq")),
    )


def from_hf(given: Mapping[str, Any]) -> Config:
    """config.json in either schema -> configuration. Raises ValueError for what is not implemented."""
    fields = take(given, NAMES, DEFAULTS)
    fields["act"] = activation(fields["act"])
    turned = read_rope(given, given.get("rotary_emb_base", 10000.0), fields["max_seq"], given.get("rotary_pct", 0.25))
    return Config(**fields, rope=turned)


def to_hf(c: Config, old: bool) -> dict[str, Any]:
    """config.json of a configuration, in the old schema or the new one.  Raises ValueError where GPT-NeoX cannot say it."""
    plain_heads("GPT-NeoX", c)
    turned = write_rope(c.rope, old)
    if old:
        turned = {"rotary_emb_base": c.rope.theta, "rotary_pct": c.rope.partial, "rope_scaling": turned["rope_scaling"]}
    else:
        turned["rope_parameters"]["partial_rotary_factor"] = c.rope.partial
    names = {theirs: getattr(c, ours) for ours, theirs in NAMES.items()}
    return {"architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", **names, **turned}


MODEL = Model(
    "neox", Config, specs, embed, rotary, block, final, alike, parallel=lambda c: c.parallel, hf=rows, from_hf=from_hf, to_hf=to_hf
)
