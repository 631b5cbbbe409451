"""Training in replicas that go on their own for many steps and are then brought together: local SGD, SlowMo, DiLoCo.

Every data replica has its own parameters and its own inner optimizer (`optimizer`, any row of OPTIMIZERS), which see its own rows alone. Every
`outer.every` steps, and at the last step of a run, the parameters are averaged over replicas, and an outer step goes from the shared parameters
towards that mean; all replicas then begin there again. Evaluation, samples, exports and the average of weights see the shared parameters: those of the
last outer step. Inner state is kept or forgotten at an outer step (`outer.buffers`).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from meshloom.core.tree import Tree
from meshloom.parallel.base import Collective, Shapes
from meshloom.plan.plan import Plan
from meshloom.train.config import OptimizerConfig, OuterConfig
from meshloom.train.optimizer import make_optimizer, state_specs
from meshloom.train.replicas import count, gradient_cost, make_mean, mean_cost, spread, stacked
from meshloom.train.rule import Gradient, Phase, Rule, Updated, empty, number
from meshloom.train.scale import select


class Outer(NamedTuple):
    """local: every replica's parameters [replica, ...]. inner: the state of its optimizer, likewise. momentum: of the outer step, or None.
    since: int32, steps since the last outer step."""

    local: Tree
    inner: Tree
    momentum: Tree
    since: Array


def local_sgd(c: OuterConfig, old: Array, mean: Array, m: Array | None, lr: Array) -> tuple[Array, Array | None]:
    """The mean.  Source: arXiv 1805.09767."""
    return mean, m


def slowmo(c: OuterConfig, old: Array, mean: Array, m: Array, lr: Array) -> tuple[Array, Array]:
    """m = momentum * m + (old - mean) / lr; old - outer.lr * lr * m, with the learning rate of the step.  Source: arXiv 1910.00643, algorithm 1."""
    m = c.momentum * m + (old - mean) / jnp.where(lr > 0, lr, 1)
    return old - c.lr * lr * m, m


def diloco(c: OuterConfig, old: Array, mean: Array, m: Array, lr: Array) -> tuple[Array, Array]:
    """SGD with Nesterov's momentum on old - mean: m = momentum * m + d; old - outer.lr * (d + momentum * m).
    Source: arXiv 2311.08105, algorithm 1."""
    d = old - mean
    m = c.momentum * m + d
    return old - c.lr * (d + c.momentum * m), m


OUTER: dict[str, Callable[..., tuple[Array, Array | None]]] = {"local_sgd": local_sgd, "slowmo": slowmo, "diloco": diloco}
"""Kind -> (config, shared parameter, mean of the replicas', momentum, learning rate of the step) -> the next shared parameter, momentum."""


BUFFERS: dict[str, Callable[[Tree], Tree]] = {"keep": lambda inner: inner, "reset": lambda inner: jax.tree.map(jnp.zeros_like, inner)}
"""What becomes of the inner optimizers' state at an outer step: `keep` goes on with every replica's own, `reset` begins at zero."""


def outer(c: OptimizerConfig, outer: OuterConfig, plan: Plan, specs: Tree, steps: int) -> Rule:
    """The rule of an outer loop around an optimizer.  steps: of the run; its last one ends with an outer step."""
    replicas = count(plan.layout)
    many = stacked(specs, replicas)
    tx, mean, kept = make_optimizer(c, many), make_mean(plan, specs), outer.kind != "local_sgd"

    def walk(g: Gradient, opt: Outer) -> Outer:
        """Every replica goes one step on its own."""
        towards, inner = tx.update(g.grads, opt.inner, opt.local, lr=g.lr, finite=g.finite)
        local = select(g.finite, optax.apply_updates(opt.local, towards), opt.local)
        return opt._replace(local=local, inner=inner, since=opt.since + 1)

    def alone(g: Gradient, opt: Outer, params: Tree) -> Updated:
        return params, walk(g, opt), 0, {}

    def meet(g: Gradient, opt: Outer, params: Tree) -> Updated:
        ahead = walk(g, opt)
        there = mean(ahead.local)
        rule = lambda p, a, m=None: OUTER[outer.kind](outer, p, a, m, g.lr)
        pairs = jax.tree.map(rule, params, there, opt.momentum) if kept else jax.tree.map(rule, params, there)
        new, m = (jax.tree.map(lambda _, pair, i=i: pair[i], params, pairs) for i in (0, 1))
        return (
            new,
            Outer(spread(new, replicas), BUFFERS[outer.buffers](ahead.inner), m if kept else None, jnp.zeros_like(opt.since)),
            ahead.since,
            {},
        )

    def begin(params: Tree) -> Outer:
        local = spread(params, replicas)
        momentum = jax.tree.map(jnp.zeros_like, params) if kept else None
        return Outer(local, tx.init(local), momentum, jnp.zeros((), jnp.int32))

    nil = empty(specs) if kept else None
    state = Outer(many, state_specs(tx, many), nil, number("int32"))
    return Rule(
        state=state,
        begin=begin,
        phases={"alone": Phase(True, alone, gradient_cost), "together": Phase(True, meet, together_cost)},
        phase=lambda done: "together" if (done + 1) % outer.every == 0 or done + 1 == steps else "alone",
        own=lambda opt, params: opt.local,
        kinds={"replicas": state.local, "optimizer": (state.inner, state.since), **({"outer momentum": nil} if kept else {})},
    )


def together_cost(spelling: str, x: Shapes) -> tuple[Collective, ...]:
    """A step of every replica on its own, and the mean of the parameters."""
    return (*gradient_cost(spelling, x), *mean_cost(x))
