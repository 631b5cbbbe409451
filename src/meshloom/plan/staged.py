"""Layers of any model, put on the present devices as a pipeline of unequal stages: what each layer costs, the assignment, and a step that runs.

A stage is data parallel over its submesh. Its time is that of its layers' products, backward run with the forward again (4 x forward), of the calls of its
programs, of the sum of its gradients over its devices in every micro-batch, and of what it is sent; or its layers' programs are timed on the devices.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshloom.core.tree import Tree
from meshloom.parallel.schedules import Schedule, make
from meshloom.plan.assign import Assigned, Profile, Submesh, Task, assign, submeshes
from meshloom.plan.cut import Layer, joined
from meshloom.plan.equations import count, size_of, traced
from meshloom.plan.hardware import Cluster
from meshloom.runner import stages as runner

CALL = 2e-4
"""Seconds that Python takes to issue one program of a stage and the move of its message, of a stage with some 100 arrays: `python benchmarks/stage_calls.py`
measured 90 us with 40 arrays and 503 us with 400 on simulated CPU devices (docs/schedules.md)."""
AGAIN = 4
"""Work of a stage's F and B, of its forward: B runs the forward again and twice as much."""


class Cost(NamedTuple):
    """Of one layer and one micro-batch. flops: forward. params: bytes of its parameters. sent: bytes of the message that it gets. made: bytes of all that its
    equations make, the most that its backward pass keeps. zero: what its equations did not count (plan/equations.py)."""

    flops: float
    params: int
    sent: int
    made: int
    zero: str


class Staged(NamedTuple):
    """A pipeline that is ready to run: `value_and_grad(stages, schedule, meshes, tied)` of runner/stages.py is its step, params lie where they belong.
    layers: numbers of each stage's first and last layer.  assigned: the assignment, and costs: of each layer, by which it was found."""

    stages: list[runner.Stage]
    schedule: Schedule
    meshes: list[Mesh]
    params: list[Tree]
    tied: tuple[str, ...]
    assigned: Assigned
    costs: tuple[Cost, ...]

    def step(self) -> Any:
        """(parameters of each stage, batch) -> (loss, gradients of each stage)."""
        return runner.value_and_grad(self.stages, self.schedule, self.meshes, self.tied)


def staged(
    layers: Sequence[Layer],
    batch: Mapping[str, Any],
    cluster: Cluster,
    micro: int,
    schedule: str = "1f1b",
    devices: Sequence[Any] | None = None,
    measured: bool = False,
) -> Staged:
    """The layers on stages and submeshes with the shortest step, by plan/assign.py.

    batch: name -> array of a whole step, whose rows are cut into `micro` micro-batches.  cluster: what the devices can do (plan/hardware.py: `present()`);
    its memory bounds each stage.  devices: of this process; by default as many as the cluster has.  measured: time each layer on the devices instead.
    Raises ValueError for no layers, rows that do not divide, and what `assign` refuses."""
    devices = jax.devices()[: cluster.devices] if devices is None else devices
    rows = _rows(batch, micro)
    data = {name: jax.ShapeDtypeStruct((rows, *a.shape[1:]), a.dtype) for name, a in batch.items()}
    costs = tuple(layer_costs(layers, data))
    nodes, each = (cluster.slices, len(devices) // cluster.slices) if len(devices) == cluster.devices else (1, len(devices))
    meshes = submeshes(nodes, each, every=each & (each - 1) != 0)
    table = timed(layers, data, devices, meshes) if measured else estimated(costs, cluster, meshes, _dtype(layers))
    table[:, [bool(rows % mesh.devices) for mesh in meshes]] = np.inf
    task = Task(profile(costs, table, meshes), meshes, nodes, each, cluster.hardware.memory, schedule, micro)
    found = assign(task)
    parts = [joined(layers[part.first : part.last + 1], part.first) for part in found.parts]
    stages = [stage._replace(batch=PartitionSpec("data")) for stage, _ in parts]
    homes = [
        Mesh(np.array(devices[part.device : part.device + part.mesh.devices]), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        for part in found.parts
    ]
    ties = dict.fromkeys(name for layer in layers for name in layer.tied)
    tied = tuple(name for name in ties if sum(name in params for _, params in parts) > 1)
    plan = make(schedule, len(parts), micro)
    params = runner.place(stages, plan, homes, [params for _, params in parts], tied)
    return Staged(stages, plan, homes, params, tied, found, costs)


def layer_costs(layers: Sequence[Layer], data: Mapping[str, Any]) -> list[Cost]:
    """What each layer costs, from its equations.  data: shapes of one micro-batch.  Raises ValueError where a layer does not run with what it is sent."""
    if not layers:
        raise ValueError("There are no layers to put on stages. Give one at least; plan/cut.py makes them of any function.")
    message: Any = ()
    found = []
    shape = lambda tree: jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tree)
    for i, layer in enumerate(layers):
        given = layer.params, message, {name: data[name] for name in layer.takes}
        try:
            closed, out = traced(layer.run, *shape(given)), jax.eval_shape(layer.run, *given)
        except (TypeError, ValueError, KeyError, IndexError, AttributeError) as e:
            raise ValueError(
                f"Layer {i} does not run with what layer {i - 1} sends. Change either; it says: {str(e).strip() or type(e).__name__}"
                if i
                else f"Layer 0 does not run with no message and its data. It says: {str(e).strip() or type(e).__name__}"
            ) from e
        counted = count(closed)
        made = sum(size_of(v) for e in closed.jaxpr.eqns for v in e.outvars)
        found.append(Cost(float(counted.flops.sum()), _bytes(layer.params), _bytes(message), made, counted.said))
        message = out
    return found


def estimated(costs: Sequence[Cost], cluster: Cluster, meshes: Sequence[Submesh], dtype: str) -> np.ndarray:
    """Seconds of each layer on each submesh, [layers, submeshes], but for calls and messages.  dtype: of the products."""
    h = cluster.hardware
    rate = h.flops.get(dtype, min(h.flops.values())) * h.efficiency
    found = np.zeros((len(costs), len(meshes)))
    for m, mesh in enumerate(meshes):
        n, link = mesh.devices, h.inside if mesh.nodes == 1 else h.between
        for i, cost in enumerate(costs):
            found[i, m] = AGAIN * cost.flops / (n * rate)
            found[i, m] += 2 * (n - 1) / n * cost.params / link.rate + (n > 1) * link.latency
    return found


def timed(layers: Sequence[Layer], data: Mapping[str, Any], devices: Sequence[Any], meshes: Sequence[Submesh], runs: int = 3) -> np.ndarray:
    """Seconds of each layer's backward, forward included, on each submesh, [layers, submeshes]: the fastest of some runs, on zeros."""
    rows = next(iter(data.values())).shape[0]
    found = np.full((len(layers), len(meshes)), np.inf)
    zeros = lambda tree: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), tree)
    for m, mesh in enumerate(meshes):
        if rows % mesh.devices:
            continue
        home = Mesh(np.array(devices[: mesh.devices]), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        whole, split = (NamedSharding(home, PartitionSpec(*axes)) for axes in ((), ("data",)))
        message: Any = ()
        for i, layer in enumerate(layers):
            w = jax.device_put(layer.params, whole)
            x, given = jax.device_put((message, zeros({name: data[name] for name in layer.takes})), split)
            run = jax.jit(lambda w, x, given, run=layer.run: _both(run, w, x, given), out_shardings=(whole, None))
            found[i, m] = _fastest(run, (w, x, given), runs)
            message = zeros(jax.eval_shape(layer.run, layer.params, message, given))
    return found


def profile(costs: Sequence[Cost], seconds: np.ndarray, meshes: Sequence[Submesh]) -> Profile:
    """The table of all stages, sums over their layers.  Bytes of a device: parameters, their gradients in fp32 and what a backward pass makes; in flight
    the message."""
    total = lambda a: np.concatenate([np.zeros((1, *a.shape[1:]), a.dtype), np.cumsum(a, 0)])
    run = lambda a: total(a)[None, 1:] - total(a)[:-1, None]
    n = np.array([mesh.devices for mesh in meshes])
    weights, made, sent = (np.array([getattr(c, name) for c in costs], np.int64) for name in ("params", "made", "sent"))
    finite = np.where(np.isfinite(seconds), seconds, 0.0)
    times = run(finite) + 2 * CALL
    times[run(~np.isfinite(seconds) * 1) > 0] = np.inf
    held = 2 * run(weights)[..., None] + -(-run(made)[..., None] // n)
    flight = np.broadcast_to(-(-sent[:, None, None] // n), held.shape)
    return Profile(times, held, flight)


def _both(run: Any, w: Tree, x: Tree, data: Tree) -> tuple[Tree, Tree]:
    """Cotangents of a layer's parameters and message."""
    floats, rest = _split(x)
    y, pull = jax.vjp(lambda w, floats: _split(run(w, rest(floats), data))[0], w, floats)
    return pull(jax.tree.map(jnp.ones_like, y))


def _split(tree: Tree) -> tuple[list, Any]:
    """The leaves that have a gradient, and the function that puts them back."""
    leaves, form = jax.tree.flatten(tree)
    smooth = [jnp.issubdtype(a.dtype, jnp.inexact) for a in leaves]

    def back(floats: list) -> Tree:
        new = iter(floats)
        return jax.tree.unflatten(form, [next(new) if yes else a for a, yes in zip(leaves, smooth)])

    return [a for a, yes in zip(leaves, smooth) if yes], back


def _fastest(run: Any, args: tuple, runs: int) -> float:
    jax.block_until_ready(run(*args))
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        jax.block_until_ready(run(*args))
        times.append(time.perf_counter() - start)
    return min(times)


def _dtype(layers: Sequence[Layer]) -> str:
    """The type of most of the parameters."""
    size: dict[str, int] = {}
    for a in jax.tree.leaves([layer.params for layer in layers]):
        size[np.dtype(a.dtype).name] = size.get(np.dtype(a.dtype).name, 0) + int(np.prod(a.shape))
    return max(size, key=lambda name: size[name], default="float32")


def _bytes(tree: Tree) -> int:
    return sum(int(np.prod(a.shape)) * np.dtype(a.dtype).itemsize for a in jax.tree.leaves(tree))


def _rows(batch: Mapping[str, Any], micro: int) -> int:
    """Rows of a micro-batch."""
    if not batch:
        raise ValueError("The batch is empty: it has no arrays to cut into micro-batches. Give name -> array, rows first.")
    for name, a in batch.items():
        if not a.shape or a.shape[0] % micro:
            rows = a.shape[0] if a.shape else 0
            raise ValueError(
                f"'{name}' has {rows} rows, which {micro} micro-batches do not share evenly. Give a multiple of {micro} rows, or other micro-batches."
            )
    return next(iter(batch.values())).shape[0] // micro
