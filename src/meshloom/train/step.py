"""One optimizer step: gradient, clipping, update, average, loss scale. Compiled once; it returns and reports nothing else."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from meshloom.core.batch import Batch
from meshloom.core.mesh import shardings
from meshloom.core.spec import ZEROS, Spec, abstract, init
from meshloom.core.tree import Tree, pytree
from meshloom.models.base import Model
from meshloom.objectives.lm import Objective
from meshloom.plan.plan import Plan
from meshloom.train.config import OptimizerConfig, TrainConfig
from meshloom.train.gradient import batch_shardings, make_gradient
from meshloom.train.optimizer import make_optimizer, state_specs, update
from meshloom.train.scale import Scale, average, init_scale, next_scale, select
from meshloom.train.schedule import Schedule


@pytree
class State:
    """All that a step changes. step: int32, steps done, skipped ones included. ema: the average of the weights, or None."""

    step: jax.Array
    params: Tree
    opt: Tree
    ema: Tree
    scale: Scale


class Step(NamedTuple):
    """A compiled train step and what belongs to it."""

    run: Callable[[State, Batch], tuple[State, dict[str, jax.Array]]]
    """Donates the state. The metrics are sums over the step's scored tokens, and scalars: lr, norm, scale, skipped, consecutive."""
    specs: State
    """The Spec of every array of the state."""
    shardings: State
    batch_shardings: Batch
    start: Callable[[Tree | None], State]
    """The first state: from starting weights, or from given parameters (already placed)."""
    programs: Mapping[str, Callable]
    """Every compiled program by its phase; `run` is the first of them. One where all steps are alike."""
    phase: Callable[[int], str] = lambda done: ""
    """Which program follows so many steps done."""

    def at(self, done: int) -> Callable[[State, Batch], tuple[State, dict[str, jax.Array]]]:
        """The program of the step that follows `done` steps."""
        return self.programs[self.phase(done)]


def make_step(
    model: Model,
    c: Any,
    plan: Plan,
    objective: Objective,
    optimizer: OptimizerConfig,
    schedule: Schedule,
    train: TrainConfig,
    seed: int,
    per_step: int,
) -> Step:
    """The train step of a model under a plan.  schedule: from what is done to the learning rate.  per_step: what one step adds to that (1, or its
    tokens).  seed: of the starting weights and of dropout."""
    params = model.specs(c)
    tx = make_optimizer(optimizer, params)
    gradient = make_gradient(model, c, plan, objective)
    specs = state_of(tx, params, train)
    where = shardings(plan.mesh, plan.layout, "rest", specs)
    rows = batch_shardings(plan)

    def step(state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
        done = state.step + 1
        key = jax.random.key(seed) if drops(c) else None
        grads, sums, norm = gradient(state.params, batch, key, state.scale.scale)
        lr = schedule(done * per_step)
        new, opt, finite = update(tx, grads, norm, state.opt, state.params, lr=lr, clip=train.clip)
        new = select(finite, model.settle(c, new, sums), new)
        scale = next_scale(train.loss_scale, train.precision, state.scale, finite)
        ema = select(finite, average(state.ema, new, train.ema), state.ema) if train.ema else None
        told = {**sums, "norm": norm, "lr": lr, "scale": state.scale.scale, "skipped": scale.skipped, "consecutive": scale.consecutive}
        return State(done, new, opt, ema, scale), told

    def start(given: Tree | None = None) -> State:
        first = init(params, jax.random.key(seed), where.params) if given is None else given
        make = jax.jit(lambda p: _first(tx, p, train), out_shardings=where)
        return make(first)

    scalar = NamedSharding(plan.mesh, PartitionSpec())
    run = jax.jit(step, donate_argnums=0, in_shardings=(where, rows), out_shardings=(where, scalar))
    return Step(run, specs, where, rows, start, {"": run})


def _first(tx: Any, params: Tree, train: TrainConfig) -> State:
    """The state before the first step."""
    ema = jax.tree.map(jnp.copy, params) if train.ema else None
    return State(jnp.zeros((), jnp.int32), params, tx.init(params), ema, init_scale(train.loss_scale, train.precision))


def state_of(tx: Any, params: Tree, train: TrainConfig) -> State:
    """The Spec of every array of the state, from those of the parameters; makes no array.
    Optimizer state and average lie as the parameters do, counters on every device."""
    shapes = jax.eval_shape(lambda p: _first(tx, p, train), abstract(params))
    scalar = lambda s: Spec(s.shape, (), ZEROS, str(s.dtype), ())
    scale = jax.tree.map(scalar, shapes.scale)
    return State(scalar(shapes.step), params, state_specs(tx, params), params if train.ema else None, scale)


def drops(c: Any) -> bool:
    """Whether the model has any dropout."""
    return bool(c.dropout or c.attention_dropout)
