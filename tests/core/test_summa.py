"""Streamed products on a square of four devices: values and gradients against NumPy, numbers received, memory beside the gathered form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from meshloom.core.layout import Layout
from meshloom.core.leaf import dot, dots, live, put
from meshloom.core.mesh import make_mesh
from meshloom.core.summa import Square, streamed
from meshloom.parallel.tensor2d import layout
from meshloom.plan.cost import Found
from meshloom.plan.hlo import collectives
from programs import QUICK

Q = 2
LAY = layout(Q, Q)
STREAM = LAY | Layout(options={"tensor2d": ("stream",)})
GRID = Square("rows", "cols", Q)
ACTS = P("rows", "cols")
WEIGHT = {True: P("rows", "cols"), False: P("cols", "rows")}


def arrays(m, k, n):
    """x, w and the cotangent of their product."""
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal(s, np.float32) for s in ((m, k), (k, n), (m, n)))


def program(into: bool, m: int, k: int, n: int):
    """The product and both gradients, compiled."""
    fn = jax.shard_map(lambda x, w: streamed(GRID, x, (w,), into), mesh=make_mesh(LAY), in_specs=(ACTS, WEIGHT[into]), out_specs=ACTS)

    def both(x, w, g):
        y, back = jax.vjp(fn, x, w)
        return y, *back(g)

    return jax.jit(both).lower(*arrays(m, k, n)).compile(compiler_options=QUICK)


@pytest.mark.parametrize("into", [True, False], ids=["into a layer", "out of it"])
def test_equals_numpy_and_moves_what_is_published(into) -> None:
    m, k, n = 32, 48, 64
    x, w, g = arrays(m, k, n)
    run = program(into, m, k, n)
    for got, want in zip(run(x, w, g), (x @ w, g @ w.T, x.T @ g), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    moved = collectives(run.as_text(), LAY.sizes)
    assert {c.kind for c in moved} == {"collective-permute"}
    # Xu et al., table 1, with the operands of the backward pass broadcast again: 3 (q-1) (MK + KN) / q^2; a second product moves one panel less
    want = 3 * (Q - 1) * (m * k + k * n) if into else (Q - 1) * (2 * m * n + 3 * k * n)
    assert sum(c.bytes / 4 for c in moved) == want / Q**2


def test_several_products_of_one_input_move_it_once() -> None:
    m, k = 32, 48
    x, w, _ = arrays(m, k, 64)

    def fn(lay, x, a, b):
        return tuple(dots(lay, x.reshape(2, -1, x.shape[1]), ("bTd,df->BTf", a), ("bTd,df->BTf", b)))

    out = P("rows", None, "cols")
    split = jax.shard_map(lambda *a: fn(STREAM, *a), mesh=make_mesh(LAY), in_specs=(ACTS, *[WEIGHT[True]] * 2), out_specs=(out, out))
    run = jax.jit(split).lower(x, w, w[:, :16]).compile(compiler_options=QUICK)
    for got, want in zip(run(x, w, w[:, :16]), (x @ w, x @ w[:, :16]), strict=True):
        np.testing.assert_allclose(np.asarray(got).reshape(m, -1), want, rtol=1e-4, atol=1e-4)
    assert received(collectives(run.as_text(), LAY.sizes), "cols") == (Q - 1) * m * k / Q**2


def received(found: list[Found], axis: str) -> float:
    """Numbers that a device receives over a mesh axis."""
    return sum(c.bytes / 4 for c in found if c.axes == (axis,))


def test_no_gathered_input_is_kept() -> None:
    """Four layers of two products: the gathered form keeps the whole width of every layer's input for the backward pass."""
    tokens, embed, ffn, layers = 512, 256, 512, 4

    def temporary(lay) -> int:
        keep = lambda prim, *_, **said: not (prim.name == "all_gather" and "rows" in str(said["axis_name"]))

        def layer(x, w):
            up, down = w
            h = jnp.tanh(dot(lay, "bTd,df->BTf", put(lay, "btd->bTd", x), live(lay, ("embed", "ffn"), up, None, x)))
            return x + dot(lay, "BTf,fd->btd", h, live(lay, ("ffn", "embed"), down, None, x)), None

        kept = jax.checkpoint(layer, prevent_cse=False, policy=keep)

        def local(x, *w):
            return jax.grad(lambda x, w: jnp.sum(lax.scan(kept, x, w)[0] ** 2), (0, 1))(x, w)

        acts, ws = P("rows", None, "cols"), (P(None, "rows", "cols"), P(None, "cols", "rows"))
        fn = jax.shard_map(local, mesh=make_mesh(lay), in_specs=(acts, *ws), out_specs=(acts, ws))
        shapes = ((Q, tokens // Q, embed), (layers, embed, ffn), (layers, ffn, embed))
        given = (jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)
        return jax.jit(fn).lower(*given).compile(compiler_options=QUICK).memory_analysis().temp_size_in_bytes

    block = tokens * embed * 4 // Q**2
    assert temporary(LAY) - temporary(STREAM) >= layers * (Q - 1) * block
