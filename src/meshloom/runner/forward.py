"""From tokens to the last hidden state: embedding, the loop over layers, the last norm."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from meshloom.core.layout import ONE_DEVICE, Layout
from meshloom.core.leaf import whole_rows
from meshloom.core.tree import Tree
from meshloom.models.base import Ctx, Model, unembed
from meshloom.runner.gather import outer_weights, outside
from meshloom.runner.pipeline import through
from meshloom.runner.run import How, Layers, run
from meshloom.runner.stage import stage_of


def hidden(
    model: Model, c: Any, lay: Layout, w: Tree, whole: Tree, tokens: jax.Array, ctx: Ctx, how: How
) -> tuple[jax.Array, Tree, Tree, Tree]:
    """tokens: (batch whole_seq) -> x (batch seq embed) behind the last norm, the live weights outside the layers, the caches, and what layers told.

    w, whole: the step's weights and, where ZeRO-2 has gathered them, their whole copies (a tree of None elsewhere). ctx.rotary is filled here.
    """
    outer = outer_weights(model.specs(c), lay, outside(w), outside(whole), ctx.samples)
    if stage := stage_of(model, c, lay, how):
        x, told = through(stage, w, whole, tokens, ctx)
        return model.final(c, lay, outer, x), outer, None, told
    ctx = replace(ctx, rotary=model.rotary(c, ctx.positions), documents=whole_rows(lay, ctx.segments))
    x = model.embed(c, lay, outer, tokens, ctx)
    x, cache, told = run(model, c, lay, Layers(w.layers, whole.layers, ctx.cache), x, replace(ctx, cache=None), how)
    return model.final(c, lay, outer, x), outer, cache, told


def logits(
    model: Model, c: Any, w: Tree, tokens: jax.Array, segments: jax.Array | None = None, positions: jax.Array | None = None
) -> jax.Array:
    """Scores of every token that exists, fp32, on one device.  tokens: (batch seq) -> (batch seq vocab).  segments, positions: of packed rows."""
    batch, seq = tokens.shape
    where = jnp.broadcast_to(jnp.arange(seq, dtype=jnp.int32), (batch, seq)) if positions is None else positions
    ctx = Ctx(jnp.ones((batch, seq), jnp.int32) if segments is None else segments, where, None, jnp.arange(batch), None, 0, None, None)
    nothing = jax.tree.map(lambda _: None, w)
    x, outer, _, _ = hidden(model, c, ONE_DEVICE, w, nothing, tokens, ctx, How())
    return jnp.einsum("btd,vd->btv", x, unembed(outer)[: c.vocab], preferred_element_type=jnp.float32)
