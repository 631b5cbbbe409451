"""Keeping a run finite: fp16's dynamic loss scale, skipping steps whose gradient is not finite, and the average of weights.

Pure functions on a small tree. The verdict is one number, the global gradient norm, which every device has the same: all skip or none.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from meshloom.core.tree import Tree
from meshloom.train.config import LossScaleConfig


class Scale(NamedTuple):
    """The loss scale and the record of non-finite steps. Part of the train state, so that a resume continues it."""

    scale: Array
    """fp32: multiplies the loss before the backward pass; the gradient is divided by it."""
    good: Array
    """int32: finite steps since the scale last changed."""
    patience: Array
    """int32: non-finite steps still borne before the scale halves."""
    skipped: Array
    """int32: steps skipped in the whole run."""
    consecutive: Array
    """int32: steps skipped in a row, up to now."""


def init_scale(c: LossScaleConfig, precision: str) -> Scale:
    """The first state. Every precision has one (it counts skips too); the scale stays 1 unless precision is fp16."""
    first = c.initial if precision == "fp16" else 1.0
    counts = (jnp.asarray(n, jnp.int32) for n in (0, c.hysteresis, 0, 0))
    return Scale(jnp.asarray(first, jnp.float32), *counts)


def next_scale(c: LossScaleConfig, precision: str, state: Scale, finite: Array) -> Scale:
    """The state after a step.  finite: bool scalar, whether the global norm of the unscaled gradient was finite.
    fp16: the scale doubles after `window` finite steps in a row, and halves when `hysteresis` non-finite steps have used up the patience,
    and at each further one until it doubles again.  Source: arXiv 1710.03740, section 3.2; hysteresis as in Megatron's fp16 training."""
    bad = jnp.where(finite, 0, 1).astype(jnp.int32)
    counted = state._replace(skipped=state.skipped + bad, consecutive=jnp.where(finite, 0, state.consecutive + 1))
    if precision != "fp16":
        return counted
    patience = state.patience - bad
    good = jnp.where(finite, state.good + 1, 0)
    grow, shrink = good >= c.window, patience <= 0
    shrink = jnp.logical_and(shrink, jnp.logical_not(finite))
    scale = jnp.where(
        grow, jnp.minimum(state.scale * 2, c.maximum), jnp.where(shrink, jnp.maximum(state.scale / 2, c.minimum), state.scale)
    )
    return counted._replace(
        scale=scale,
        good=jnp.where(grow, 0, good),
        patience=jnp.where(grow, c.hysteresis, jnp.maximum(patience, 0)),
    )


def select(finite: Array, new: Tree, old: Tree) -> Tree:
    """`new` where the step counts, else `old`, bit for bit: a skipped step leaves parameters and optimizer state as they were."""
    return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)


def average(ema: Tree, params: Tree, decay: float) -> Tree:
    """The exponential average of weights after a step: decay * ema + (1 - decay) * params.  It starts as a copy of the first weights."""
    return jax.tree.map(lambda a, p: a + (1 - decay) * (p.astype(a.dtype) - a), ema, params)


def check_skips(limit: int, consecutive: int, step: int, scale: float = 1.0) -> None:
    """Raises FloatingPointError when more than `limit` steps in a row, up to `step`, had a gradient that was not finite. For the host."""
    if consecutive > limit:
        raise FloatingPointError(
            f"The gradient was not finite in {consecutive} steps in a row, up to step {step} (loss scale {scale:g}); train.nonfinite_limit is {limit}. "
            "The weights are those from before the first of them. Lower optimizer.lr, lengthen schedule.warmup, or look at the batches of these steps."
        )
