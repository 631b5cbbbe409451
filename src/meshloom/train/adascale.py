"""AdaScale: a learning rate that follows how much the data shards' gradients differ, and a count of steps that means the same at any number of them.

Where all shards have the same gradient, more of them change nothing (gain 1); where gradients are noise alone, S shards do the work of S steps
(gain S). The gain multiplies the learning rate and is what a step counts for. Source: arXiv 2007.05105, algorithm 1 and section 3.
"""

from typing import NamedTuple

import jax.numpy as jnp
import optax
from jax import Array

from meshloom.core.tree import Tree
from meshloom.parallel.base import Collective, Shapes
from meshloom.plan.plan import Plan
from meshloom.train.config import OptimizerConfig
from meshloom.train.optimizer import clip_factor, make_optimizer, state_specs
from meshloom.train.replicas import count, gradient_cost, make_mean, mean_cost
from meshloom.train.rule import Gradient, Phase, Rule, Updated, number, zeros
from meshloom.train.scale import select
from meshloom.train.schedule import Schedule


class AdaScale(NamedTuple):
    """inner: the optimizer's state. scaled: the sum of gains: steps done, as one shard would count them. noise, signal: running means of a shard
    gradient's variance and of the true gradient's square. seen: steps in these."""

    inner: Tree
    scaled: Array
    noise: Array
    signal: Array
    seen: Array


def parts(own: Array, whole: Array, shards: int) -> tuple[Array, Array]:
    """Variance of one shard's gradient, square of the true one.  own: mean of the shards' squared norms. whole: squared norm of their mean."""
    noise = jnp.maximum(own - whole, 0) * shards / (shards - 1)
    return noise, jnp.maximum(whole - noise / shards, 0)


def gain(noise: Array, signal: Array, shards: int) -> Array:
    """(noise + signal) / (noise / shards + signal), from 1 to `shards`; 1 where there is no gradient at all."""
    below = noise / shards + signal
    return jnp.where(below > 0, (noise + signal) / jnp.where(below > 0, below, 1), 1.0)


def memory(shards: int) -> float:
    """How much of the running means each step keeps: 1 - S / 1000, at least 0, as published."""
    return max(1 - shards / 1000, 0.0)


def adascale(c: OptimizerConfig, plan: Plan, specs: Tree, schedule: Schedule, per_step: int, clip: float) -> Rule:
    """AdaScale around any row of OPTIMIZERS.  The learning rate is the gain times what the schedule gives for the scaled count once this step is
    done. One shard: gain 1, the optimizer itself.  clip: largest norm of the mean gradient, 0 for none."""
    shards, tx = count(plan.layout), make_optimizer(c, specs)
    mean, keep = make_mean(plan, specs, measured=True), memory(shards)

    def update(g: Gradient, opt: AdaScale, params: Tree) -> Updated:
        grads, norm = mean(g.grads)
        noise, signal, seen = opt.noise, opt.signal, opt.seen + 1
        r = jnp.float32(1)
        if shards > 1:
            now = parts(jnp.square(g.norm), jnp.square(norm), shards)
            noise, signal = (keep * old + (1 - keep) * new for old, new in zip((noise, signal), now))
            bias = 1 - keep ** seen.astype(jnp.float32)
            r = gain(noise / bias, signal / bias, shards)
        scaled = opt.scaled + r
        lr = r * schedule(scaled * per_step)
        towards, inner = tx.update(grads, opt.inner, params, lr=lr, factor=clip_factor(norm, clip), finite=g.finite)
        new, kept = optax.apply_updates(params, towards), AdaScale(inner, scaled, noise, signal, seen)
        new, kept = select(g.finite, (new, kept), (params, opt))
        return new, kept, g.finite, {"lr": lr, "norm": norm, "adascale_gain": r, "scaled_steps": kept.scaled}

    state = AdaScale(state_specs(tx, specs), number(), number(), number(), number("int32"))
    return Rule(
        state=state,
        begin=lambda params: zeros(state)._replace(inner=tx.init(params)),
        phases={"adascale": Phase(True, update, adascale_cost, clips=False)},
        phase=lambda done: "adascale",
        own=None,
        kinds={"optimizer": state},
    )


def adascale_cost(spelling: str, x: Shapes) -> tuple[Collective, ...]:
    """A step whose gradients stay apart, their mean, and the norm of that."""
    found = gradient_cost(spelling, x)
    return (*found, *mean_cost(x), *(c for c in found if c.place == "norm"))
