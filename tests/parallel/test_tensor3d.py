"""Three-dimensional tensor parallelism: the published traffic on products alone and on a whole block, models against one device, refusals."""

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from meshloom.core.leaf import dot, live, put
from meshloom.parallel.table import build, parse
from meshloom.parallel.tensor3d import I, J, L, layout
from meshloom.plan.cost import shapes, step_cost, wire_bytes
from meshloom.runner.run import How
from parallel.test_tensor2d import operands, received
from programs import config, equals_one_device, gradient, same

CASES = [
    # model, micro-batches, runner, remat: GQA, biases, q/k norms, odd vocabulary, packed rows, other rows on every device of a side
    ("llama", 1, "scan", "none"),
    ("llama_untied", 2, "unroll", "selective"),
    ("gpt2", 2, "unroll", "full"),
    ("gpt2", 1, "scan", "selective"),
    ("neox", 1, "scan", "full"),
    ("neox", 2, "unroll", "none"),
]


@pytest.mark.parametrize("name, micro, runner, remat", CASES)
def test_layout_equals_one_device(name, micro, runner, remat) -> None:
    equals_one_device(name, "tensor3d=8", micro, runner, remat)


def test_dropout_is_equal_to_one_device() -> None:
    more = (("dropout", 0.5), ("attention_dropout", 0.3))
    same(gradient("gpt2", "tensor3d=2x2x2", 1, more=more), gradient("gpt2", "", 1, more=more))


OUTSIDE, INSIDE = P(I, L, J), P((I, J), None, L)
PRODUCTS = {
    "into": (lambda lay, x, w: dot(lay, "bTd,df->BTf", put(lay, "btd->bTd", x), live(lay, ("embed", "ffn"), w, None, x)), OUTSIDE, INSIDE),
    "out of": (lambda lay, x, w: dot(lay, "BTf,fd->btd", x, live(lay, ("ffn", "embed"), w, None, x)), INSIDE, OUTSIDE),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_one_product_moves_what_is_published(name) -> None:
    m, k, n, q = 32, 48, 64, 2
    product, before, after = PRODUCTS[name]
    lay = layout(q, q, q)
    arrays, want = operands(m, k, n)
    weight = P((J, I), L) if name == "into" else P(L, (J, I))
    moved, got = received(lay, lambda x, w: product(lay, x, w), (before, weight), after, *arrays)
    # Bian et al., and the same for the second product, whose groups have changed places
    assert moved == 2 * (q - 1) * (m * k + k * n + m * n) / q**3 == 1664
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_a_block_moves_what_is_published() -> None:
    """The layers of a model whose weights are kept (a CPU's unrolled loop), by subtracting those of a model with fewer layers."""
    q, d, f = 2, 32, 48

    def sent(layers: int) -> float:
        model, c = config("llama_plain", head=4, layers=layers)
        cost = step_cost("tensor3d=8", shapes(model, c, (lay := build("tensor3d=8", c, 16)), 16, 8, 1, How("unroll"), "float32"))
        return sum(wire_bytes(x, lay) / 4 for x in cost if "norm" not in x.why)

    m = 8 * 16
    linear = lambda k, n: 2 * (q - 1) * (m * k + k * n + m * n) / q**3
    gains = 2 * 2 * (q - 1) * (d // q) / q  # two vectors, gathered and scattered along a side
    small = 2 * 2 * (q - 1) / q * d / q**2  # their sums over the tokens of another side, once a step
    # query, key and value read one input, and so do up and gate: each as one product
    assert sent(3) - sent(2) == linear(d, 3 * d) + linear(d, d) + linear(d, 2 * f) + linear(f, d) + gains + small


def test_the_sums_for_the_log_are_of_rows_inside_a_layer() -> None:
    model, c = config("gpt2")
    cost = step_cost("tensor3d=8", shapes(model, c, build("tensor3d=8", c, 16), 16, 8, 1, How(), "float32"))
    assert [(x.axes, x.count) for x in cost if x.why == "sums for the log"] == [((I,), 1), ((I, J), 3)]


@pytest.mark.parametrize(
    "sizes, seq, spelling, said",
    [
        (
            {},
            16,
            "tensor3d=4",
            "tensor3d=4 is not a cube of devices. Use 8, 27 or 64 of them, or write three sizes, such as tensor3d=2x2x4",
        ),
        ({}, 16, "tensor3d=1x2x2", "tensor3d=1x2x2 has a side of one device. Write tensor2d"),
        (
            dict(embed=38, heads=2),
            16,
            "tensor3d=8",
            "embed 38 cannot be split over the 2 x 2 devices of 'cube_rows' and 'cube_embed' of tensor3d",
        ),
        (
            dict(heads=5, head=4),
            16,
            "tensor3d=8",
            "heads 5 cannot be split over the 2 devices of 'cube_heads' of tensor3d. .* divides it: 1, 5",
        ),
        (dict(ffn=49), 16, "tensor3d=8", "ffn 49 cannot be split"),
        (dict(vocab_multiple=1), 16, "tensor3d=8", "padded vocabulary rows 257 cannot be split"),
        (
            {},
            15,
            "tensor3d=8",
            "A sequence of 15 tokens cannot be split over the 2 devices of 'cube_heads' of tensor3d. Use data.seq that is a multiple of 2",
        ),
        ({}, 16, "tensor3d=8 tensor=2", "asks for tensor3d and tensor, which all split the matrices"),
    ],
)
def test_refuses(sizes, seq, spelling, said) -> None:
    _, c = config("gpt2", **sizes)
    with pytest.raises(ValueError, match=said):
        build(spelling, c, seq)


def test_refuses_rows_that_do_not_divide() -> None:
    model, c = config("gpt2")
    with pytest.raises(ValueError, match=r"A batch of 6 sequences .* over 4 devices \(cube_rows=2 x cube_embed=2\). Use .* multiple of 4"):
        shapes(model, c, build("tensor3d=8", c, 16), 16, 6, 1, How(), "float32")


def test_a_cube_has_a_short_spelling() -> None:
    assert parse("tensor3d=8") == parse("tensor3d=2x2x2")
