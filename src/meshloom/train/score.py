"""Scoring without training: sums over a held-out set that no batch size and no layout changes."""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from meshloom.core.batch import Batch
from meshloom.core.compress import exact
from meshloom.core.mesh import partitions, shardings
from meshloom.core.tree import Tree
from meshloom.models.base import Model
from meshloom.objectives.lm import Bound, evaluate, lm
from meshloom.plan.plan import Plan
from meshloom.runner.gather import gather_step
from meshloom.runner.stage import placed
from meshloom.train.gradient import batch_partition, batch_shardings, over_devices


class Score(NamedTuple):
    """nll: summed negative log-likelihood, nats. tokens: scored. correct: whose target was the likeliest."""

    nll: float
    tokens: float
    correct: float

    @property
    def loss(self) -> float:
        """Nats a token."""
        return self.nll / self.tokens if self.tokens else math.nan

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def accuracy(self) -> float:
        """Part of the targets that were the likeliest token."""
        return self.correct / self.tokens if self.tokens else math.nan


def make_score(model: Model, c: Any, plan: Plan) -> Callable[[Tree, Batch], dict[str, jax.Array]]:
    """(params in the `rest` table, batch [1, batch, seq]) -> the objective's sums over the whole batch. No option of a layout rounds anything here."""
    plan = plan._replace(layout=exact(plan.layout))
    bound, specs, lay, objective = Bound(model, c, plan.layout, plan.how), model.specs(c), plan.layout, lm()
    where = placed(model, c, lay)

    def local(params: Tree, batch: Batch) -> dict[str, jax.Array]:
        w, whole = gather_step(lay, specs, params, plan.dtype, where)
        _, sums = evaluate(bound, objective, w, whole, jax.tree.map(lambda a: a[0], batch), None)
        return jax.tree.map(lambda a: over_devices(lay, a), sums)

    if lay.devices == 1:
        return jax.jit(local)
    mapped = jax.shard_map(
        local, mesh=plan.mesh, in_specs=(partitions(lay, "rest", specs), batch_partition(plan)), out_specs=PartitionSpec()
    )
    return jax.jit(mapped, in_shardings=(shardings(plan.mesh, lay, "rest", specs), batch_shardings(plan)))


def score(program: Callable[[Tree, Batch], dict[str, jax.Array]], params: Tree, batches: Iterable[Batch]) -> Score:
    """The sums over all batches, added on the host in double precision. The device is asked once a batch, one batch behind."""
    total, waiting = Score(0.0, 0.0, 0.0), None
    for batch in batches:
        sums = program(params, batch)
        total, waiting = _add(total, waiting), sums
    return _add(total, waiting)


def _add(total: Score, sums: dict[str, jax.Array] | None) -> Score:
    """The total with one batch's sums."""
    if sums is None:
        return total
    return Score(total.nll + float(sums["loss"]), total.tokens + float(sums["tokens"]), total.correct + float(sums["correct"]))
