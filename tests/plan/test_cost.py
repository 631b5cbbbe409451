"""Formulas of a product, and their comparison with a program."""

import pytest

from meshloom.parallel.base import Collective
from meshloom.parallel.table import build
from meshloom.plan.cost import compare, merged, shapes, step_cost, wire_bytes
from meshloom.plan.hlo import Found
from meshloom.runner.run import How
from programs import config


def test_a_product_is_the_sum_of_its_strategies() -> None:
    model, c = config("llama")
    spelling = "data=2 zero3=2 tensor=2 sequence"
    x = shapes(model, c, build(spelling, c, 16), 16, 8, 2, How(), "float32")
    axes = {m.axes for m in step_cost(spelling, x)}
    assert axes == {
        ("data",),
        ("zero3",),
        ("tensor",),
        ("data", "zero3"),
        ("data", "tensor"),
        ("data", "zero3", "tensor"),
        ("zero3", "tensor"),
    }
    assert (x.rows, x.seq, x.micro) == (1, 16, 2)


def test_one_device_moves_nothing() -> None:
    model, c = config("gpt2")
    assert step_cost("", shapes(model, c, build("", c, 16), 16, 8, 1, How(), "float32")) == ()


def test_refuses_a_batch_that_does_not_divide() -> None:
    model, c = config("gpt2")
    with pytest.raises(
        ValueError, match=r"A batch of 6 sequences cannot be cut into 2 micro-batches over 4 devices \(data=4\). Use .* multiple of 8"
    ):
        shapes(model, c, build("data=4", c, 16), 16, 6, 2, How(), "float32")


def test_layers_in_one_piece_of_code() -> None:
    model, c = config("gpt2", layers=3)
    lay = build("zero3=2", c, 16)
    assert (merged(model, c, lay, How("unroll")), merged(model, c, lay, How("scan"))) == ({"": 3}, {"": 0})
    assert merged(model, config("gpt2", layers=1)[1], lay, How("scan")) == {"": 1}


def test_compares_count_and_bytes() -> None:
    found = [
        Found("all-reduce", ("data",), 2, 1, 10, ""),
        Found("all-reduce", ("data",), 1, 1, 5, ""),
        Found("all-gather", ("zero3",), 1, 1, 8, ""),
    ]
    lines = compare(found, [Collective("all-reduce", ("data",), 3, 15, "x"), Collective("reduce-scatter", ("zero3",), 1, 8, "y")])
    assert [(line.kind, line.equal) for line in lines] == [("all-gather", False), ("all-reduce", True), ("reduce-scatter", False)]


def test_ring_bytes() -> None:
    _, c = config("gpt2")
    lay = build("data=4", c, 16)
    assert wire_bytes(Collective("all-gather", ("data",), 1, 400, ""), lay) == 300
    assert wire_bytes(Collective("all-reduce", ("data",), 1, 400, ""), lay) == 600
