"""Gradients that stay apart: their mean is the plain gradient, each is that of its own rows, and the traffic is the formula's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import workers
from meshloom.core.layout import Layout
from meshloom.core.mesh import make_mesh, shardings
from meshloom.core.tree import named_leaves
from meshloom.objectives.lm import lm
from meshloom.parallel.table import build
from meshloom.plan.cost import compare, shapes
from meshloom.plan.hlo import collectives
from meshloom.plan.plan import Plan
from meshloom.recipes.verify import QUICK
from meshloom.runner.run import How
from meshloom.train.gradient import batch_shardings
from meshloom.train.replicas import (
    axes,
    count,
    cut,
    gradient_cost,
    inside,
    make_mean,
    make_one,
    make_replica_gradient,
    mean_cost,
    placing,
    spread,
    stacked,
)
from programs import SEQ, config, gradient, rows, weights

CASES = [
    ("llama", "data=4 tensor=2", 1, True),
    ("llama", "data=2 zero3=2 tensor=2 sequence", 2, True),
    ("gpt2", "data=2 zero1=2", 1, False),
    ("llama", "pipe=2 data=2 zero1=2", 2, True),
]


@pytest.mark.parametrize("name, spelling, micro, own", CASES)
def test_replicas_gradients_against_one_device(name, spelling, micro, own):
    """Each replica's gradient is that of its rows alone, over the mean count of tokens; their mean is the gradient of all rows."""
    model, c = config(name)
    lay, how = build(spelling, c, SEQ), How("scan")
    plan, n = Plan(make_mesh(lay), lay, how, micro, "float32"), lay.sizes["data"]
    specs, w = model.specs(c), weights(name)
    batch = rows(8, micro)
    placed = jax.tree.map(jax.device_put, batch, batch_shardings(plan))
    where = shardings(plan.mesh, placing(lay), "rest", stacked(specs, n) if own else specs)
    params = jax.tree.map(jax.device_put, spread(w, n) if own else w, where)
    args = params, placed, None, jnp.float32(1)
    program = jax.jit(make_replica_gradient(model, c, plan, lm(1e-3), own)).lower(*args).compile(compiler_options=QUICK)
    grads, sums, norms, norm = program(*args)
    host, one = {p: np.asarray(a) for p, a in named_leaves(grads).items()}, gradient(name, "", 1)
    top = max(np.abs(a).max() for a in one.grads.values())
    for path, want in one.grads.items():
        np.testing.assert_allclose(host[path].mean(0), want, atol=1e-5 * top, err_msg=path)
    assert float(sums["loss"] / sums["tokens"]) == pytest.approx(one.loss, rel=1e-5)
    squares = [sum(np.square(a[i]).sum() for a in host.values()) for i in range(n)]
    assert np.asarray(norms) == pytest.approx(np.sqrt(squares), rel=1e-4) and float(norm) == pytest.approx(
        np.sqrt(np.mean(squares)), rel=1e-4
    )
    lines = compare(
        collectives(program.as_text(), lay.sizes), gradient_cost(spelling, shapes(model, c, lay, SEQ, 8, micro, how, "float32"))
    )
    assert lines and all(line.equal for line in lines), [line for line in lines if not line.equal]
    last = alone(name, batch, micro, lay, n - 1)
    scale = n * last[1] / float(sums["tokens"])
    for path, want in last[0].items():
        np.testing.assert_allclose(host[path][n - 1], want * scale, atol=2e-5 * top, err_msg=path)


def alone(name: str, batch, micro: int, lay: Layout, replica: int) -> tuple[dict[str, np.ndarray], float]:
    """One replica's gradient, divided by its own count of tokens, on one device; and that count."""
    from meshloom.train.gradient import make_gradient

    model, c = config(name)
    share = 8 // micro // lay.sizes["data"]
    own = jax.tree.map(lambda a: a[:, replica * share : (replica + 1) * share], batch)
    plan = Plan(make_mesh(Layout()), Layout(), How("scan"), micro, "float32")
    grads, sums, _ = jax.jit(make_gradient(model, c, plan, lm(1e-3)), compiler_options=QUICK)(weights(name), own, None, jnp.float32(1))
    return {p: np.asarray(a) for p, a in named_leaves(grads).items()}, float(sums["tokens"])


def test_names_of_what_replicas_keep():
    lay = placing(workers.LAYOUTS[4])
    assert axes(lay) == ("data",) and count(lay) == 4 and count(Layout()) == 1
    assert lay.rest["replica"] == ("data",) and lay.rest[cut("ffn")] == ("tensor", "data") and lay.rest[cut("embed")] == ("data",)
    assert inside(workers.LAYOUTS[2]).batch == ("zero3",) and workers.LAYOUTS[2].batch == ("data", "zero3")


@pytest.mark.parametrize("replicas", [2, 4])
def test_the_mean_and_its_norm_and_traffic(replicas):
    p, values = workers.plan(replicas), workers.draw(np.random.default_rng(0), (replicas,))
    where = workers.shardings(p, stacked(workers.specs(), replicas))
    program = jax.jit(make_mean(p, workers.specs(), measured=True), in_shardings=(where,))
    mean, norm = program(workers.tree(values))
    workers.near(workers.host(mean), {n: a.astype(np.float64).mean(0) for n, a in values.items()})
    assert float(norm) == pytest.approx(np.sqrt(sum(np.square(a.mean(0)).sum() for a in values.values())), rel=1e-5)
    bare = jax.jit(make_mean(p, workers.specs()), in_shardings=(where,)).lower(workers.tree(values)).compile(compiler_options=QUICK)
    lines = compare(collectives(bare.as_text(), p.layout.sizes), mean_cost(workers.shapes(p.layout)))
    assert lines and all(line.equal for line in lines)


def test_what_is_the_same_everywhere_is_taken_without_moving():
    p = workers.plan(4)
    like = stacked(workers.specs(), 4)
    same = workers.tree({n: np.broadcast_to(a, (4, *a.shape)) for n, a in workers.draw(np.random.default_rng(0)).items()})
    program = jax.jit(make_one(p, workers.specs()), in_shardings=(workers.shardings(p, like),)).lower(same).compile(compiler_options=QUICK)
    assert not collectives(program.as_text(), p.layout.sizes)
    workers.near(workers.host(program(jax.device_put(same, workers.shardings(p, like)))), workers.draw(np.random.default_rng(0)), 1e-9)
