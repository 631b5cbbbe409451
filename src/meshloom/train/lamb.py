"""LAMB, and LAMB whose replicas exchange one bit an element (1-bit LAMB).

LAMB scales the step of every weight by |weight| / |direction|, within bounds (a stack of layers is many weights). 1-bit LAMB is LAMB up to the
freeze; then v is fixed, momentum is exchanged by one bit, and the scale is its mean from before the freeze times a factor that follows
the variance of the gradient as the momenta let it be reconstructed.  Sources: arXiv 1904.00962, 2104.06069 (algorithm 1). Neither corrects the
moments' bias. The paper evens out the momenta's sizes because one scale serves all of them; here every weight has its own.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from meshloom.core.spec import ZEROS, Spec, is_spec
from meshloom.core.tree import Tree
from meshloom.plan.cost import step_cost
from meshloom.plan.plan import Plan
from meshloom.train.compressed import alive, compressed_cost, mean, squares
from meshloom.train.config import OptimizerConfig
from meshloom.train.onebit import Errors, error_specs, make_exchange
from meshloom.train.optimizer import Role, role
from meshloom.train.rule import Gradient, Phase, Rule, Updated, empty, zeros
from meshloom.train.scale import select


class Lamb(NamedTuple):
    """m, v: means of gradients and of their squares. fresh: as v, moving on after the freeze. scale: the mean of each weight's scale before the freeze,
    factor: what it is multiplied by after it, [layer] or one number. The last four are None for LAMB alone."""

    m: Tree
    v: Tree
    fresh: Tree
    scale: Tree
    factor: Tree
    errors: Errors | None


def _is_role(x: object) -> bool:
    return isinstance(x, Role)


def norm(r: Role, x: Array) -> Array:
    """The L2 norm of each weight, [layer] or one number."""
    return jnp.sqrt(jnp.square(x).sum(r.own))


def wide(r: Role, scale: Array, like: Array) -> Array:
    """A number for each weight, shaped so that it multiplies the weights."""
    return scale.reshape([1 if i in r.own else n for i, n in enumerate(like.shape)])


def trust(c: OptimizerConfig, r: Role, p: Array, direction: Array) -> Array:
    """|weight| / |direction| within c.min_coeff and c.max_coeff; 1 where either is 0."""
    size, step = norm(r, p), norm(r, direction)
    ratio = jnp.clip(size / jnp.where(step > 0, step, 1), c.min_coeff, c.max_coeff)
    return jnp.where((size > 0) & (step > 0), ratio, 1.0)


def factor(c: OptimizerConfig, r: Role, last: Array, v: Array, fresh: Array, live: Array, bare: Array, direction: Array) -> Array:
    """What a weight's scale is multiplied by after the freeze: the largest ratio of the fixed to the moving root of the variance, weakened by the
    part of the step that is weight decay, within c.factor_min and c.factor_max, and within c.factor_threshold of what it was.
    bare, direction: the step without and with weight decay."""
    ratio = jnp.where(live, (jnp.sqrt(v) + c.eps) / (jnp.sqrt(fresh) + c.eps), 0.0).max(r.own)
    if r.matrix and c.weight_decay:
        step = norm(r, direction)
        part = jnp.minimum(1.0, norm(r, bare) / jnp.where(step > 0, step, 1))
        ratio = ratio * part + 1 - part
    ratio = jnp.clip(ratio, c.factor_min, c.factor_max)
    return jnp.clip(ratio, last * (1 - c.factor_threshold), last * (1 + c.factor_threshold))


def _rule(c: OptimizerConfig, plan: Plan, specs: Tree, compresses: bool) -> Rule:
    roles = jax.tree.map(role, specs, is_leaf=is_spec)
    each = lambda fn, *trees: jax.tree.map(fn, roles, *trees, is_leaf=_is_role)
    exchange = make_exchange(plan, specs)

    def directions(m: Tree, v: Tree, params: Tree) -> tuple[Tree, Tree]:
        """The step without and with weight decay."""
        bare = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + c.eps), m, v)
        return bare, each(lambda r, d, p: d + c.weight_decay * p if r.matrix and c.weight_decay else d, bare, params)

    def step(params: Tree, towards: Tree, scale: Tree, lr: Array) -> Tree:
        return each(lambda r, p, d, s: p - lr * wide(r, s, p) * d, params, towards, scale)

    def warm_up(g: Gradient, opt: Lamb, params: Tree) -> Updated:
        m, v = mean(c.beta1, opt.m, g.grads), mean(c.beta2, opt.v, squares(g.grads))
        towards = directions(m, v, params)[1]
        scale = each(lambda r, p, d: trust(c, r, p, d), params, towards)
        kept = opt._replace(m=m, v=v)
        if compresses:
            kept = kept._replace(fresh=v, scale=mean(c.coeff_beta, opt.scale, scale))
        return *select(g.finite, (step(params, towards, scale, g.lr), kept), (params, opt)), g.finite, {}

    def onebit(g: Gradient, opt: Lamb, params: Tree) -> Updated:
        live = alive(specs, opt.v)
        own = jax.tree.map(lambda m, g: c.beta1 * m + (1 - c.beta1) * g, opt.m, g.grads)
        m, errors = exchange(own, live, opt.errors)
        gradient = jax.tree.map(lambda new, old: (new - c.beta1 * old) / (1 - c.beta1), m, opt.m)
        fresh = mean(c.beta2, opt.fresh, squares(gradient))
        bare, towards = directions(m, opt.v, params)
        times = each(lambda r, *a: factor(c, r, *a), opt.factor, opt.v, fresh, live, bare, towards)
        scale = jax.tree.map(jnp.multiply, opt.scale, times)
        kept = Lamb(m, opt.v, fresh, opt.scale, times, errors)
        return *select(g.finite, (step(params, towards, scale, g.lr), kept), (params, opt)), g.finite, {}

    phases = {"warm-up": Phase(False, warm_up, step_cost), "one bit": Phase(True, onebit, compressed_cost)}
    one = lambda start: jax.tree.map(lambda s: _number(s, start), specs, is_leaf=is_spec)
    nil = empty(specs)
    state = Lamb(nil, nil, nil, one(0.0), one(1.0), error_specs(plan.layout, nil)) if compresses else Lamb(nil, nil, *[None] * 4)
    return Rule(
        state=state,
        begin=lambda params: zeros(state),
        phases=phases if compresses else {"warm-up": phases["warm-up"]},
        phase=lambda done: "one bit" if compresses and done >= c.freeze_step else "warm-up",
        own=None,
        kinds={"optimizer": state._replace(errors=None), **({"errors": state.errors} if compresses else {})},
    )


def _number(s: Spec, start: float) -> Spec:
    """The Spec of one number for each weight of a parameter."""
    kept = [i for i in range(len(s.shape)) if i not in role(s).own]
    shape, axes = tuple(s.shape[i] for i in kept), tuple(s.axes[i] for i in kept)
    return Spec(shape, axes, ZEROS._replace(mean=start), "float32", shape)


def lamb(c: OptimizerConfig, plan: Plan, specs: Tree, steps: int) -> Rule:
    """LAMB throughout."""
    return _rule(c, plan, specs, False)


def onebit_lamb(c: OptimizerConfig, plan: Plan, specs: Tree, steps: int) -> Rule:
    """LAMB up to step c.freeze_step, then 1-bit LAMB."""
    return _rule(c, plan, specs, True)
