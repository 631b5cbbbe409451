"""Bytes in flight, by hand."""

from meshloom.parallel.schedules import make
from meshloom.parallel.slots import compile
from meshloom.parallel.table import build
from meshloom.plan.cost import shapes
from meshloom.plan.flight import flight
from meshloom.plan.layer import kept
from meshloom.runner.run import How
from programs import config


def micro_batch(spelling: str = "", layers: int = 8, remat: str = "none", micro: int = 8):
    model, c = config("llama", layers=layers)
    return shapes(model, c, build(spelling, c, 16), 16, 16, micro, How("scan", remat), "float32")


def test_inputs_alone() -> None:
    """4 stages, 8 micro-batches: 7 inputs, one activation and one gradient on their way; gradients have a place for what nobody reads."""
    x = micro_batch()
    one = 2 * 16 * x.config.embed * 4
    f = flight(compile(make("1f1b", 4, 8)), x, 2, "tiny")
    assert [(ring.places, ring.each, ring.bytes) for ring in f.rings.values()] == [(7, one, 7 * one), (1, one, one), (2, one, 2 * one)]
    assert f.layers == 2 and f.chunk == 2 * kept(x) and f.bytes == 10 * one + 2 * kept(x)
    assert f.said == "tiny, 2 x 16 tokens of a micro-batch, float32"


def test_stashed_residuals_and_what_is_left_for_w() -> None:
    x = micro_batch()
    f = flight(compile(make("zb", 4, 8)), x, 2, "tiny", stash=True)
    assert (f.rings["kept"].each, f.chunk) == (2 * kept(x), 2 * kept(x)), "one is read out of its place"
    assert f.rings["late"].places == 4 and f.rings["late"].each == 4 * kept(x._replace(remat="selective"))
    assert "late" not in flight(compile(make("1f1b", 4, 8)), x, 2, "tiny").rings


def test_layers_that_are_computed_again_hold_their_inputs() -> None:
    """What one of them makes again is what a layer works with (plan/layer.py)."""
    x = micro_batch(remat="full")
    assert flight(compile(make("1f1b", 4, 8)), x, 2, "tiny").chunk == 2 * kept(x) == 2 * 2 * 16 * x.config.embed * 4


def test_smaller_pieces_where_the_stage_is_split_and_layers_round_up() -> None:
    x, split = micro_batch(), micro_batch("data=2 tensor=2 sequence")
    table = compile(make("interleaved2", 3, 6))
    a, b = (flight(table, y, 2, "tiny") for y in (x, split))
    assert a.rings["kept"].each == 4 * b.rings["kept"].each and a.layers == 2  # 8 layers in 6 parts


def test_flat_in_the_number_of_micro_batches() -> None:
    """The same micro-batch, more of them: GPipe grows, the others do not."""
    x = micro_batch()
    for name in ("1f1b", "interleaved2", "zb"):
        assert flight(compile(make(name, 4, 16)), x, 2, "tiny").bytes == flight(compile(make(name, 4, 64)), x, 2, "tiny").bytes
    few, many = (flight(compile(make("gpipe", 4, m)), x, 2, "tiny") for m in (16, 64))
    assert many.rings["kept"].places == 65 and many.bytes > few.bytes
