"""Two-dimensional tensor parallelism: the published traffic on matrices alone, whole models against one device and the formula, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from meshloom.core.leaf import dot, live, put
from meshloom.core.mesh import make_mesh, shardings
from meshloom.objectives.lm import lm
from meshloom.parallel.table import build, parse
from meshloom.parallel.tensor2d import layout
from meshloom.plan.cost import shapes, step_cost, wire_bytes
from meshloom.plan.hlo import collectives
from meshloom.plan.plan import Plan
from meshloom.runner.run import How
from meshloom.train.gradient import batch_shardings, make_gradient
from programs import QUICK, SEQ, config, equals_one_device, gradient, rows, same, weights

CASES = [
    # model, layout, micro-batches, runner, remat: GQA with two key heads, biases, q/k norms, odd vocabulary, packed rows
    ("llama", "tensor2d=2x2", 1, "scan", "none"),
    ("llama", "tensor2d=2x4", 2, "unroll", "selective"),
    ("llama_untied", "zero1=2 tensor2d=2x2", 2, "scan", "full"),
    ("llama_plain", "zero2=2 tensor2d=2x2", 2, "unroll", "full"),
    ("gpt2", "tensor2d=4x2", 1, "unroll", "none"),
    ("gpt2", "data=2 tensor2d=2x2", 2, "scan", "selective"),
    ("neox", "tensor2d=2x2", 2, "scan", "full"),
    ("neox", "zero3=2 tensor2d=2x2", 1, "scan", "none"),
    ("llama", "tensor2d=2x2:stream", 2, "scan", "selective"),
    ("gpt2", "tensor2d=2x2:stream", 1, "unroll", "full"),
    ("neox", "data=2 tensor2d=2x2:stream", 1, "scan", "full"),
    ("llama_untied", "zero1=2 tensor2d=2x2:stream", 1, "unroll", "none"),
    ("llama", "zero3=2 tensor2d=2x2:stream", 2, "scan", "none"),
]


@pytest.mark.parametrize("name, spelling, micro, runner, remat", CASES)
def test_layout_equals_one_device(name, spelling, micro, runner, remat) -> None:
    equals_one_device(name, spelling, micro, runner, remat)


def test_dropout_is_equal_to_one_device() -> None:
    more = (("dropout", 0.5), ("attention_dropout", 0.3))
    same(gradient("gpt2", "tensor2d=2x2", 1, more=more), gradient("gpt2", "", 1, more=more))


def received(lay, fn, specs, out, *arrays) -> tuple[float, list]:
    """Numbers that a device receives in a product and its backward pass; the result and both gradients."""
    mesh = make_mesh(lay)
    split = jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=out)

    def both(g, *args):
        y, back = jax.vjp(split, *args)
        return y, *back(g)

    program = jax.jit(both).lower(*arrays).compile(compiler_options=QUICK)
    return sum(wire_bytes(c, lay) / 4 for c in collectives(program.as_text(), lay.sizes)), program(*arrays)


def operands(m, k, n):
    """y's cotangent, x, w; and the product and gradients by NumPy."""
    rng = np.random.default_rng(0)
    g, x, w = (rng.standard_normal(s, np.float32) for s in ((4, m // 4, n), (4, m // 4, k), (k, n)))
    flat = x.reshape(m, k), g.reshape(m, n)
    return (g, x, w), (x @ w, (g @ w.T), flat[0].T @ flat[1])


def into(lay):
    """A layer's first product: what enters is gathered over columns."""
    return lambda x, w: dot(lay, "bTd,df->BTf", put(lay, "btd->bTd", x), live(lay, ("embed", "ffn"), w, None, x))


def out_of(lay):
    """A layer's second product: what leaves is scattered over columns."""
    return lambda x, w: dot(lay, "BTf,fd->btd", x, live(lay, ("ffn", "embed"), w, None, x))


@pytest.mark.parametrize("down, cols", [(2, 2), (2, 4)])
def test_one_product_moves_what_is_published(down, cols) -> None:
    m, k, n = 32, 48, 64
    lay, devices = layout(down, cols), down * cols
    arrays, want = operands(m, k, n)
    acts = P("rows", None, "cols")
    moved, got = received(lay, into(lay), (acts, P("rows", "cols")), acts, *arrays)
    # Xu et al., table 1, with the operands kept: q = rows = cols gives 2 (q-1) (MK + KN) / q^2
    assert moved == 2 * ((cols - 1) * m * k + (down - 1) * k * n) / devices
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_the_second_product_of_a_layer_moves_its_narrow_side() -> None:
    m, k, n, q = 32, 192, 48, 2
    lay = layout(q, q)
    arrays, want = operands(m, k, n)
    acts = P("rows", None, "cols")
    moved, got = received(lay, out_of(lay), (acts, P("cols", "rows")), acts, *arrays)
    assert moved == 2 * (q - 1) * (m * n + k * n) / q**2 < 2 * (q - 1) * (m * k + k * n) / q**2
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_norms_and_biases_are_added_once_a_step() -> None:
    model, c = config("gpt2")
    lay = build("tensor2d=2x2", c, 16)
    sums = {
        m: [x for x in step_cost("tensor2d=2x2", shapes(model, c, lay, 16, 8, m, How(), "float32")) if "once a step" in x.why]
        for m in (1, 4)
    }
    assert sums[1] == sums[4]
    # positions; two norms of 2, o and down biases in 2 layers; the last norm of 2: half of embed over rows, summed over columns
    assert [(x.bytes, x.axes) for x in sums[1] if x.axes == ("cols",)] == [(4 * 16 * (64 + 2 * 6 + 2), ("cols",))]


def test_bf16_moves_half() -> None:
    model, c = config("llama_plain")
    lay = build("tensor2d=2x2", c, 16)
    size = lambda dtype: sum(
        x.bytes for x in step_cost("tensor2d=2x2", shapes(model, c, lay, 16, 8, 1, How(), dtype)) if x.kind == "all-gather"
    )
    assert size("float32") == 2 * size("bfloat16")


def test_bf16_is_near_one_device() -> None:
    losses = [program_loss(spelling) for spelling in ("", "tensor2d=2x2")]
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)


def program_loss(spelling: str) -> float:
    """The loss of a small model in bf16."""
    model, c = config("llama")
    lay = build(spelling, c, SEQ)
    plan = Plan(make_mesh(lay), lay, How(), 1, "bfloat16")
    batch = jax.tree.map(jax.device_put, rows(8, 1), batch_shardings(plan))
    params = jax.tree.map(jax.device_put, weights("llama"), shardings(plan.mesh, lay, "rest", model.specs(c)))
    program = jax.jit(make_gradient(model, c, plan, lm())).lower(params, batch, None, jnp.float32(1)).compile(compiler_options=QUICK)
    _, sums, _ = program(params, batch, None, jnp.float32(1))
    return float(sums["loss"] / sums["tokens"])


@pytest.mark.parametrize(
    "sizes, spelling, said",
    [
        ({}, "tensor2d=8", "tensor2d=8 is not a square number of devices. Write rows x columns, such as tensor2d=2x4"),
        ({}, "tensor2d=2x2x2", "gives 3 sizes, and 'tensor2d' has 2 mesh axes"),
        ({}, "tensor2d=1x4", "tensor2d=1x4 splits one way only. Write tensor=4"),
        ({}, "tensor2d=4x1", "splits one way only. Write zero3=4"),
        (
            {},
            "tensor2d=2x4:stream",
            "Streamed products need as many rows as columns, and 2x4 is not a square. Use 4x4, or leave out ':stream'",
        ),
        ({}, "tensor2d=2x2:", "'tensor2d=2x2:' in layout 'tensor2d=2x2:' gives an option twice, or none behind its colon or comma"),
        ({}, "zero3=2:qw8,qw8", "gives an option twice"),
        ({}, "tensor2d=2x2:steam", "'steam' in layout 'tensor2d=2x2:steam' is not an option of 'tensor2d'. Did you mean 'stream'"),
        ({}, "tensor2d=2x2 tensor=2", "asks for tensor2d and tensor, which all split the matrices. Choose one"),
        (
            dict(embed=36, heads=4),
            "tensor2d=8x2",
            "embed 36 cannot be split over the 8 rows of tensor2d. Use a number of them that divides it: 1, 2, 3",
        ),
        (dict(embed=30, heads=8, head=4), "tensor2d=2x4", "embed 30 cannot be split over the 4 columns of tensor2d"),
        (dict(heads=6, head=4), "tensor2d=2x4", "heads 6 cannot be split over the 4 columns of tensor2d. .* 1, 2, 3, 6"),
        (dict(ffn=50), "tensor2d=2x4", "ffn 50 cannot be split over the 4 columns"),
        (dict(vocab_multiple=1), "tensor2d=2x2", "padded vocabulary rows 257 cannot be split over the 2 columns"),
    ],
)
def test_refuses(sizes, spelling, said) -> None:
    _, c = config("gpt2", **sizes)
    with pytest.raises(ValueError, match=said):
        build(spelling, c, 16)


def test_experts_are_refused_where_tokens_are_not_whole_and_run_where_they_are() -> None:
    _, c = config("moe")
    for spelling, said in (
        ("tensor2d=2x2:stream", "Streamed products"),
        ("tensor25d=2x2x2:stream", "Streamed products"),
        ("tensor3d=8", "Layers split by a cube"),
    ):
        with pytest.raises(
            ValueError, match=said + ".* have no form for the 8 experts of this model: a router needs whole tokens. Use tensor or tensor2d"
        ):
            build(spelling, c, 16)
    got = gradient("moe", "tensor2d=2x2", 1)
    same(got, gradient("moe", "", 1))
    assert [line for line in got.lines if not line.equal] == []


def test_refuses_rows_that_do_not_divide() -> None:
    model, c = config("gpt2")
    with pytest.raises(
        ValueError, match=r"A batch of 6 sequences cannot be cut into 1 micro-batches over 4 devices \(rows=4\). .* multiple of 4"
    ):
        shapes(model, c, build("tensor2d=4x2", c, 16), 16, 6, 1, How(), "float32")


def test_a_square_has_a_short_spelling() -> None:
    assert parse("tensor2d=4") == parse("tensor2d=2x2")
