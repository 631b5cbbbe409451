"""The Llama line with experts: Mixtral, Qwen3-MoE, and a plain one that may be anything and has no counterpart in Hugging Face."""

import dataclasses
from typing import Any, Literal

import jax
from pydantic import Field, model_validator

from meshloom.core.layout import Layout
from meshloom.core.leaf import put
from meshloom.core.spec import Spec, stack
from meshloom.core.tree import Tree, pytree
from meshloom.models import moe_hf
from meshloom.models.attention import Attention, attend
from meshloom.models.base import Ctx, Kind, Model
from meshloom.models.mixture import Mixture, MixtureConfig, extra, mixture, settle, told
from meshloom.models.parts import GatedMlp, drop, embed, gated_mlp, rotary
from meshloom.ops.norm import rms_norm
from meshloom.ops.rope import Rope, check_pairs


class Config(MixtureConfig):
    """Sizes and constants of a Llama-line model with experts."""

    family: Literal["moe"] = "moe"
    """The family's name."""
    variant: Literal["plain", "mixtral", "qwen3_moe"] = "plain"
    """The Hugging Face `model_type` that an export is written as; `plain` has none and may have every field."""
    qkv_bias: bool = False
    """Biases on the query, key and value projections."""
    o_bias: bool = False
    """A bias on the attention's output projection."""
    qk_norm: bool = False
    """RMS norms of each query and key head (Qwen3-MoE)."""
    window: int | None = Field(None, ge=1)
    """Sliding window: keys that a query sees, itself included. None: all before it."""
    rope: Rope = Rope()
    """Rotary positions and their scaling."""

    @model_validator(mode="before")
    @classmethod
    def _imply(cls, given: Any) -> Any:
        """Fills what the variant implies; a list that says yes for every layer is the same as none."""
        if not isinstance(given, dict):
            return given
        same = given.get("moe_layers")
        said = {k: v for k, v in given.items() if not (k == "moe_layers" and same and all(same) and len(same) == given.get("layers"))}
        return {**moe_hf.IMPLIED.get(str(given.get("variant")), {}), **said}

    @model_validator(mode="after")
    def _sayable(self) -> "Config":
        check_pairs(self.rope, self.head)
        if unsaid := moe_hf.unsaid(self):
            raise ValueError(
                f"A Hugging Face '{self.variant}' model cannot have {', '.join(unsaid)}, so it could not be exported. Choose variant plain "
                "(it is not exported), or leave this out."
            )
        return self


@pytree
class Block:
    """One layer. mlp: dense, or a mixture of experts."""

    attn: Attention
    mlp: Any
    attn_norm: Any
    mlp_norm: Any


@pytree
class Layers:
    """The layers of each kind, stacked; None where there are none."""

    dense: Any
    sparse: Any


@pytree
class Moe:
    """The whole model. embed: [vocab, embed]. head: [vocab, embed], or None when tied."""

    embed: Any
    layers: Layers
    norm: Any
    head: Any


def specs(c: Config) -> Moe:
    """The Specs of the model."""
    table, norm = c.spec("vocab embed"), c.gain("embed")
    attn = Attention.specs(c, c.qkv_bias, c.o_bias, c.qk_norm)
    dense, sparse = (Block(attn, mlp, norm, norm) for mlp in (GatedMlp.specs(c), Mixture.specs(c)))
    return Moe(table, stacked(c, dense, sparse), norm, None if c.tied else table)


def stacked(c: MixtureConfig, dense: Tree, sparse: Tree) -> Layers:
    """Both kinds of layers from one layer's Specs of each."""
    many = sum(c.sparse)
    return Layers(stack(dense, c.layers - many) if many < c.layers else None, stack(sparse, many) if many else None)


def kinds(c: Config) -> tuple[Kind, ...]:
    """Window and stack of each layer."""
    return tuple(Kind(c.window, stack="sparse" if sparse else "dense", tells=sparse) for sparse in c.sparse)


def block(c: Config, lay: Layout, kind: Kind, w: Block, x: jax.Array, ctx: Ctx) -> tuple[jax.Array, Ctx]:
    """x + attention(norm(x)), then + experts or MLP (norm(.)).  x: (batch seq embed) -> same.  Source: Mixtral, arXiv 2401.04088."""
    y, cache = attend(c, lay, kind, w.attn, put(lay, "btd->bTd", rms_norm(x, w.attn_norm, c.norm_eps, lay.stream)), ctx)
    return half(c, lay, kind, w, x + drop(c, lay, y, ctx, "attention/out"), dataclasses.replace(ctx, cache=cache), ctx)


def half(c: MixtureConfig, lay: Layout, kind: Kind, w: Any, x: jax.Array, out: Ctx, ctx: Ctx) -> tuple[jax.Array, Ctx]:
    """A layer's second half: its kind's MLP.  ctx: as the layer was given it.  out: as it will be returned."""
    inside = put(lay, "btd->bTd", rms_norm(x, w.mlp_norm, c.norm_eps, lay.stream))
    if kind.stack == "sparse":
        y, said = mixture(c, lay, w.mlp, inside, ctx)
        out = dataclasses.replace(out, told=said)
    else:
        y = gated_mlp(lay, w.mlp, inside)
    return x + drop(c, lay, y, ctx, "mlp/out"), out


def final(c: Config, lay: Layout, w: Moe, x: jax.Array) -> jax.Array:
    """The last norm."""
    return rms_norm(x, w.norm, c.norm_eps, lay.stream)


def wide(c: MixtureConfig) -> int:
    """Features that the MLP of a layer makes of a token, on average over the layers: of all its experts, and its copies for them."""
    sparse = 2 * (c.top * c.expert_ffn + c.beside) + 3 * c.top * c.embed
    many = sum(c.sparse)
    return (many * sparse + (c.layers - many) * 2 * c.ffn) // c.layers


def settled(c: MixtureConfig, params: Any, sums: dict[str, jax.Array]) -> Any:
    """Parameters after a step, with the selection's biases moved towards an even load."""
    if not c.bias_rate or params.layers.sparse is None:
        return params
    sparse = params.layers.sparse
    mlp = dataclasses.replace(sparse.mlp, bias=settle(c, sparse.mlp.bias, sums["load"]))
    return dataclasses.replace(params, layers=dataclasses.replace(params.layers, sparse=dataclasses.replace(sparse, mlp=mlp)))


def active(c: MixtureConfig, s: Spec) -> float:
    """The part of a parameter that a token goes through."""
    return c.top / c.experts if "expert" in s.axes else 1.0


MODEL = Model(
    "moe",
    Config,
    specs,
    embed,
    rotary,
    block,
    final,
    kinds,
    wide=wide,
    hf=moe_hf.rows,
    fused=moe_hf.fused,
    told=told,
    extra=extra,
    settle=settled,
    active=active,
    from_hf=moe_hf.read(Config),
    to_hf=moe_hf.write,
)
