"""Adam whose replicas exchange one bit an element, or nothing: 1-bit Adam and 0/1 Adam.  (1-bit LAMB: train/lamb.py.)

Both freeze or refresh the variance by full-precision steps, and otherwise exchange momentum by `train/onebit.py`. Neither corrects the moments'
bias, as published. Steps are counted from 1, skipped ones included. Clipping: of the whole gradient where it is averaged in full, else of
every replica's own gradient.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from meshloom.core.spec import Spec, is_spec
from meshloom.core.tree import Tree
from meshloom.parallel.base import Collective, Shapes
from meshloom.plan.cost import step_cost
from meshloom.plan.plan import Plan
from meshloom.train.config import OptimizerConfig
from meshloom.train.onebit import Errors, error_specs, exchange_cost, make_exchange
from meshloom.train.optimizer import role
from meshloom.train.replicas import count, gradient_cost, make_one, spread, stacked
from meshloom.train.rule import Gradient, Phase, Rule, Updated, empty, number, zeros
from meshloom.train.scale import select


class OneBit(NamedTuple):
    """1-bit Adam's state. m: the mean of gradients, the same on all replicas. v: of their squares, fixed from the freeze on."""

    m: Tree
    v: Tree
    errors: Errors


class ZeroOne(NamedTuple):
    """0/1 Adam's state. m: every replica's own mean of gradients [replica, ...]. v: the mean of squares, shared. u: what each replica has gone since the
    last exchange, before the division by the root of v [replica, ...]. gone: the sum of the learning rates of these steps. since: their number."""

    m: Tree
    v: Tree
    u: Tree
    gone: Array
    since: Array
    errors: Errors


def compressed_cost(spelling: str, x: Shapes) -> tuple[Collective, ...]:
    """A step whose gradients stay apart, and one exchange."""
    return (*gradient_cost(spelling, x), *exchange_cost(x))


def alive(specs: Tree, v: Tree) -> Tree:
    """Which elements take part, bool: those that are not padding and whose mean of squares is not 0.  An element that has had no gradient
    while v was still moving would otherwise be divided by almost nothing, since one bit cannot say zero."""

    def one(s: Spec, v: Array) -> Array:
        seen = v > 0
        for axis, (size, used) in enumerate(zip(s.shape, s.used)):
            if used < size:
                seen &= jax.lax.broadcasted_iota(jnp.int32, s.shape, axis) < used
        return seen

    return jax.tree.map(one, specs, v, is_leaf=is_spec)


def mean(beta: float, old: Tree, new: Tree) -> Tree:
    """beta * old + (1 - beta) * new."""
    return jax.tree.map(lambda a, b: beta * a + (1 - beta) * b, old, new)


def squares(tree: Tree) -> Tree:
    """Every element squared."""
    return jax.tree.map(jnp.square, tree)


def matrices(specs: Tree) -> Tree:
    """Which parameters weight decay shrinks, bool."""
    return jax.tree.map(lambda s: role(s).matrix, specs, is_leaf=is_spec)


def _moved(c: OptimizerConfig, decays: Tree, m: Tree, v: Tree, params: Tree, lr: Array, far: Array | float) -> Tree:
    """params - lr * m / (sqrt(v) + eps) - far * weight_decay * params, the last for matrices.  m: may have a leading axis `replica`."""

    def one(decay: bool, m: Array, v: Array, p: Array) -> Array:
        new = p - lr * m / (jnp.sqrt(v) + c.eps)
        return new - far * c.weight_decay * p if decay and c.weight_decay else new

    return jax.tree.map(one, decays, m, v, params)


def onebit_adam(c: OptimizerConfig, plan: Plan, specs: Tree, steps: int) -> Rule:
    """Adam up to step c.freeze_step; then v is fixed and momentum is exchanged by one bit an element.  Source: arXiv 2102.02888, algorithm 1."""
    exchange, decays = make_exchange(plan, specs), matrices(specs)

    def warm_up(g: Gradient, opt: OneBit, params: Tree) -> Updated:
        m, v = mean(c.beta1, opt.m, g.grads), mean(c.beta2, opt.v, squares(g.grads))
        new = _moved(c, decays, m, v, params, g.lr, g.lr)
        return *select(g.finite, (new, OneBit(m, v, opt.errors)), (params, opt)), g.finite, {}

    def onebit(g: Gradient, opt: OneBit, params: Tree) -> Updated:
        own = jax.tree.map(lambda m, g: c.beta1 * m + (1 - c.beta1) * g, opt.m, g.grads)
        m, errors = exchange(own, alive(specs, opt.v), opt.errors)
        new = _moved(c, decays, m, opt.v, params, g.lr, g.lr)
        return *select(g.finite, (new, OneBit(m, opt.v, errors)), (params, opt)), g.finite, {}

    nil = empty(specs)
    state = OneBit(nil, nil, error_specs(plan.layout, nil))
    return Rule(
        state=state,
        begin=lambda params: zeros(state),
        phases={"warm-up": Phase(False, warm_up, step_cost), "one bit": Phase(True, onebit, compressed_cost)},
        phase=lambda done: "warm-up" if done < c.freeze_step else "one bit",
        own=None,
        kinds={"optimizer": (state.m, state.v), "errors": state.errors},
    )


@functools.lru_cache
def refreshed(freeze: int, scaler: int) -> frozenset[int]:
    """The steps, from 1 to `freeze`, that renew 0/1 Adam's variance: every step `scaler` times, then every second `scaler` times, every fourth ..."""
    found, every = [], 1
    for step in range(1, freeze + 1):
        if step % every == 0:
            found.append(step)
            every = 2 ** (len(found) // scaler)
    return frozenset(found)


def interval(c: OptimizerConfig, step: int) -> int:
    """Steps between exchanges at a step: 1 up to the freeze; then doubled after every c.local_scaler steps, up to c.local_clip."""
    doubled = max(step - c.freeze_step - 1, 0) // c.local_scaler
    return min(c.local_clip, 2 ** min(doubled, 30))


def zero_one_phase(c: OptimizerConfig, steps: int, done: int) -> str:
    """The phase of the step that follows `done` steps. The last step of a run exchanges always, so that nothing of it is lost."""
    step = done + 1
    if step in refreshed(c.freeze_step, c.variance_scaler):
        return "full"
    return "one bit" if step % interval(c, step) == 0 or step == steps else "local"


def zero_one_adam(c: OptimizerConfig, plan: Plan, specs: Tree, steps: int) -> Rule:
    """Variance renewed at exponentially spaced steps by the whole gradient; one bit of what the replicas have gone at the others; after the freeze,
    steps between which nothing is exchanged.  Source: arXiv 2202.06009, algorithm 1; where v is renewed it is renewed first, and momentum then takes the
    same whole gradient (the paper's v of step 0 divides by 0).  Weight decay follows the shared parameters, with the steps' sum of learning rates."""
    replicas = count(plan.layout)
    exchange, decays, one = make_exchange(plan, specs), matrices(specs), make_one(plan, specs)

    def full(g: Gradient, opt: ZeroOne, params: Tree) -> Updated:
        m, v = mean(c.beta1, one(opt.m), g.grads), mean(c.beta2, opt.v, squares(g.grads))
        new = _moved(c, decays, m, v, params, g.lr, g.lr)
        kept = opt._replace(m=spread(m, replicas), v=v)
        return *select(g.finite, (new, kept), (params, opt)), g.finite, {}

    def walk(g: Gradient, opt: ZeroOne) -> tuple[Tree, ZeroOne]:
        """Every replica goes one step on its own."""
        live, m = alive(specs, opt.v), mean(c.beta1, opt.m, g.grads)
        u = jax.tree.map(lambda a, u, m: (u + g.lr * m) * a, live, opt.u, m)
        return live, opt._replace(m=m, u=u, gone=opt.gone + g.lr, since=opt.since + 1)

    def local(g: Gradient, opt: ZeroOne, params: Tree) -> Updated:
        return params, select(g.finite, walk(g, opt)[1], opt), 0, {}

    def onebit(g: Gradient, opt: ZeroOne, params: Tree) -> Updated:
        live, ahead = walk(g, opt)
        u, errors = exchange(ahead.u, live, opt.errors)
        new = _moved(c, decays, u, opt.v, params, jnp.float32(1), ahead.gone)
        m = spread(jax.tree.map(lambda u: u / ahead.gone, u), replicas)
        kept = ZeroOne(m, opt.v, jax.tree.map(jnp.zeros_like, opt.u), jnp.zeros_like(opt.gone), jnp.zeros_like(opt.since), errors)
        return *select(g.finite, (new, kept), (params, opt)), jnp.where(g.finite, ahead.since, 0), {}

    nil = empty(specs)
    many = stacked(nil, replicas)
    state = ZeroOne(many, nil, many, number(), number("int32"), error_specs(plan.layout, nil))
    return Rule(
        state=state,
        begin=lambda params: zeros(state),
        phases={
            "full": Phase(False, full, step_cost),
            "one bit": Phase(True, onebit, compressed_cost),
            "local": Phase(True, local, gradient_cost),
        },
        phase=lambda done: zero_one_phase(c, steps, done),
        own=lambda opt, params: _moved(c, decays, opt.u, opt.v, params, jnp.float32(1), opt.gone),
        kinds={"optimizer": (state.m, state.v, state.gone, state.since), "since the last exchange": state.u, "errors": state.errors},
    )
