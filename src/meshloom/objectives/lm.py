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


Objective = Callable[[Bound, Tree, Tree, Batch, Any], tuple[jax.Array, dict[str, jax.Array]]]
"""bound, w, whole, batch (local rows of one micro-batch), key -> the sum to differentiate over this device's rows, and named sums for the log.

Sums, never means: the step divides once by the global count of scored tokens, so the batch cut cannot change the result.
"""


def lm(z_loss: float = 0.0) -> Objective:
    """Next-token cross-entropy, natural log.  z_loss: coefficient of logsumexp squared (PaLM, arXiv 2204.02311)."""

    def objective(bound: Bound, w: Tree, whole: Tree, batch: Batch, key: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        model, c, lay, how = bound
        x, outer, _, told = hidden(model, c, lay, w, whole, batch.tokens, context(batch, key), how)
        x = put(lay, "btd->BTD", x).reshape(-1, c.embed)
        axes = lay.acts.get("vocab", ())
        targets, weights = (put(lay, "bT->BT", a) for a in (batch.targets, batch.weights))
        head = whole_embed(lay, unembed(outer))
        chunks = chunk_count(x.shape[0], head.shape[0], lay.platform)
        sums = cross_entropy(x, head, targets.reshape(-1), weights.reshape(-1), vocab=c.vocab, axes=axes, chunks=chunks, z_loss=z_loss)
        extra, more = model.extra(c, lay, told)
        return sums.total + extra, {"loss": sums.nll, "z": sums.square, "correct": sums.correct, "tokens": jnp.sum(weights), **more}

    return objective
