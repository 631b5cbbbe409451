"""A machine's rates along the axes of a mesh, and sizes of memory as people write them."""

import pytest

from meshloom.auto.machine import rates, size
from meshloom.auto.price import Move
from meshloom.core.layout import Layout
from meshloom.parallel.base import Collective
from meshloom.plan.hardware import read
from meshloom.plan.hlo import KINDS
from meshloom.plan.link import seconds


@pytest.mark.parametrize(
    "on, sizes", [("h100:4x8", {"data": 4, "model": 8}), ("v5e:4x8", {"data": 4, "model": 8}), ("a100:1x8", {"x": 2, "y": 4})]
)
def test_seconds_are_those_of_the_planner(on: str, sizes: dict) -> None:
    cluster = read(on)
    r, layout, names = rates(cluster, sizes), Layout(sizes), list(sizes)
    assert set(r.ways) == {(kind, axes) for kind in KINDS for axes in ((0,), (1,), (0, 1))}
    for kind, axes in r.ways:
        for count in (0, 12345, 10**8):
            want = seconds(Collective(kind, tuple(names[a] for a in axes), 1, count, "", ""), layout, cluster)
            assert r.moved(Move(kind, axes, count)) == pytest.approx(want, rel=1e-6)
    assert r.memory == cluster.hardware.memory and r.flops["bfloat16"] == cluster.hardware.flops["bfloat16"] * cluster.hardware.efficiency


def test_axes_of_one_device_are_left_out() -> None:
    assert rates(read("a100:1x8"), {"a": 1, "b": 8}).sizes == {"b": 8}
    assert rates(read("a100:1x8"), {"a": 1}).mesh == ()


def test_a_mesh_that_is_larger_than_the_machine_is_refused() -> None:
    with pytest.raises(ValueError, match="The mesh x=16 has 16 devices, and a100:1x8 has 8. Use a smaller mesh"):
        rates(read("a100:1x8"), {"x": 16})


def test_sizes_of_memory() -> None:
    assert [size(s) for s in (1000, "1.5GB", "2 GiB", "3kb", "1e3", "7")] == [1000, 1_500_000_000, 2**31, 3000, 1000, 7]
    for wrong, says in (
        ("much", "is no size of memory"),
        ("3 pounds", "is no size"),
        (0, "no memory"),
        (float("nan"), "no memory"),
        ("-1GB", "is no size"),
    ):
        with pytest.raises(ValueError, match=says):
            size(wrong)
