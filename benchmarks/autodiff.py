"""GPipe as automatic differentiation makes it: the gradient of a pipelined forward pass, for comparison with `runner/pipeline.py`.

All it needs is one loop over ticks. What a part computes is computed again on the way back (`jax.checkpoint`), so that a tick keeps its input alone; the
head runs in the tick in which a micro-batch leaves, so that no outputs are kept. It cannot do a backward before the last forward: it keeps an input of
every tick.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from meshloom.core.leaf import sum_over
from meshloom.core.mesh import partitions
from meshloom.core.spec import is_spec
from meshloom.objectives.lm import Bound
from meshloom.parallel.slots import forward_only
from meshloom.plan.plan import Plan
from meshloom.runner import pipeline
from meshloom.runner.gather import gather_step, outside
from meshloom.runner.place import from_stages
from meshloom.runner.stage import Part, blank, get, put, stage_of
from meshloom.train.gradient import batch_partition, global_norm, over_devices, reduce_leaf


def make_gradient(model: Any, c: Any, plan: Plan, objective: Any) -> Any:
    """What `meshloom.train.gradient.make_gradient` makes, for a layout with a pipeline: (params, batch, key, scale) -> gradients, sums, norm."""
    lay, specs = plan.layout, model.specs(c)
    stage, bound = stage_of(model, c, lay, plan.how), Bound(model, c, lay, plan.how)
    assert stage is not None

    def local(params: Any, batch: Any, key: Any, scale: Any) -> tuple[Any, Any, Any]:
        w, whole = gather_step(lay, specs, params, plan.dtype, stage.place)
        share = scale / jnp.maximum(sum_over(jnp.sum(batch.weights), lay.tokens), 1)
        head = lambda live, x, rows: objective(bound, live, x, rows)
        grads, sums = jax.grad(lambda w: loss(Part(stage, w, whole, batch, key), plan.micro, head, share), has_aux=True)(w)
        grads = jax.tree.map(lambda s, g: reduce_leaf(lay, s, g.astype(jnp.float32)) / scale, specs, grads, is_leaf=is_spec)
        grads = from_stages(lay, stage.place, specs, grads)
        return grads, {name: over_devices(lay, a) for name, a in sums.items()}, global_norm(grads)

    rest, none = partitions(lay, "rest", specs), PartitionSpec()
    return jax.shard_map(local, mesh=plan.mesh, in_specs=(rest, batch_partition(plan), none, none), out_specs=(rest, none, none))


def loss(part: Part, micro: int, head: Any, share: Any) -> tuple[Any, Any]:
    """The sum to differentiate over all micro-batches, and the sums for the log.  Not for layers that add to the loss."""
    s = part.s
    table = forward_only(s.layout.stages, micro, s.place.layers.shape[1])
    rows, often = pipeline._cut(table, 0, table.schedule.ticks)

    def leave(y: Any, m: Any) -> tuple[Any, Any]:
        total, sums = part.leave(outside(part.w), part.share(y, s.layout.stages - 1), m, head)
        return total * share, lax.stop_gradient(sums)

    def work(arrived: Any, r: Any) -> Any:
        m, v = r["forward"], r["forward_chunk"]
        x = part.first(arrived[None], part.entered(r, often["enter"]), {**r, "forward_from": jnp.int32(0)})
        y, _ = part.part(part.layers(v), x, m, v)
        return y, *often["leave"].run(lambda m: leave(y, m), r["leave"])

    def tick(c: Any, row: Any) -> Any:
        inbox, total, sums = c
        r = {name: a if name in pipeline.SHARED else a[part.stage] for name, a in row.items()}
        y, more, new = jax.checkpoint(work, prevent_cse=False)(get(inbox, r["forward_from"]), r)
        inbox = put(inbox, r["arrive_x"], part.send(y, 1))
        return (inbox, total + more, jax.tree.map(jnp.add, sums, new)), None

    x, any_row = pipeline._arrives(part), dict.fromkeys(rows, part.stage) | dict.fromkeys(pipeline.SHARED, jnp.int32(0))
    zero = jax.tree.map(blank, jax.eval_shape(lambda: work(x, any_row))[1:])
    return lax.scan(tick, (jnp.stack([x] * (table.slots["inbox"] + 1)), *zero), rows)[0][1:]
