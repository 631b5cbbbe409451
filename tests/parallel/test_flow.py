"""What a pipeline makes of a step."""

from meshloom.models.base import Kind
from meshloom.parallel.pipe import flow
from meshloom.parallel.table import build
from programs import config


def test_a_step_by_hand() -> None:
    """1F1B of 2 stages and 4 micro-batches: 5 ticks with a forward and 5 with a backward, each sends; slots that are left out are told."""
    c, kinds = config("llama", layers=4)[1], (Kind(), Kind())
    plain, left_out = (flow(build(spelling, c, 16, "gpu"), 4, 2, False, kinds) for spelling in ("pipe=2", "pipe=2:skip"))
    assert plain.ticks == (5, 5, 0, 5, 5) and plain.gathers == (4, 4, 8) and not plain.late
    assert plain.heavy == () and left_out.heavy == kinds and left_out.ticks == plain.ticks
