"""From tokens to the last hidden state: embedding, the loop over layers, the last norm."""

from dataclasses import replace
from typing import Any

import jax

from meshloom.core.layout import Layout
from meshloom.core.leaf import live
from meshloom.core.spec import is_spec
from meshloom.core.tree import Tree
from meshloom.models.base import Ctx, Model
from meshloom.runner.run import How, Layers, run


def hidden(
    model: Model, c: Any, lay: Layout, w: Tree, whole: Tree, tokens: jax.Array, ctx: Ctx, how: How
) -> tuple[jax.Array, Tree, Tree]:
    """tokens: (batch whole_seq) -> x (batch seq embed) behind the last norm, the live weights outside the layers, and the caches.

    w, whole: the step's weights and, where ZeRO-2 has gathered them, their whole copies (a tree of None elsewhere). ctx.rotary is filled here.
    """
    specs = model.specs(c)
    outer = jax.tree.map(
        lambda s, a, b: live(lay, s.axes, a, b, ctx.samples), _outside(specs), _outside(w), _outside(whole), is_leaf=is_spec
    )
    ctx = replace(ctx, rotary=model.rotary(c, ctx.positions))
    x = model.embed(c, lay, outer, tokens, ctx)
    x, cache = run(model, c, lay, Layers(w.layers, whole.layers, ctx.cache), x, replace(ctx, cache=None), how)
    return model.final(c, lay, outer, x), outer, cache


def _outside(tree: Tree) -> Tree:
    """The model without its layers."""
    return replace(tree, layers=None)
