"""A choice applied computes what the plain function computes, for any choice at all, loops and branches included."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from auto.cases import arrays, f32, rates, transformer, words
from meshloom.auto.apply import Runner, layouts, partition
from meshloom.auto.grow import grow
from meshloom.auto.price import specs
from meshloom.auto.program import trace


def run(fn, *args, seed: int = 0):
    """The function under random strategies of every operation on 2 x 4 devices; which kinds of values were split."""
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    leaves, tree = jax.tree.flatten(args)
    program, out_tree, _ = trace(fn, [jax.ShapeDtypeStruct(np.shape(x), x.dtype) for x in leaves], tree)
    r = rates(x=2, y=4)
    ins = program.block.ins
    g = grow(program, r, {v: specs(program.values[v].shape, r.mesh) for v in ins}, {}, set(), dict.fromkeys(ins, ""))
    rng = np.random.default_rng(seed)
    choice = [int(rng.integers(len(n.seconds))) for n in g.nodes]
    return jax.tree.unflatten(out_tree, jax.jit(Runner(program, layouts(g, choice, r.mesh), mesh, ("x", "y")))(*leaves))


def same(fn, *args, seed: int = 0) -> None:
    for got, want in zip(jax.tree.leaves(run(fn, *args, seed=seed)), jax.tree.leaves(jax.jit(fn)(*args))):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-6)


def test_partitions() -> None:
    assert partition((1, -1), 2, ("x", "y")) == PartitionSpec(None, "x")
    assert partition((0, 0), 2, ("x", "y")) == PartitionSpec(("x", "y"), None)


def test_a_transformer_under_any_choice() -> None:
    p, s, t = arrays(words(1, 8, 16, 16, 24))
    same(transformer(), p, jax.tree.map(jnp.abs, s), t)


def test_loops_branches_and_barriers_under_any_choice() -> None:
    def fn(x, w, n):
        inner = jax.checkpoint(lambda c, w: jnp.tanh(c @ w))
        y, z = jax.lax.scan(lambda c, w: (inner(c, w), c), x, w, reverse=True)
        y = jax.lax.while_loop(lambda c: jnp.sum(c * c) > n, lambda c: jnp.tanh(c @ w[0]) * 0.5, y)
        y = jax.lax.cond(n > 0, lambda: y @ w[1], lambda: y)
        return jnp.sum(y * y) + jnp.sum(z), y

    x, w = arrays((f32(8, 16), f32(3, 16, 16)))
    for seed in range(2):
        same(fn, x, w, jnp.float32(1e-4), seed=seed)
        same(jax.grad(lambda w, x: jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, w)[0].sum()), w, x, seed=seed)


def test_tables_under_any_choice() -> None:
    def fn(table, rows, change):
        found = table[rows]
        new = table.at[rows].add(change)
        first, at = jax.lax.top_k(new, 2)
        return found, new, jnp.sort(new, 0), first, at, jnp.cumsum(new, 1), jnp.concatenate([new, table], 1), new.reshape(4, 4, 8)[:, ::2]

    table, change = arrays((f32(16, 8), f32(8, 8)))
    rows = jnp.array([3, 1, 3, 15, 0, 7, 8, 3])
    for seed in range(3):
        same(fn, table, rows, change, seed=seed)


def test_what_has_no_strategies_still_runs() -> None:
    same(lambda x: jnp.linalg.cholesky(x @ x.T + jnp.eye(8)), *arrays((f32(8, 8),)))


def test_images_under_any_choice() -> None:
    def fn(x, w):
        y = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME")
        return jnp.sum(jnp.tanh(y) ** 2)

    for seed in range(2):
        same(jax.grad(fn, (0, 1)), *arrays((f32(8, 8, 4, 4), f32(8, 8, 3, 3))), seed=seed)
