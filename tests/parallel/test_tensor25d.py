"""Tensor parallelism in two and a half dimensions: other data on every depth, the order of sums that moves least, refusals."""

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from meshloom.core.mesh import make_mesh
from meshloom.core.spec import spec
from meshloom.core.vary import vary
from meshloom.parallel.table import build, parse
from meshloom.parallel.tensor25d import layout
from meshloom.plan.cost import shapes, step_cost, wire_bytes
from meshloom.plan.hlo import collectives
from meshloom.runner.run import How
from meshloom.train.gradient import reduce_leaf
from parallel.test_tensor2d import into, operands
from programs import QUICK, config, equals_one_device

CASES = [
    # every depth has other rows: those of programs.rows are all different
    ("llama", "tensor25d=2x2x2", 1, "scan", "none"),
    ("llama_untied", "tensor25d=2x2x2", 2, "unroll", "full"),
    ("gpt2", "tensor25d=2x2x2", 2, "scan", "selective"),
    ("neox", "tensor25d=2x2x2", 1, "scan", "full"),
    ("llama", "tensor25d=2x2x2:stream", 2, "scan", "none"),
]


@pytest.mark.parametrize("name, spelling, micro, runner, remat", CASES)
def test_layout_equals_one_device(name, spelling, micro, runner, remat) -> None:
    equals_one_device(name, spelling, micro, runner, remat)


def product(sums_last: bool):
    """Numbers received by a device in Y = X W and both gradients; and these.  sums_last: the shard of a weight's gradient is summed over depth
    behind the reduce-scatter, as `reduce_leaf` does; else autodiff sums the whole of it before."""
    m, k, n = 32, 48, 64
    lay = layout(2, 2, 2)
    arrays, want = operands(m, k, n)
    s, acts, weight = spec({"embed": k, "ffn": n}, "embed ffn"), P(("depth", "rows"), None, "cols"), P("rows", "cols")

    def local(g, x, w):
        y, back = jax.vjp(into(lay), x, vary(w, ("depth",)) if sums_last else w)
        dx, dw = back(g)
        return y, dx, reduce_leaf(lay, s, dw) if sums_last else dw

    if sums_last:
        fn = jax.shard_map(local, mesh=make_mesh(lay), in_specs=(acts, acts, weight), out_specs=(acts, acts, weight))
    else:

        def plain(x, w):
            x, w = lax.all_gather(x, "cols", axis=2, tiled=True), lax.all_gather(w, "rows", axis=0, tiled=True)
            return x @ w

        split = jax.shard_map(plain, mesh=make_mesh(lay), in_specs=(acts, weight), out_specs=acts)

        def fn(g, x, w):
            y, back = jax.vjp(split, x, w)
            return y, *back(g)

    program = jax.jit(fn).lower(*arrays).compile(compiler_options=QUICK)
    for a, b in zip(program(*arrays), want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    return sum(wire_bytes(c, lay) / 4 for c in collectives(program.as_text(), lay.sizes))


def test_gradients_are_scattered_over_rows_before_they_are_summed_over_depth() -> None:
    m, k, n, q, d = 32, 48, 64, 2, 2
    optimum = 2 * (q - 1) * (m * k / d + k * n) / q**2 + 2 * (d - 1) / d * k * n / q**2
    assert product(sums_last=True) == optimum == 2688
    assert product(sums_last=False) == pytest.approx(1.29 * optimum, rel=5e-3), "plain autodiff has the other order"


def test_the_sum_over_depth_is_of_shards_and_once_a_step() -> None:
    model, c = config("llama_plain", head=8)
    lay = build("tensor25d=2x2x2", c, 16)
    for micro in (1, 2):
        cost = step_cost("tensor25d=2x2x2", shapes(model, c, lay, 16, 8, micro, How(), "float32"))
        (sums,) = (x for x in cost if x.why == "gradients, once a step" and x.axes == ("depth",))
        # a quarter of 4 attention and 3 MLP matrices in each of 2 layers, and of the embedding of 384 rows
        assert (sums.count, sums.bytes) == (8, 4 * (2 * (4 * 32 * 64 + 3 * 32 * 48) + 384 * 32) // 4)


@pytest.mark.parametrize(
    "spelling, said",
    [
        ("tensor25d=4", "tensor25d=4 is not a cube of devices. Write depth x rows x columns, such as tensor25d=2x2x2"),
        ("tensor25d=1x2x2", "tensor25d=1x2x2 has one layer of devices. Write tensor2d=2x2"),
        ("tensor25d=2x1x4", "tensor25d=2x1x4 splits matrices one way only. Write 'data=2 tensor=4'"),
        ("tensor25d=2x4x1", "tensor25d=2x4x1 splits matrices one way only. Write 'data=2 zero3=4'"),
        ("tensor25d=2x2x16", "heads 8 cannot be split over the 16 columns"),
        ("tensor25d=2x2", "gives 2 sizes, and 'tensor25d' has 3 mesh axes"),
    ],
)
def test_refuses(spelling, said) -> None:
    _, c = config("gpt2")
    with pytest.raises(ValueError, match=said):
        build(spelling, c, 16)


def test_refuses_rows_that_do_not_divide() -> None:
    model, c = config("gpt2")
    with pytest.raises(ValueError, match=r"over 4 devices \(depth=2 x rows=2\)"):
        shapes(model, c, build("tensor25d=2x2x2", c, 16), 16, 6, 1, How(), "float32")


def test_a_cube_has_a_short_spelling() -> None:
    assert parse("tensor25d=8") == parse("tensor25d=2x2x2")
