"""Formulas of a product, and their comparison with a program."""

import jax
import pytest

from layouts import matrix
from meshloom.core.mesh import make_mesh
from meshloom.core.spec import abstract
from meshloom.models.freeze import frozen
from meshloom.parallel.base import MICRO, PLACES, STEP, Collective
from meshloom.parallel.table import build
from meshloom.plan.cost import compare, shapes, step_cost, straight, wire_bytes
from meshloom.plan.hlo import Found, collectives
from meshloom.plan.plan import Plan
from meshloom.runner.run import How
from meshloom.train.score import make_score
from programs import QUICK, SEQ, config, rows


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
    assert (straight(model, c, lay, How("unroll")), straight(model, c, lay, How("scan"))) == ((True,) * 3, (False,) * 3)
    assert straight(model, config("gpt2", layers=1)[1], lay, How("scan")) == (True,)
    assert straight(model, c, lay, How("scan", "full 1, none 2")) == (True, False, False)


def test_compares_count_and_bytes() -> None:
    found = [
        Found("all-reduce", ("data",), 2, 1, 10, ""),
        Found("all-reduce", ("data",), 1, 1, 5, ""),
        Found("all-gather", ("zero3",), 1, 1, 8, ""),
    ]
    lines = compare(
        found, [Collective("all-reduce", ("data",), 3, 15, "end", "x"), Collective("reduce-scatter", ("zero3",), 1, 8, "end", "y")]
    )
    assert [(line.kind, line.equal) for line in lines] == [("all-gather", False), ("all-reduce", True), ("reduce-scatter", False)]


def test_ring_bytes() -> None:
    _, c = config("gpt2")
    lay = build("data=4", c, 16)
    assert wire_bytes(Collective("all-gather", ("data",), 1, 400, "end", ""), lay) == 300
    assert wire_bytes(Collective("all-reduce", ("data",), 1, 400, "end", ""), lay) == 600


ALONE = [pair.spelling for pair in matrix.pairs() if pair.spelling and "pipe" not in (pair.first, pair.second)]
JOINED = dict.fromkeys([*ALONE, "tensor2d=2x2:stream", "zero2=2:qw8,qg8 tensor=2"])
"""Pairs whose collectives come once a micro-batch; those of a pipeline come once a tick (tests/parallel/test_pipe.py counts them by hand)."""


@pytest.mark.parametrize("spelling", JOINED)
def test_places_come_as_often_as_they_say(spelling: str) -> None:
    """Once a step whatever the micro-batches; else the same in each micro-batch, and in each layer where all are alike."""
    for family, remat in (("llama", "none"), ("neox", "full"), ("moe", "full"), ("moe_mixed", "selective")):
        model, c = config(family)
        try:
            lay = build(spelling, c, SEQ, "gpu")
        except ValueError:
            assert spelling != "data=2"
            continue
        two, six = (
            {
                (c.kind, c.axes, c.place, c.why): c
                for c in step_cost(spelling, shapes(model, c, lay, SEQ, 16 * m, m, How("scan", remat), "bfloat16"))
            }
            for m in (2, 6)  # of one micro-batch XLA may merge more
        )
        assert two.keys() == six.keys() and {place for _, _, place, _ in two} <= PLACES.keys()
        for key, x in two.items():
            often, times = PLACES[x.place].often, six[key]
            assert (times.count, times.bytes) == ((x.count, x.bytes) if often == STEP else (3 * x.count, 3 * x.bytes)), key
            each = 1 if often == STEP else 2 if often == MICRO or family.startswith("moe") else 2 * c.layers
            assert x.count % each == x.bytes % each == 0, key


FORWARD = [
    ("llama", "data=2"),
    ("llama_untied", "zero1=4"),
    ("llama", "zero2=4"),
    ("llama", "zero3=4"),
    ("llama", "tensor=2 sequence"),
    ("gpt2", "zero3=2 tensor=2"),
    ("llama", "context=2"),
    ("gpt2", "ulysses=2"),
    ("llama", "tensor2d=2x2"),
    ("neox", "tensor2d=2x2:stream"),
    ("gpt2", "tensor3d=2x2x2"),
    ("moe", "expert=2"),
    ("moe_mixed", "expert=2 tensor=2"),
    ("deepseek", "zero3=2 tensor=2"),
]


@pytest.mark.parametrize("family, spelling", FORWARD)
def test_forward_places_are_what_a_program_of_the_forward_pass_moves(family: str, spelling: str) -> None:
    """Evaluation of one batch runs the forward places, and the sums for the log, all of them over rows as the objective has them."""
    model, c = config(family)
    lay, how = build(spelling, c, SEQ), How("scan")
    plan = Plan(make_mesh(lay), lay, how, 1, "float32")
    batch = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), rows(8, 1))
    program = make_score(model, c, plan).lower(abstract(model.specs(c)), batch).compile(compiler_options=QUICK)
    x = shapes(model, c, lay, SEQ, 8, 1, how, "float32")
    forward = [m for m in step_cost(spelling, x) if not PLACES[m.place].back]
    log = [Collective("all-reduce", lay.summed, x.sums, 4 * x.sums, "log", "sums for the log")] if lay.summed else []
    assert [line for line in compare(collectives(program.as_text(), lay.sizes), [*forward, *log]) if not line.equal] == []
    assert forward or log


def test_the_backward_pass_ends_where_nothing_before_trains() -> None:
    model, c = config("llama_untied")
    lay = build("tensor=2 sequence", c, 16)
    places = []
    for freeze in ((), ("embed",), ("embed", "layers.*")):
        x = shapes(frozen(model, c, freeze), c, lay, 16, 8, 1, How("scan", "full"), "float32")
        places.append({m.place for m in step_cost("tensor=2 sequence", x)})
    assert places[0] - places[1] == {"embed back"} and places[1] - places[2] == {"layer again", "layer back"}
