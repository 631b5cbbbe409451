"""What explain prints and counts, and what it cannot count."""

import jax
import pytest

import meshloom as ml
from meshloom.core.layout import Layout


def perceptron(p, x):
    """Two layers."""
    return ml.mean(ml.einsum(ml.relu(ml.einsum(x, p["up"], out="batch ffn")), p["down"], out="batch embed"))


SPECS = (
    {"up": ml.spec("embed ffn", embed=64, ffn=256), "down": ml.spec("ffn embed", embed=64, ffn=256)},
    ml.spec("batch embed", batch=32, embed=64),
)


def test_the_whole_text() -> None:
    told = ml.explain(perceptron, *SPECS, mesh="rows=2 cols=4", rules="batch:rows ffn:cols")
    lines = [
        "mesh rows=2 cols=4, rules batch:rows ffn:cols",
        "einsum batch embed, embed ffn -> batch ffn  nothing                                    131,072 flops",
        "einsum batch ffn, ffn embed -> batch embed  all-reduce over rows x cols, 1 array, 4 B  131,072 flops",
        "all together",
        "  all-reduce over rows x cols, 1 array, 4 B",
        "each device: 262,144 flops; all devices do 1.00 x the 2,097,152 of the program",
    ]
    assert str(told).splitlines() == lines
    assert told.bytes == 4 and told.flops == 262_144 and told.whole == 2 * 2 * 32 * 64 * 256


def test_operations_are_those_that_owe_the_work_backward_too() -> None:
    told = ml.explain(ml.grad(perceptron, (0, 1)), *SPECS, mesh="rows=2 cols=4", rules="batch:rows ffn:cols")
    up = "einsum batch embed, embed ffn -> batch ffn"
    assert [(op.name, op.backward) for op in told.operations if op.moves] == [
        ("einsum batch ffn, ffn embed -> batch embed", True),
        (up, True),
    ]
    (back,) = (op for op in told.operations if op.name == up and op.backward)
    assert {f.axes: f.bytes for f in back.moves} == {("cols",): 16 * 64 * 4, ("rows",): 64 * 64 * 4}


def test_repeated_work_shows() -> None:
    told = ml.explain(perceptron, *SPECS, mesh="rows=2 cols=4", rules="ffn:cols")
    assert told.flops * 8 == 2 * told.whole and "all devices do 2.00 x" in str(told)


def test_nothing_moves_on_one_device_and_a_layout_is_taken_as_it_is() -> None:
    assert "nothing moves" in str(ml.explain(perceptron, *SPECS))
    lay = Layout({"rows": 2}, acts={"batch": ("rows",)})
    assert ml.explain(perceptron, *SPECS, mesh=lay).total == {("all-reduce", ("rows",)): (1, 4)}


def test_what_runs_a_number_of_times_that_nobody_knows_is_refused() -> None:
    def fn(x):
        return jax.lax.while_loop(lambda c: ml.sum(c).array() < 10, lambda c: c * 2 + ml.sum(c), x)

    with pytest.raises(ValueError, match="moves bytes inside a while, so how often is not known before it runs"):
        ml.explain(fn, ml.spec("batch", batch=8), mesh="rows=2", rules="batch:rows")
