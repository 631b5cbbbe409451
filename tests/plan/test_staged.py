"""Layers put on stages of unequal size: the assignment found is the best of its table, and the step equals one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshloom.plan.assign import Submesh
from meshloom.plan.cut import Layer, cut, whole
from meshloom.plan.hardware import Cluster, Hardware, Link
from meshloom.plan.staged import CALL, Cost, estimated, layer_costs, profile, staged, timed

SLOW = Link(2e7, 0.0)
CHIP = Hardware("chip", "cpu", 2**30, 1e12, {"float32": 1e8}, 0.5, 8, SLOW, SLOW, 0, ())
CLUSTER = Cluster(CHIP, (1, 4))
"""Four devices so slow that what is issued costs little beside them, with links that make sums of gradients dear."""
ROWS, MICRO = 16, 4


def model(w, data):
    """Six wide layers and a head that is as heavy as they are together, tied with what reads the data."""
    x = data["x"] @ w["edge"]
    for one in w["layers"]:
        x = x + jnp.tanh(x @ one)
    return ((jnp.tanh(x @ w["head"]) @ w["head"].T) @ w["edge"].T - data["y"]).__pow__(2).sum()


@pytest.fixture(scope="module")
def case():
    rng = np.random.default_rng(0)
    of = lambda *shape: (rng.normal(size=shape) * shape[0] ** -0.5).astype(np.float32)
    params = {"edge": of(6, 64), "layers": [of(64, 64) for _ in range(6)], "head": of(64, 192)}
    batch = {"x": of(ROWS, 6), "y": of(ROWS, 6)}
    rows = {name: a[: ROWS // MICRO] for name, a in batch.items()}
    return params, batch, cut(model, params, rows, 6, epsilon=0.5)


def test_the_step_equals_one_device(case) -> None:
    params, batch, layers = case
    found = staged(layers, batch, CLUSTER, MICRO)
    assert [mesh.size for mesh in found.meshes] == [1, 2, 1] and found.tied == ("edge", "head")
    want, slopes = jax.value_and_grad(model)(params, batch)
    loss, grads = found.step()(found.params, batch)
    assert float(loss) == pytest.approx(float(want), rel=1e-5)
    flat = {
        name: g for stage in grads for key, tree in stage.items() for name, g in (tree.items() if isinstance(tree, dict) else [(key, tree)])
    }
    want = {"edge": slopes["edge"], "head": slopes["head"], **{f"layers.{i}": g for i, g in enumerate(slopes["layers"])}}
    assert set(flat) == set(want)
    for name, g in want.items():
        assert np.abs(flat[name] - g).max() <= 1e-5 * np.abs(g).max()


def test_work_is_shared_as_the_costs_say(case) -> None:
    """Two devices: the cut is the most even one of all."""
    _, batch, layers = case
    found = staged(layers, batch, CLUSTER._replace(shape=(1, 2)), MICRO)
    flops = [cost.flops for cost in found.costs]
    both = [max(sum(flops[:i]), sum(flops[i:])) for i in range(1, len(flops))]
    assert len(found.stages) == 2 and found.assigned.parts[0].last == int(np.argmin(both))


def test_rows_that_devices_cannot_share_keep_a_stage_small(case) -> None:
    params, batch, _ = case
    odd = {name: a[:12] for name, a in batch.items()}  # 3 rows a micro-batch: one or three devices
    layers = cut(model, params, {name: a[:3] for name, a in odd.items()}, 4, epsilon=2.0)
    found = staged(layers, odd, CLUSTER, MICRO)
    assert len(found.stages) == 4 and all(mesh.size == 1 for mesh in found.meshes)


def test_costs_of_a_layer_by_hand(case) -> None:
    _, batch, layers = case
    costs = layer_costs(layers, {name: a[:4] for name, a in batch.items()})
    assert sum(cost.flops for cost in costs) == pytest.approx(2 * 4 * 64 * (6 + 6 * 64 + 2 * 192 + 6), rel=0.1), (
        "products, and a little beside"
    )
    assert costs[0].sent == 0 and all(cost.sent == 4 * 64 * 4 for cost in costs[1:3]), "one activation goes from layer to layer"
    table = estimated(costs, CLUSTER, (Submesh(1, 1), Submesh(1, 4)), "float32")
    assert table[0] == pytest.approx([4 * costs[0].flops / 5e7, costs[0].flops / 5e7 + 1.5 * costs[0].params / 2e7])
    cost = profile([Cost(1, 10, 3, 7, "")] * 3, np.ones((3, 2)), (Submesh(1, 1), Submesh(1, 4)))
    assert (
        cost.seconds[0, 2] == pytest.approx(3 + 2 * CALL)
        and list(cost.held[0, 2]) == [2 * 30 + 21, 2 * 30 + 6]
        and list(cost.flight[1, 2]) == [3, 1]
    )


def test_layers_are_timed_on_the_devices(case) -> None:
    _, batch, layers = case
    data = {name: jax.ShapeDtypeStruct((4, *a.shape[1:]), a.dtype) for name, a in batch.items()}
    table = timed(layers[:2], data, jax.devices()[:4], (Submesh(1, 1), Submesh(1, 3)), runs=1)
    assert table.shape == (2, 2) and (table[:, 0] > 0).all() and np.isinf(table[:, 1]).all(), "three devices cannot share four rows"


def step(w, x, data):
    return data["x"] @ w if isinstance(x, tuple) else (x @ w).sum()


LAYERS = [Layer(step, ("x",), np.ones((6, 6), np.float32)), Layer(step, (), np.ones((6, 6), np.float32))]
DATA = {"x": np.ones((8, 6), np.float32)}


def test_layers_of_ones_own() -> None:
    found = staged(LAYERS, DATA, CLUSTER, 2)
    loss, _ = found.step()(found.params, DATA)
    assert float(loss) == pytest.approx(float(whole(LAYERS)([layer.params for layer in LAYERS], DATA)))


@pytest.mark.parametrize(
    "layers, data, cluster, said",
    [
        ([], DATA, CLUSTER, "There are no layers to put on stages"),
        (LAYERS, {}, CLUSTER, "The batch is empty"),
        (LAYERS, {"x": np.ones((7, 6))}, CLUSTER, "'x' has 7 rows, which 2 micro-batches do not share evenly. Give a multiple of 2"),
        ([LAYERS[0], LAYERS[1]._replace(params=np.ones((5, 5)))], DATA, CLUSTER, "Layer 1 does not run with what layer 0 sends"),
        ([LAYERS[0]._replace(params=np.ones((5, 5)))], DATA, CLUSTER, "Layer 0 does not run with no message"),
        (LAYERS, DATA, CLUSTER._replace(hardware=CHIP._replace(memory=100)), "2 layers to 4 devices fits: .* too little"),
    ],
)
def test_refused(layers, data, cluster, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        staged(layers, data, cluster, 2)
