"""DeepSeek V2 and V3: latent attention, a few dense layers first, then many narrow experts beside shared ones."""

import dataclasses
from typing import Any, Literal

import jax
from pydantic import Field, model_validator

from meshloom.core.layout import Layout
from meshloom.core.leaf import put
from meshloom.models import deepseek_hf
from meshloom.models.base import Ctx, Kind, Model
from meshloom.models.latent import Latent, attend
from meshloom.models.mixture import Mixture, MixtureConfig, extra, told
from meshloom.models.moe import Block, Moe, active, final, half, settled, stacked, wide
from meshloom.models.parts import GatedMlp, drop, embed
from meshloom.ops.norm import rms_norm
from meshloom.ops.rope import Rope, check_pairs, tables


class Config(MixtureConfig):
    """Sizes and constants of a DeepSeek model. `head` is nope_head + rope_head."""

    family: Literal["deepseek"] = "deepseek"
    """The family's name."""
    variant: Literal["deepseek_v2", "deepseek_v3"] = "deepseek_v3"
    """The Hugging Face `model_type` that an export is written as."""
    query_rank: int | None = Field(None, ge=1)
    """Width that queries are narrowed to first; None: they are made directly."""
    key_rank: int = Field(ge=1)
    """Width that keys and values are made from."""
    nope_head: int = Field(ge=1)
    """Features of a query and key without positions."""
    rope_head: int = Field(ge=2)
    """Features of a query and key that are turned by position; all heads' keys share them."""
    value_head: int = Field(ge=1)
    """Features of a value; at most nope_head + rope_head."""
    interleaved: bool = True
    """Whether the turned pairs are neighbours; else they are halves."""
    attention_bias: bool = False
    """Biases on the narrowing projections and attention's output."""
    first_dense: int = Field(0, ge=0)
    """Dense layers before those with experts."""
    rope: Rope = Rope()
    """Rotary positions and their scaling."""

    @model_validator(mode="before")
    @classmethod
    def _latent(cls, given: Any) -> Any:
        """Fills the width of a head, and which layers have experts."""
        if not isinstance(given, dict):
            return given
        out, parts = dict(given), (given.get("nope_head"), given.get("rope_head"))
        if all(isinstance(n, int) for n in parts):
            out["head"] = sum(parts)
        first, layers = given.get("first_dense", 0), given.get("layers")
        if isinstance(first, int) and isinstance(layers, int):
            out["moe_layers"] = (False,) * min(first, layers) + (True,) * max(layers - first, 0) if first else ()
        return {**deepseek_hf.IMPLIED.get(str(given.get("variant", "deepseek_v3")), {}), **out}

    @model_validator(mode="after")
    def _fits(self) -> "Config":
        check_pairs(self.rope, self.rope_head)
        if self.kv_heads != self.heads:
            raise ValueError(f"Latent attention makes keys for every head: {self.kv_heads} key heads for {self.heads}. Leave kv_heads out.")
        if self.value_head > self.head:
            raise ValueError(
                f"value_head {self.value_head} is wider than a key ({self.head}), which is not implemented. Use at most {self.head}."
            )
        if self.first_dense >= self.layers:
            raise ValueError(
                f"{self.first_dense} dense layers leave none of {self.layers} with experts. Lower first_dense, or use family llama."
            )
        return self


def specs(c: Config) -> Moe:
    """The Specs of the model."""
    table, norm = c.spec("vocab embed"), c.gain("embed")
    dense, sparse = (Block(Latent.specs(c), mlp, norm, norm) for mlp in (GatedMlp.specs(c), Mixture.specs(c)))
    return Moe(table, stacked(c, dense, sparse), norm, None if c.tied else table)


def kinds(c: Config) -> tuple[Kind, ...]:
    """The stack of each layer."""
    return tuple(Kind(stack="sparse" if sparse else "dense", tells=sparse) for sparse in c.sparse)


def rotary(c: Config, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin of every position, for the rotary part of a head."""
    return tables(c.rope, c.rope_head, positions)


def block(c: Config, lay: Layout, kind: Kind, w: Block, x: jax.Array, ctx: Ctx) -> tuple[jax.Array, Ctx]:
    """x + attention(norm(x)), then + experts or MLP (norm(.)).  x: (batch seq embed) -> same.  Source: DeepSeek-V3, arXiv 2412.19437, 2.1."""
    y, cache = attend(c, lay, kind, w.attn, put(lay, "btd->bTd", rms_norm(x, w.attn_norm, c.norm_eps, lay.stream)), ctx)
    return half(c, lay, kind, w, x + drop(c, lay, y, ctx, "attention/out"), dataclasses.replace(ctx, cache=cache), ctx)


MODEL = Model(
    "deepseek",
    Config,
    specs,
    embed,
    rotary,
    block,
    final,
    kinds,
    wide=wide,
    active=active,
    hf=deepseek_hf.rows,
    fused=deepseek_hf.fused,
    told=told,
    extra=extra,
    settle=settled,
    from_hf=deepseek_hf.read(Config),
    to_hf=deepseek_hf.write,
)
