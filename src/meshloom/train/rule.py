"""A rule of training whose steps are not all alike: phases, each a program of its own, chosen by the number of steps done.

A program is compiled for each phase, so that what a phase does not move is not in it, and `plan.hlo` can count what it does.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from meshloom.core.batch import Batch
from meshloom.core.mesh import shardings
from meshloom.core.spec import ZEROS, Spec, init, is_spec
from meshloom.core.tree import Tree
from meshloom.models.base import Model
from meshloom.objectives.lm import Objective
from meshloom.parallel.base import Collective, Shapes
from meshloom.plan.plan import Plan
from meshloom.train.config import TrainConfig
from meshloom.train.gradient import batch_shardings, make_gradient
from meshloom.train.optimizer import clip_factor
from meshloom.train.replicas import each, make_replica_gradient, placing
from meshloom.train.scale import average, init_scale, next_scale
from meshloom.train.schedule import Schedule
from meshloom.train.step import State, Step, drops


class Gradient(NamedTuple):
    """What an update is given. grads: of the whole batch; in a phase that keeps replicas apart [replica, ...], each clipped by its own norm where
    the phase clips. norm: of the whole gradient; apart, the root of the mean square of the replicas' norms. done: int32, steps done with this one.
    lr: of this step. finite: whether the step counts."""

    grads: Tree
    norm: Array
    done: Array
    lr: Array
    finite: Array


Updated = tuple[Tree, Tree, Array | int, dict[str, Array]]
"""Parameters; state of the rule; how many steps the parameters have moved on by (0 where only replicas have moved); more numbers for the log."""


class Phase(NamedTuple):
    """One kind of step. apart: whether every replica's gradient is kept. update: what it does with the gradient, the rule's state and the parameters.
    clips: whether gradients are clipped before it. moves: (spelling of the layout, shapes) -> all that such a step moves."""

    apart: bool
    update: Callable[[Gradient, Tree, Tree], Updated]
    moves: Callable[[str, Shapes], tuple[Collective, ...]]
    clips: bool = True


class Rule(NamedTuple):
    """A way to train. state: the Specs of all that it keeps beside the parameters. begin: parameters -> that state.
    phases: in the order in which they come. phase: steps done -> the phase of the next. own: the parameters of every replica [replica, ...], from
    state and shared parameters; None where all compute with the shared ones. kinds: for a plan, names of parts of the state -> their Specs."""

    state: Tree
    begin: Callable[[Tree], Tree]
    phases: Mapping[str, Phase]
    phase: Callable[[int], str]
    own: Callable[[Tree, Tree], Tree] | None
    kinds: Mapping[str, Tree]


def zeros(specs: Tree) -> Tree:
    """Arrays as their Specs say that they start."""
    return jax.tree.map(lambda s: jnp.full(s.shape, s.init.mean, s.dtype), specs, is_leaf=is_spec)


def empty(specs: Tree) -> Tree:
    """The Specs of arrays like these, zero at first."""
    return jax.tree.map(lambda s: replace(s, init=ZEROS), specs, is_leaf=is_spec)


def number(dtype: str = "float32", start: float = 0.0) -> Spec:
    """The Spec of a single number."""
    return Spec((), (), ZEROS._replace(mean=start), dtype, ())


def make_step(
    rule: Rule, model: Model, c: Any, plan: Plan, objective: Objective, schedule: Schedule, train: TrainConfig, seed: int, per_step: int
) -> Step:
    """The train step of a model under a plan, by a rule.  The other arguments are those of `train.step.make_step`."""
    params, rows = model.specs(c), batch_shardings(plan)
    specs = state_of(rule, params, train)
    where = shardings(plan.mesh, placing(plan.layout), "rest", specs)
    whole = make_gradient(model, c, plan, objective)
    apart = make_replica_gradient(model, c, plan, objective, rule.own is not None)

    def gradient(phase: Phase, state: State, batch: Batch) -> tuple[Tree, dict, Array]:
        key, scale = jax.random.key(seed) if drops(c) else None, state.scale.scale
        if not phase.apart:
            grads, sums, norm = whole(state.params, batch, key, scale)
            factor = clip_factor(norm, train.clip)
            return jax.tree.map(lambda g: g * factor, grads) if phase.clips else grads, sums, norm
        used = rule.own(state.opt, state.params) if rule.own else state.params
        grads, sums, norms, norm = apart(used, batch, key, scale)
        factors = clip_factor(norms, train.clip)
        return jax.tree.map(lambda g: g * each(factors, g), grads) if phase.clips else grads, sums, norm

    def program(phase: Phase) -> Callable:
        def step(state: State, batch: Batch) -> tuple[State, dict[str, Array]]:
            done = state.step + 1
            grads, sums, norm = gradient(phase, state, batch)
            finite, lr = jnp.isfinite(norm), schedule(done * per_step)
            new, opt, passed, more = phase.update(Gradient(grads, norm, done, lr, finite), state.opt, state.params)
            scale = next_scale(train.loss_scale, train.precision, state.scale, finite)
            ema = average(state.ema, new, train.ema**passed) if train.ema else None
            told = {**sums, "norm": norm, "lr": lr, "scale": state.scale.scale, "skipped": scale.skipped, "consecutive": scale.consecutive}
            return State(done, new, opt, ema, scale), {**told, **more}

        return jax.jit(step, donate_argnums=0, in_shardings=(where, rows), out_shardings=(where, scalar))

    def start(given: Tree | None = None) -> State:
        first = init(params, jax.random.key(seed), where.params) if given is None else given
        return jax.jit(lambda p: _first(rule, p, train), out_shardings=where)(first)

    scalar = NamedSharding(plan.mesh, PartitionSpec())
    programs = {name: program(phase) for name, phase in rule.phases.items()}
    return Step(programs[rule.phase(0)], specs, where, rows, start, programs, rule.phase)


def _first(rule: Rule, params: Tree, train: TrainConfig) -> State:
    """The state before the first step."""
    ema = jax.tree.map(jnp.copy, params) if train.ema else None
    return State(jnp.zeros((), jnp.int32), params, rule.begin(params), ema, init_scale(train.loss_scale, train.precision))


def state_of(rule: Rule, params: Tree, train: TrainConfig) -> State:
    """The Spec of every array of the state; makes no array."""
    scale = jax.eval_shape(lambda: init_scale(train.loss_scale, train.precision))
    scale = jax.tree.map(lambda s: number(str(s.dtype)), scale)
    return State(number("int32"), params, rule.state, params if train.ema else None, scale)
