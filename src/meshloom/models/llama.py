"""The Llama line: Llama 2 and 3, Mistral (sliding window), Qwen2 (biases), Qwen3 (q/k norms), SmolLM2 and SmolLM3 (layers without rotary)."""

import dataclasses
from typing import Any, Literal

import jax
from pydantic import Field, model_validator

from meshloom.core.layout import Layout
from meshloom.core.leaf import put
from meshloom.core.spec import stack
from meshloom.core.tree import pytree
from meshloom.models import llama_hf
from meshloom.models.attention import Attention, attend
from meshloom.models.base import Ctx, Kind, Model, ModelConfig
from meshloom.models.parts import GatedMlp, drop, embed, gated_mlp, rotary
from meshloom.ops.norm import rms_norm
from meshloom.ops.rope import Rope, check_pairs


class Config(ModelConfig):
    """Sizes and constants of a Llama-line model."""

    family: Literal["llama"] = "llama"
    """The family's name."""
    variant: Literal["llama", "mistral", "qwen2", "qwen3", "smollm3"] = "llama"
    """The Hugging Face `model_type` that an export is written as."""
    qkv_bias: bool = False
    """Biases on the query, key and value projections (Qwen2)."""
    o_bias: bool = False
    """A bias on the attention's output projection."""
    mlp_bias: bool = False
    """Biases in the MLP."""
    qk_norm: bool = False
    """RMS norms of each query and key head (Qwen3)."""
    window: int | None = Field(None, ge=1)
    """Sliding window: keys that a query sees, itself included. None: all before it."""
    windowed_layers: tuple[bool, ...] = ()
    """Which layers have the window; empty: all."""
    rotary_layers: tuple[bool, ...] = ()
    """Which layers have rotary positions; empty: all."""
    rope: Rope = Rope()
    """Rotary positions and their scaling."""

    @model_validator(mode="before")
    @classmethod
    def _imply(cls, given: Any) -> Any:
        """Fills what the variant implies; a list that says yes for every layer is the same as none."""
        if not isinstance(given, dict):
            return given

        def everywhere(key: str, value: Any) -> bool:
            lists = key in ("windowed_layers", "rotary_layers") and isinstance(value, (list, tuple))
            return lists and len(value) == given.get("layers") and all(value)

        said = {key: value for key, value in given.items() if not everywhere(key, value)}
        return {**llama_hf.IMPLIED.get(str(given.get("variant")), {}), **said}

    @model_validator(mode="after")
    def _sayable(self) -> "Config":
        for name in ("windowed_layers", "rotary_layers"):
            if len(getattr(self, name)) not in (0, self.layers):
                raise ValueError(f"{name} has {len(getattr(self, name))} entries for {self.layers} layers. Give one for each, or none.")
        if any(self.rotary_layers) or not self.rotary_layers:
            check_pairs(self.rope, self.head)
        unsaid = llama_hf.unsaid(self)
        if unsaid:
            raise ValueError(
                f"A Hugging Face '{self.variant}' model cannot have {', '.join(unsaid)}, so it could not be exported. Choose another variant "
                f"({', '.join(llama_hf.DEFAULTS)}) or leave this out."
            )
        return self


@pytree
class Block:
    """One layer."""

    attn: Attention
    mlp: GatedMlp
    attn_norm: Any
    mlp_norm: Any

    @staticmethod
    def specs(c: Config) -> "Block":
        """The Specs of one layer."""
        norm = c.gain("embed")
        return Block(Attention.specs(c, c.qkv_bias, c.o_bias, c.qk_norm), GatedMlp.specs(c, c.mlp_bias), norm, norm)


def block(c: Config, lay: Layout, kind: Kind, w: Block, x: jax.Array, ctx: Ctx) -> tuple[jax.Array, Ctx]:
    """x + attention(norm(x)), then + mlp(norm(.)).  x: (batch seq embed) -> same.  Source: Touvron et al. 2023, arXiv 2302.13971."""
    y, cache = attend(c, lay, kind, w.attn, put(lay, "btd->bTd", rms_norm(x, w.attn_norm, c.norm_eps, lay.stream)), ctx)
    x = x + drop(c, lay, y, ctx, "attention/out")
    y = gated_mlp(lay, w.mlp, put(lay, "btd->bTd", rms_norm(x, w.mlp_norm, c.norm_eps, lay.stream)))
    return x + drop(c, lay, y, ctx, "mlp/out"), dataclasses.replace(ctx, cache=cache)


@pytree
class Llama:
    """The whole model. embed: [vocab, embed]. layers: blocks stacked on a leading axis. head: [vocab, embed], or None when tied."""

    embed: Any
    layers: Block
    norm: Any
    head: Any


def specs(c: Config) -> Llama:
    """The Specs of the model."""
    table = c.spec("vocab embed")
    return Llama(table, stack(Block.specs(c), c.layers), c.gain("embed"), None if c.tied else table)


def kinds(c: Config) -> tuple[Kind, ...]:
    """Window and rotary of each layer."""
    windowed, rotary = c.windowed_layers or (True,) * c.layers, c.rotary_layers or (True,) * c.layers
    return tuple(Kind(c.window if has_window else None, has_rotary) for has_window, has_rotary in zip(windowed, rotary, strict=True))


def final(c: Config, lay: Layout, w: Llama, x: jax.Array) -> jax.Array:
    """The last norm."""
    return rms_norm(x, w.norm, c.norm_eps, lay.stream)


def wide(c: Config) -> int:
    """Features that `up` and `gate` make of a token."""
    return 2 * c.ffn


READ = llama_hf.read(Config)
MODEL = Model("llama", Config, specs, embed, rotary, block, final, kinds, wide=wide, hf=llama_hf.rows, from_hf=READ, to_hf=llama_hf.write)
