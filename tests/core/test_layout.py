"""Layouts as values: union, sizes, shards, refusals."""

import pytest
from jax.sharding import PartitionSpec

from meshloom.core.layout import ONE_DEVICE, Layout
from meshloom.core.spec import spec

SIZES = {"embed": 12, "heads": 8, "head": 4, "ffn": 6}
Q = spec(SIZES, "embed heads head")
ZERO = Layout({"zero": 2}, rest={"embed": ("zero",)}, acts={"batch": ("zero",)})
TENSOR = Layout({"tensor": 4}, rest={"heads": ("tensor",)}, live={"heads": ("tensor",)}, acts={"heads": ("tensor",)})


def test_union_keeps_both() -> None:
    both = ZERO | TENSOR
    assert both.devices == 8 and both.batch == ("zero",) and both.work == ("tensor",)
    assert both.partition("rest", Q.axes) == PartitionSpec(("zero",), ("tensor",), None)
    assert both.shard_shape("rest", Q) == (6, 2, 4) and both.shard_bytes("rest", Q, 4) == 192
    assert both.shard_shape("live", Q) == (12, 2, 4)


def test_an_axis_split_by_both_is_split_by_one_after_the_other() -> None:
    data = Layout({"data": 3}, acts={"batch": ("data",)})
    assert (data | ZERO).batch == ("data", "zero") and (data | ZERO).size(("data", "zero")) == 6
    assert (ZERO | ZERO).acts == ZERO.acts


def test_what_splits_an_axis_longest_comes_first() -> None:
    outer = Layout({"a": 2}, rest={"embed": ("a",)}, acts={"batch": ("a",)})
    inner = Layout({"b": 2}, rest={"embed": ("b",)}, grad={"embed": ("b",)}, acts={"batch": ("b",)})
    work = Layout({"c": 2}, **{t: {"embed": ("c",)} for t in ("rest", "grad", "step", "live")})
    both = outer | inner | work
    assert both.rest["embed"] == ("c", "b", "a") and both.grad["embed"] == ("c", "b") and both.batch == ("a", "b")
    assert both.gathered("rest", "grad", ("embed",)) == (0, ("a",)) and both.gathered("grad", "step", ("embed",)) == (0, ("b",))


def test_rows_are_rounded_up_to_equal_shares() -> None:
    assert [(Layout({"data": 4}, acts={"batch": ("data",)})).even(n) for n in (1, 4, 5)] == [4, 4, 8] and ONE_DEVICE.even(5) == 5


def test_one_device_splits_nothing() -> None:
    assert ONE_DEVICE.devices == 1 and ONE_DEVICE.shard_shape("rest", Q) == Q.shape and ONE_DEVICE | TENSOR == TENSOR


def test_without_an_axis_the_sizes_stay() -> None:
    assert TENSOR.without("heads").devices == 4 and TENSOR.without("heads").shard_shape("rest", Q) == Q.shape


def test_refuses_two_sizes_of_one_mesh_axis() -> None:
    with pytest.raises(ValueError, match="Mesh axis 'zero' is asked for twice, with 2 and with 4 devices"):
        ZERO | Layout({"zero": 4})


def test_refuses_a_size_that_does_not_divide() -> None:
    with pytest.raises(
        ValueError, match="Axis 'ffn' of size 6 cannot be split over 4 devices .tensor.. Use a number of devices that divides 6"
    ):
        Layout({"tensor": 4}, rest={"ffn": ("tensor",)}).shard_shape("rest", spec(SIZES, "embed ffn"))


def test_refuses_one_mesh_axis_for_two_axes_of_an_array() -> None:
    with pytest.raises(ValueError, match="Mesh axis 'x' would split both 'embed' and 'heads' of one array"):
        Layout({"x": 2}, rest={"embed": ("x",), "heads": ("x",)}).partition("rest", Q.axes)


def test_what_is_gathered_between_tables() -> None:
    lay = Layout({"zero": 4}, rest={"embed": ("zero",)}, grad={"embed": ("zero",)})
    assert lay.gathered("rest", "step", ("ffn", "embed")) == (1, ("zero",)) and lay.gathered("rest", "grad", ("ffn", "embed")) == (0, ())
    assert lay.gathered("rest", "step", ("ffn",)) == (0, ()) and lay.gathered("step", "live", ("ffn", "embed")) == (0, ())
    with pytest.raises(AssertionError, match="along several axes"):
        Layout({"a": 2, "b": 2}, rest={"embed": ("a",), "ffn": ("b",)}).gathered("rest", "step", ("embed", "ffn"))


def test_what_is_gathered_first_is_neighbours() -> None:
    """Of parameters that two mesh axes split along one axis, the one that leaves first is the inner one, whichever strategy was named first."""
    once = Layout({"zero": 2}, rest={"embed": ("zero",)})
    longer = Layout({"rows": 2}, rest={"embed": ("rows",)}, step={"embed": ("rows",)}, grad={"embed": ("rows",)})
    assert (once | longer).rest["embed"] == (longer | once).rest["embed"] == ("rows", "zero")


def test_rows_inside_a_layer_may_be_split_further() -> None:
    lay = Layout({"data": 2, "j": 3}, acts={"batch": ("data",), "work_batch": ("j",)})
    assert (
        lay.partition("acts", ("work_batch",)) == PartitionSpec(("data", "j")) and lay.summed == ("data", "j") and lay.tokens == ("data",)
    )
    assert lay.even(7) == 12
