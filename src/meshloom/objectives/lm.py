"""The language-modelling loss, and what any objective is."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from meshloom.core.batch import Batch
from meshloom.core.layout import Layout
from meshloom.core.leaf import put, whole_embed
from meshloom.core.tree import Tree
from meshloom.models.base import Model, context, unembed
from meshloom.ops.loss import chunk_count, cross_entropy
from meshloom.runner.forward import hidden
from meshloom.runner.run import How


class Bound(NamedTuple):
    """A model with its configuration, its layout and the way its layers run: what is left to give are weights and a batch."""

    model: Model
    config: Any
    layout: Layout
    how: How


Objective = Callable[[Bound, Tree, jax.Array, Batch], tuple[jax.Array, dict[str, jax.Array]]]
"""bound, the live weights outside the layers, x [batch, seq, embed] behind the last norm, batch (local rows of one micro-batch) -> the sum to
differentiate over this device's rows, and named sums for the log.

Sums, never means: the step divides once by the global count of scored tokens, so the batch cut cannot change the result.
"""


def lm(z_loss: float = 0.0) -> Objective:
    """Next-token cross-entropy, natural log.  z_loss: coefficient of logsumexp squared (PaLM, arXiv 2204.02311)."""

    def objective(bound: Bound, outer: Tree, x: jax.Array, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        c, lay = bound.config, bound.layout
        x = put(lay, "btd->BTD", x).reshape(-1, c.embed)
        axes = lay.acts.get("vocab", ())
        targets, weights = (put(lay, "bT->BT", a) for a in (batch.targets, batch.weights))
        head = whole_embed(lay, unembed(outer))
        chunks = chunk_count(x.shape[0], head.shape[0], lay.platform)
        sums = cross_entropy(x, head, targets.reshape(-1), weights.reshape(-1), vocab=c.vocab, axes=axes, chunks=chunks, z_loss=z_loss)
        return sums.total, {"loss": sums.nll, "z": sums.square, "correct": sums.correct, "tokens": jnp.sum(weights)}

    return objective


def evaluate(bound: Bound, objective: Objective, w: Tree, whole: Tree, batch: Batch, key: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    """An objective of a model's output, with what its layers add to it.  w, whole: as `runner.forward.hidden` takes them.  Returns as an objective."""
    model, c, lay, how = bound
    x, outer, _, told = hidden(model, c, lay, w, whole, batch.tokens, context(batch, key), how)
    total, sums = objective(bound, outer, x, batch)
    extra, more = model.extra(c, lay.within, told)
    return total + extra, {**sums, **more}
