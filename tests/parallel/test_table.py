"""The compact spelling: what it reads, what it refuses, and the layout that it builds."""

import pytest

from meshloom.parallel.table import STRATEGIES, build, default, parse, spell
from programs import config


def test_reads_in_the_order_of_the_mesh() -> None:
    asked = parse("tensor=2 sequence data=2 zero3=4")
    assert {name: a.sizes for name, a in asked.items()} == {"data": (2,), "zero3": (4,), "tensor": (2,), "sequence": (2,)} and list(
        asked
    ) == ["data", "zero3", "tensor", "sequence"]
    assert spell(asked) == "data=2 zero3=4 tensor=2 sequence" and spell({}) == "one device"


@pytest.mark.parametrize(
    "spelling, said",
    [
        ("zeor3=2", "'zeor3' in layout 'zeor3=2' is not a strategy. Did you mean 'zero3'"),
        ("data=2 data=4", "'data' stands twice"),
        ("data", "'data' in layout 'data' needs a number of devices, such as 'data=2'"),
        ("data=0", "needs a number of devices"),
        ("tensor=2 sequence=2", "'sequence' takes no number"),
        ("tensor=2x2", "gives 2 sizes, and 'tensor' has one mesh axis"),
        ("tensor=2:int8", "'int8' in layout 'tensor=2:int8' is not an option of 'tensor'. It has none"),
        ("zero3=2:qw9", "'qw9' in layout 'zero3=2:qw9' is not an option of 'zero3'. Did you mean 'qw8'.* It has: qw8, qg8, qg4"),
        ("sequence", "which layout 'sequence' lacks. Add 'tensor=2'"),
        ("zero3=2 zero3=2", "'zero3' stands twice"),
        ("zero3=4 data=2 zero1=2", "has zero3 outside zero1: what the inner stage keeps whole.*Write 'zero1=2 zero3=4'"),
    ],
)
def test_refuses(spelling, said) -> None:
    with pytest.raises(ValueError, match=said):
        parse(spelling)


def test_builds_products() -> None:
    _, c = config("llama")
    lay = build("data=2 zero3=2 tensor=2 sequence", c, 16)
    assert dict(lay.sizes) == {"data": 2, "zero3": 2, "tensor": 2} and lay.batch == ("data", "zero3") and lay.work == ("tensor",)
    assert build("data=1 tensor=1", c, 16).devices == 1


def test_of_nested_stages_the_inner_one_splits_first() -> None:
    _, c = config("llama")
    lay = build("zero1=2 zero2=2 zero3=2", c, 16)
    assert lay.rest["embed"] == ("zero3", "zero2", "zero1") and lay.grad["embed"] == ("zero3", "zero2") and lay.step["embed"] == ("zero3",)
    assert lay.batch == tuple(lay.sizes) == ("zero1", "zero2", "zero3")


def test_refuses_a_width_that_all_together_do_not_divide() -> None:
    _, c = config("gpt2", embed=24, heads=4)
    with pytest.raises(
        ValueError, match="embed 24 cannot be split over 16 devices .zero3=4 x zero1=4.. Use sizes whose product is one of 1, 2"
    ):
        build("zero1=4 zero3=4", c, 16)


def test_key_heads_split_where_they_divide() -> None:
    _, c = config("llama")
    assert build("tensor=2", c, 16).acts["kv_heads"] == ("tensor",) and "kv_heads" not in build("tensor=4", c, 16).acts


def test_default_is_zero3_where_the_width_divides() -> None:
    _, c = config("llama")
    assert (default(1, c), default(8, c), default(6, c)) == ("", "zero3=8", "data=6")


def test_every_strategy_says_what_it_does() -> None:
    assert all(s.summary and s.name == name for name, s in STRATEGIES.items())
