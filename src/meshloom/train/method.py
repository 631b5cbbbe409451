"""Which way of training a run asks for, whether its layout admits it, and what its steps move."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from meshloom.core.layout import Layout
from meshloom.core.spec import is_spec
from meshloom.core.tree import Tree, named_leaves
from meshloom.models.base import Model
from meshloom.models.freeze import frozen_paths
from meshloom.objectives.lm import Objective
from meshloom.parallel.base import Collective, Shapes
from meshloom.plan.cost import step_cost
from meshloom.plan.plan import Plan
from meshloom.train import onebit, step
from meshloom.train import rule as rules
from meshloom.train.adascale import adascale
from meshloom.train.compressed import onebit_adam, zero_one_adam
from meshloom.train.config import OptimizerConfig, OuterConfig, TrainConfig
from meshloom.train.lamb import lamb, onebit_lamb
from meshloom.train.optimizer import OPTIMIZERS, make_optimizer
from meshloom.train.outer import outer as outer_rule
from meshloom.train.replicas import axes, count, placing
from meshloom.train.rule import Rule
from meshloom.train.schedule import Schedule
from meshloom.train.step import State, Step

RULES: dict[str, Callable[[OptimizerConfig, Plan, Tree, int], Rule]] = {
    "lamb": lamb,
    "onebit_adam": onebit_adam,
    "onebit_lamb": onebit_lamb,
    "zero_one_adam": zero_one_adam,
}
"""Optimizer kinds that are more than a direction: kind -> (config, plan, specs, steps of the run) -> Rule."""
COMPRESSED = ("onebit_adam", "onebit_lamb", "zero_one_adam")
"""Those that exchange one bit an element."""


class Method(NamedTuple):
    """What decides how a run trains. steps: of the run, 0 where they are not known yet."""

    optimizer: OptimizerConfig
    outer: OuterConfig
    train: TrainConfig
    steps: int

    @property
    def saves(self) -> str:
        """What needs data replicas, as a setting; empty for what does not."""
        if self.outer.kind != "none":
            return f"outer.kind: {self.outer.kind}"
        if self.optimizer.kind in COMPRESSED:
            return f"optimizer.kind: {self.optimizer.kind}"
        return "optimizer.adascale: true" if self.optimizer.adascale else ""


def check(m: Method, lay: Layout, specs: Tree) -> None:
    """Raises ValueError, in a sentence, where a run cannot be trained like this."""
    kind = m.optimizer.kind
    if m.outer.kind != "none" and kind not in OPTIMIZERS:
        raise ValueError(
            f"outer.kind: {m.outer.kind} runs an optimizer inside every replica, and {kind} is not one that can: it exchanges by itself, or scales by whole "
            f"steps. Use one of {', '.join(OPTIMIZERS)}, or outer.kind: none."
        )
    if m.optimizer.adascale and (m.outer.kind != "none" or kind not in OPTIMIZERS):
        raise ValueError(
            f"optimizer.adascale compares the data shards' gradients at every step, and {kind if m.outer.kind == 'none' else m.outer.kind} does not "
            f"bring them together like that. Leave adascale out, or use outer.kind: none with one of {', '.join(OPTIMIZERS)}."
        )
    if m.saves and lay.devices > 1 and not axes(lay):
        raise ValueError(
            f"{m.saves} works between replicas along mesh axis 'data', and the layout has none ({' '.join(f'{a}={n}' for a, n in lay.sizes.items())}). "
            "Add data=2 or more, such as 'data=2 zero3=4', or leave the setting out."
        )
    told = [name for name, s in named_leaves(specs, is_spec).items() if s.role == "settled"]
    if told and (m.saves or kind in RULES):
        raise ValueError(
            f"{m.saves or f'optimizer.kind: {kind}'} moves parameters by gradients alone, and {told[0]} has none: its layer changes it after every step. "
            "Use a model without such parameters, or leave the setting out."
        )
    if (fixed := frozen_paths(specs)) and (m.saves or kind in RULES):
        raise ValueError(
            f"{m.saves or f'optimizer.kind: {kind}'} keeps something of every parameter's gradient, and train.freeze leaves {fixed[0]} without one. "
            f"Use outer.kind: none and one of {', '.join(OPTIMIZERS)}, or freeze nothing."
        )
    if fixed and lay.square:
        raise ValueError(
            f"A product that passes panel by panel makes its weight's gradient with that of its input, and train.freeze leaves {fixed[0]} without one. "
            "Leave option stream out of the layout, or freeze nothing."
        )
    if kind in COMPRESSED:
        if m.steps and m.optimizer.freeze_step >= m.steps:
            raise ValueError(
                f"optimizer.freeze_step {m.optimizer.freeze_step:,} leaves nothing of a run of {m.steps:,} steps to be compressed. "
                f"Use a freeze_step of about {max(m.steps // 5, 1):,}, or train longer."
            )
        onebit.check(lay, specs, kind)


def facts_of(m: Method, lay: Layout) -> dict[str, Any]:
    """What a resumed run must share with the one that it goes on from: the arrays of its state follow from it. Data replicas count where each has
    a state of its own."""
    apart = m.outer.kind != "none" or m.optimizer.kind in COMPRESSED
    return {
        "optimizer": m.optimizer.kind,
        "outer": m.outer.kind,
        "adascale": m.optimizer.adascale,
        **({"replicas": count(lay)} if apart else {}),
    }


def rule(m: Method, plan: Plan, specs: Tree, schedule: Schedule, per_step: int) -> Rule | None:
    """The rule of a run; None where every step is the plain one."""
    if m.outer.kind != "none":
        return outer_rule(m.optimizer, m.outer, plan, specs, m.steps)
    if m.optimizer.adascale:
        return adascale(m.optimizer, plan, specs, schedule, per_step, m.train.clip)
    made = RULES.get(m.optimizer.kind)
    return made(m.optimizer, plan, specs, m.steps) if made else None


def make_step(m: Method, model: Model, c: Any, plan: Plan, objective: Objective, schedule: Schedule, seed: int, per_step: int) -> Step:
    """The step of a run, whatever it asks for.  Raises ValueError as `check` does."""
    specs = model.specs(c)
    check(m, plan.layout, specs)
    found = rule(m, plan, specs, schedule, per_step)
    if found is None:
        return step.make_step(model, c, plan, objective, m.optimizer, schedule, m.train, seed, per_step)
    return rules.make_step(found, model, c, plan, objective, schedule, m.train, seed, per_step)


def plain(c: OptimizerConfig) -> OptimizerConfig:
    """The optimizer to compare layouts by: what moves between replicas as always, instead of a kind that saves there."""
    if c.kind in OPTIMIZERS:
        return c.model_copy(update={"adascale": False})
    return OptimizerConfig(lr=c.lr, beta1=c.beta1, beta2=c.beta2, eps=c.eps, weight_decay=c.weight_decay)


class Shape(NamedTuple):
    """What a run keeps and moves, from specs alone. state: the Specs of its state. kinds: names of its parts beside the parameters. layout: that places
    them. moves: phase -> (spelling, shapes) -> collectives; one phase without a name where all steps are alike."""

    state: State
    kinds: Mapping[str, Tree]
    layout: Layout
    moves: Mapping[str, Callable[[str, Shapes], tuple[Collective, ...]]]


def shape(m: Method, plan: Plan, specs: Tree) -> Shape:
    """The shape of a run; makes no array."""
    found = rule(m, plan, specs, lambda done: done, 1)
    if found is None:
        state = step.state_of(make_optimizer(m.optimizer, specs), specs, m.train)
        return Shape(state, {"optimizer": state.opt}, plan.layout, {"": step_cost})
    state = rules.state_of(found, specs, m.train)
    return Shape(state, found.kinds, placing(plan.layout), {name: phase.moves for name, phase in found.phases.items()})
