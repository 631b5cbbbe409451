"""A machine's rates along the axes of a mesh, and sizes of memory as people write them."""

import pytest

from meshloom.auto.machine import rates, size
from meshloom.plan.hardware import read


def test_inner_axes_lie_inside_a_node() -> None:
    h = read("h100:4x8")
    r = rates(h, {"data": 4, "model": 8})
    assert r.rate == (h.hardware.between.rate, h.hardware.inside.rate) and r.latency[1] == h.hardware.inside.latency
    across = rates(h, {"data": 2, "model": 16})
    assert across.rate == (h.hardware.between.rate,) * 2
    assert rates(h, {"data": 2, "model": 4}).rate == (h.hardware.inside.rate,) * 2
    assert r.memory == h.hardware.memory and r.flops["bfloat16"] == h.hardware.flops["bfloat16"] * h.hardware.efficiency


def test_axes_of_one_device_are_left_out() -> None:
    assert rates(read("a100:1x8"), {"a": 1, "b": 8}).sizes == {"b": 8}
    assert rates(read("a100:1x8"), {"a": 1}).mesh == ()


def test_a_mesh_that_is_larger_than_the_machine_is_refused() -> None:
    with pytest.raises(ValueError, match="The mesh x=16 has 16 devices, and a100:1x8 has 8. Use a smaller mesh"):
        rates(read("a100:1x8"), {"x": 16})


def test_sizes_of_memory() -> None:
    assert [size(s) for s in (1000, "1.5GB", "2 GiB", "3kb", "1e3", "7")] == [1000, 1_500_000_000, 2**31, 3000, 1000, 7]
    for wrong, says in (("much", "is no size of memory"), ("3 pounds", "is no size"), (0, "no memory"), ("-1GB", "is no size")):
        with pytest.raises(ValueError, match=says):
            size(wrong)
