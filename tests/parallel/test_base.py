"""What strategies share: which sums a step needs, merging, divisors."""

from meshloom.core.layout import Layout
from meshloom.core.spec import spec
from meshloom.parallel.base import Collective, divisors, merge, moved, ordered, wherever
from meshloom.parallel.zero import strategy

LAYOUT = Layout({"data": 2, "zero": 2, "tensor": 2})


def test_mesh_axes_in_the_order_of_the_mesh() -> None:
    assert ordered(LAYOUT, ("tensor", "data", "data")) == ("data", "tensor")


def test_merge_adds_alike_and_drops_nothing_moved() -> None:
    a = Collective("all-gather", ("zero",), 2, 10, "start", "x")
    assert merge([a, a._replace(why="y"), a, a._replace(count=0, bytes=0, why="z")]) == (a._replace(count=4, bytes=20), a._replace(why="y"))


def test_one_reason_at_two_places_is_one_row_for_people() -> None:
    a = Collective("all-gather", ("zero",), 2, 10, "weights", "x")
    found = [a, a._replace(place="outer", count=1, bytes=3), a._replace(kind="all-reduce")]
    assert len(merge(found)) == 3 and wherever(found) == (a._replace(count=3, bytes=13), found[2])


def test_what_moves_between_tables() -> None:
    s, zero3 = spec({"embed": 8, "ffn": 4}, "embed ffn"), strategy(3).layout(4)
    assert moved(zero3, "rest", "live", s) == ("zero3",) and moved(zero3, "rest", "step", s) == ()


def test_divisors() -> None:
    assert divisors(12) == "1, 2, 3, 4, 6, 12" and divisors(128, 8) == "1, 2, 4, 8"
