"""A training step for any model and any optax optimizer under a layout.

The loss is one that nobody wrote for a mesh, so here alone the compiler's partitioner decides what moves; the layout's tables are its constraints:
parameters `rest` between steps, `step` from its start, `live` inside the loss; gradients `grad` as they come, `rest` for the optimizer."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from meshloom.named.params import Sharded, batch_sharding, is_array, paths
from meshloom.plan.hlo import collectives, total


class State(NamedTuple):
    """What a step changes. params: the model as it was given. opt: the optimizer's state, each array placed like the parameter it belongs to."""

    params: Any
    opt: Any


class Step(NamedTuple):
    """A jitted step: `state = step.start()`, then `state, loss = step(state, batch)`. The state that went in is used up."""

    loss: Callable
    optimizer: Any
    sharded: Sharded
    run: Callable

    def start(self) -> State:
        """The first state: a copy of the parameters, and the optimizer's start, made where it will lie."""
        mine, _ = _parts(self.sharded.params)
        copies = jax.tree.map(jnp.copy, mine)
        where = opt_shardings(self.sharded, jax.eval_shape(self.optimizer.init, copies))
        return State(_whole(copies, self.sharded.params), jax.jit(self.optimizer.init, out_shardings=where)(copies))

    def __call__(self, state: State, batch: Any) -> tuple[State, jax.Array]:
        """The state after one step, and the loss before it.  Raises ValueError for a batch that the devices do not divide."""
        mine, fixed = _parts(state.params)
        mine, opt, loss = self.run(mine, _arrays(fixed), state.opt, self.place(batch))
        return State(_whole(mine, state.params), opt), loss

    def place(self, batch: Any) -> Any:
        """A batch on the devices, split along its leading axes."""
        return jax.tree.map(lambda x: jax.device_put(x, batch_sharding(self.sharded, x)), batch)

    def moves(self, state: State, batch: Any) -> dict[tuple[str, tuple[str, ...]], tuple[int, int]]:
        """(kind, mesh axes) -> (arrays, bytes) of all that one step moves, counted in the compiled program."""
        mine, fixed = _parts(state.params)
        lowered = self.run.lower(mine, _arrays(fixed), state.opt, self.place(batch))  # type: ignore[attr-defined]
        return total(collectives(lowered.compile().as_text(), self.sharded.layout.sizes))


def make_step(loss: Callable, optimizer: Any, sharded: Sharded) -> Step:
    """The training step of a model that `ml.shard` laid out, equal to the same step under plain `jax.jit`.

    loss: (params, batch) -> a number, of the whole batch, as on one device. optimizer: of optax. Arrays that are not floating stay as they are."""

    def put(tree: Any, table: str) -> Any:
        places = [sharded.sharding(table, path) for path in paths(tree)]
        leaves, shape = jax.tree.flatten(tree)
        return shape.unflatten([jax.lax.with_sharding_constraint(x, where) for x, where in zip(leaves, places)])

    def run(mine, fixed, opt, batch):
        def of(mine):
            return loss(_merged(put(mine, "live"), fixed, sharded.params), batch)

        value, grads = jax.value_and_grad(of)(put(mine, "step"))
        grads = put(put(grads, "grad"), "rest")
        updates, opt = optimizer.update(grads, opt, mine)
        mine = jax.tree.map(lambda p, u: (p + u).astype(p.dtype), mine, updates)
        opt = jax.tree.map(jax.lax.with_sharding_constraint, opt, opt_shardings(sharded, opt))
        return put(mine, "rest"), opt, value

    return Step(loss, optimizer, sharded, jax.jit(run, donate_argnums=(0, 2)))


def opt_shardings(sharded: Sharded, opt: Any) -> Any:
    """Where the arrays of an optimizer's state lie: like the parameter whose path theirs ends with and whose shape they have, else whole."""

    def one(path: str, x: Any) -> NamedSharding:
        for name, s in sharded.specs.items():
            if (path == name or path.endswith("/" + name)) and s.shape == tuple(np.shape(x)):
                return sharded.sharding("rest", name)
        return NamedSharding(sharded.mesh, PartitionSpec())

    leaves, tree = jax.tree.flatten(opt)
    return tree.unflatten([one(path, x) for path, x in zip(paths(opt), leaves)])


def _floating(x: Any) -> bool:
    return is_array(x) and jnp.issubdtype(x.dtype, jnp.inexact)


def _parts(params: Any) -> tuple[Any, Any]:
    """The tree with its floating arrays alone, and with the rest alone; None in place of what is left out."""
    return jax.tree.map(lambda x: x if _floating(x) else None, params), jax.tree.map(lambda x: None if _floating(x) else x, params)


def _arrays(tree: Any) -> Any:
    """The tree with None in place of what is no array."""
    return jax.tree.map(lambda x: x if is_array(x) else None, tree)


def _whole(mine: Any, params: Any) -> Any:
    """A tree with its floating arrays taken from `mine`."""
    new = iter(jax.tree.leaves(mine))
    return jax.tree.map(lambda x: next(new) if _floating(x) else x, params)


def _merged(mine: Any, fixed: Any, params: Any) -> Any:
    """A tree whose floating arrays are those of `mine`, other arrays those of `fixed`, and whatever else that of `params`."""
    new, kept = iter(jax.tree.leaves(mine)), iter(jax.tree.leaves(fixed))
    return jax.tree.map(lambda x: next(new) if _floating(x) else next(kept) if is_array(x) else x, params)
