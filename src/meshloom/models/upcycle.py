"""A dense model as a mixture of experts: every expert starts as a copy of the dense MLP.  Source: Komatsuzaki 2023, arXiv 2212.05055.

The weights of a token's experts sum to 1, so the mixture's logits are the dense model's, whatever the routers, which start random.
"""

from typing import Any

import jax
import jax.numpy as jnp

from meshloom.core.spec import init
from meshloom.core.tree import Tree
from meshloom.models import llama, moe
from meshloom.models.base import Model
from meshloom.models.mixture import Mixture

VARIANTS = {"llama": "mixtral", "mistral": "mixtral", "qwen3": "qwen3_moe"}
"""Variant of the dense model -> what the mixture is written as; any other is `plain`."""
SAME = (
    "layers embed heads kv_heads head ffn vocab vocab_multiple max_seq tied norm_eps init_std dropout attention_dropout qkv_bias o_bias qk_norm "
    "window rope"
).split()
"""Fields that both families have."""


def config(model: Model, c: Any, experts: int, top: int) -> moe.Config:
    """The configuration of the mixture.  Raises ValueError for a model that has none."""
    if model.name != llama.MODEL.name:
        raise ValueError(f"Only models of the llama family become mixtures, and this one is of family {model.name}. Convert another model.")
    for field, what in (("windowed_layers", "windows"), ("rotary_layers", "rotary positions"), ("mlp_bias", "biases in the MLP")):
        if getattr(c, field):
            there = "" if field == "mlp_bias" else " in some layers only"
            raise ValueError(f"This model has {what}{there} ({field}), which mixtures have not. Convert a model without.")
    given = {name: getattr(c, name) for name in SAME}
    for variant in (VARIANTS.get(c.variant, "plain"), "plain"):
        try:
            return moe.Config(**given, variant=variant, experts=experts, top=top, expert_ffn=c.ffn, normalize=True)
        except ValueError:
            if variant == "plain":
                raise
    raise AssertionError


def weights(c: moe.Config, dense: Tree, seed: int = 0) -> Tree:
    """The parameters of the mixture.  c: its configuration.  dense: the dense model's parameters."""
    router = init({"router": moe.specs(c).layers.sparse.mlp.router}, jax.random.key(seed))["router"]
    copies = lambda a: jnp.broadcast_to(a[:, None], (a.shape[0], c.experts, *a.shape[1:]))
    old = dense.layers
    mlp = Mixture(router, None, *(copies(getattr(old.mlp, name)) for name in ("gate", "up", "down")), None, None)
    block = moe.Block(old.attn, mlp, old.attn_norm, old.mlp_norm)
    return moe.Moe(dense.embed, moe.Layers(None, block), dense.norm, dense.head)
