"""Links: where mesh axes lie on a cluster, and times of collectives against closed forms and against messages counted link by link."""

import itertools
import math

import pytest

from meshloom.core.layout import Layout
from meshloom.parallel.base import Collective
from meshloom.plan.hardware import Cluster, Hardware, Link
from meshloom.plan.link import Side, exchange, link, neighbour, places, seconds

R, OUT = 90e9, 6e9
MIB = 1 << 20


def cluster(*shape: int, torus: int = 0, wrap: int = 4, node: int = 8, platform: str = "") -> Cluster:
    """Hardware with round numbers: 90 GB/s and 2 us inside, 6 GB/s and 20 us between, 1 us to start."""
    h = Hardware(
        "h", platform or ("tpu" if torus else "gpu"), 10**10, 1e12, {"bfloat16": 1e14}, 1.0, node, Link(R, 2e-6), Link(OUT, 20e-6), torus, (),
        wrap=wrap, start=1e-6,
    )  # fmt: skip
    return Cluster(h, shape)


def layout(**sizes: int) -> Layout:
    return Layout(sizes)


def test_axes_lie_innermost_first():
    assert places({"zero3": 4, "tensor": 4}, (2, 8), 0) == {"tensor": (Side(1, 1), Side(4, 1)), "zero3": (Side(2, 1), Side(2, 4))}
    assert places({"data": 8, "tensor": 8}, (8, 8), 0) == {"tensor": (Side(1, 1), Side(8, 1)), "data": (Side(8, 1), Side(1, 8))}
    assert places({"zero3": 12, "tensor": 2}, (3, 8), 0)["zero3"] == (Side(3, 1), Side(4, 2)), "a straddling axis has a part of each"


def test_an_axis_of_a_torus_takes_a_whole_side_where_one_is_free():
    found = places({"zero3": 16, "tensor": 8}, (4, 8, 4), 3)
    assert found["tensor"] == (Side(1, 1), Side(8, 1), Side(1, 1))
    assert found["zero3"] == (Side(4, 1), Side(1, 8), Side(4, 1))
    found = places({"zero3": 32, "tensor": 4}, (2, 8, 8), 2)
    assert found["tensor"] == (Side(1, 1), Side(1, 1), Side(4, 1))
    assert found["zero3"] == (Side(2, 1), Side(8, 1), Side(2, 4)), "slices last"


def test_no_room_is_told():
    with pytest.raises(ValueError, match="A mesh of 16 devices .zero3=16. cannot be laid over 1x8: for 'zero3' of 16 there is no room"):
        link(cluster(1, 8), layout(zero3=16), ("zero3",))


def gather(n: int, axes: tuple[str, ...], kind: str = "all-gather", count: int = 1) -> Collective:
    return Collective(kind, axes, count, count * n, "start", "")


def test_a_gather_inside_a_node_is_a_ring():
    """B (n-1)/n over a device's rate, log2 n steps; an all-reduce is twice that."""
    lay, c = layout(tensor=8), cluster(2, 8)
    assert seconds(gather(MIB, ("tensor",)), lay, c) == pytest.approx(1e-6 + 3 * 2e-6 + MIB * 7 / 8 / R)
    assert seconds(gather(MIB, ("tensor",), "all-reduce"), lay, c) == pytest.approx(1e-6 + 2 * 3 * 2e-6 + 2 * MIB * 7 / 8 / R)
    assert seconds(gather(MIB, ("tensor",), count=5), lay, c) == pytest.approx(5 * seconds(gather(MIB, ("tensor",)), lay, c))


def test_between_nodes_all_rails_carry_a_group():
    """Nodes of 8 that gather together send through 8 rails; one device of each node through its own."""
    c, lay = cluster(4, 8), layout(zero3=4, tensor=8)
    assert link(c, lay, ("zero3",)) == pytest.approx((OUT, 2 * 20e-6))
    assert link(c, lay, ("zero3", "tensor")) == pytest.approx((8 * OUT, 3 * 2e-6 + 2 * 20e-6))
    half = layout(zero3=8, tensor=4)
    assert link(c, half, ("zero3",)) == pytest.approx((2 * OUT, 2e-6 + 2 * 20e-6)), "two of a node's devices"
    fast = c._replace(hardware=c.hardware._replace(between=Link(R, 20e-6)))
    assert link(fast, lay, ("zero3", "tensor")).rate == R, "no faster than inside"


def test_a_torus_sends_along_all_its_sides():
    """Scaling book: B over (sides x both ways); a line has one way."""
    lay = layout(zero3=64)
    assert link(cluster(4, 4, 4, torus=3), lay, ("zero3",)) == pytest.approx((3 * 2 * R, 3 * 2 * 2e-6))
    assert link(cluster(8, 8, torus=2, wrap=16), lay, ("zero3",)) == pytest.approx((2 * R, 2 * 7 * 2e-6)), "lines"
    half = layout(zero3=32, tensor=2)
    way = link(cluster(8, 8, torus=2, wrap=8), half, ("zero3",))
    assert way.rate == pytest.approx(2 * R + 2 * R / 2), "the last side is shared by two groups"
    assert link(cluster(8, 8, torus=2, wrap=8), half, ("tensor",)).rate == R


def test_slices_are_joined_by_the_network_of_the_hosts():
    c, lay = cluster(2, 4, 4, torus=2, wrap=4), layout(data=2, zero3=16)
    assert link(c, lay, ("data",)).rate == OUT
    assert link(c, lay, ("data", "zero3")).rate == min(4 * R, 16 * OUT)


def loads(e: int, stride: int, ring: bool) -> float:
    """The most that a directed link of one dimension carries in an all-to-all of 1 byte a device, counted message by message; devices that are half a
    ring apart send half each way. All groups of that stride work at once."""
    length, found = e * stride, {}

    def walk(start: int, way: int, hops: int, size: float) -> None:
        for hop in range(hops):
            key = ((start + way * hop) % length, way)
            found[key] = found.get(key, 0.0) + size

    for first, a, b in itertools.product(range(stride), range(e), range(e)):
        ahead = (b - a) % e * stride
        if not ring:
            walk(a * stride + first, 1 if b > a else -1, abs(b - a) * stride, 1 / e)
        elif 2 * ahead == length:
            walk(a * stride + first, 1, ahead, 0.5 / e), walk(a * stride + first, -1, ahead, 0.5 / e)
        else:
            way = 1 if 2 * ahead < length else -1
            walk(a * stride + first, way, min(ahead, length - ahead), 1 / e)
    return max(found.values())


@pytest.mark.parametrize("e, stride", [(4, 1), (8, 1), (16, 1), (4, 2), (4, 4), (8, 2)])
@pytest.mark.parametrize("ring", [True, False])
def test_an_exchange_on_a_torus_against_every_message(e, stride, ring):
    """Closed forms B e / 8 and B e / 4 over one link, times the groups that share it."""
    c = cluster(1, e * stride, torus=2, wrap=e * stride if ring else 1 << 20)
    lay = layout(expert=e, tensor=stride) if stride > 1 else layout(expert=e)
    assert exchange(c, lay, ("expert",)) == pytest.approx(loads(e, stride, ring) / R)


def test_an_exchange_over_two_sides_loads_the_longer_one():
    c = cluster(4, 8, torus=2, wrap=4)
    assert exchange(c, layout(expert=32), ("expert",)) == pytest.approx(8 / 8 / R)


def test_an_exchange_over_switches_uses_both_networks_at_once():
    lay, c = layout(expert=16), cluster(2, 8)
    assert exchange(c, lay, ("expert",)) == pytest.approx(max(8 / 16 / OUT, 7 / 16 / R))
    assert exchange(cluster(1, 8), layout(expert=8), ("expert",)) == pytest.approx(7 / 8 / R)
    moved = gather(MIB, ("expert",), "all-to-all")
    assert seconds(moved, lay, c) == pytest.approx(1e-6 + 3 * 2e-6 + 1 * 20e-6 + MIB * 8 / 16 / OUT)


def test_a_step_to_the_neighbour_takes_one_link():
    moved = gather(MIB, ("pipe",), "collective-permute", 3)
    assert seconds(moved, layout(pipe=4), cluster(1, 8)) == pytest.approx(3 * (1e-6 + 2e-6 + MIB / R))
    assert neighbour(cluster(4, 8), layout(pipe=4, tensor=8), ("pipe",)) == Link(OUT, 20e-6)
    assert neighbour(cluster(2, 8), layout(pipe=4, tensor=4), ("pipe",)) == Link(OUT, 20e-6), "some step leaves the node"
    assert neighbour(cluster(4, 4, torus=2), layout(pipe=4, tensor=4), ("pipe",)) == Link(R, 2e-6)
    assert neighbour(cluster(1, 8, torus=2), layout(pipe=4, tensor=2), ("pipe",)) == Link(R / 2, 4e-6)


def test_a_cpus_devices_meet_and_wake_each_other():
    c = cluster(1, 8, platform="cpu")
    moved = gather(MIB, ("data",), "all-reduce")
    assert seconds(moved, layout(data=8), c) == pytest.approx(1e-6 + 8 * 2e-6 + 2 * MIB * 7 / 8 / R)
    assert seconds(gather(MIB, ("data",)), layout(data=2, zero1=4), c) == pytest.approx(1e-6 + 2 * 2e-6 + MIB / 2 / R)
    passed = gather(MIB, ("pipe",), "collective-permute")
    assert seconds(passed, layout(pipe=2, zero1=4), c) == pytest.approx(1e-6 + 8 * 2e-6 + MIB / R), "all devices meet"


def test_kinds_that_were_measured_to_be_slower():
    c = cluster(1, 8)
    c = c._replace(hardware=c.hardware._replace(slower={"all-reduce": 3.0}))
    start = 1e-6 + 2 * 3 * 2e-6
    assert seconds(gather(MIB, ("data",), "all-reduce"), layout(data=8), c) == pytest.approx(start + 3 * 2 * MIB * 7 / 8 / R)


def test_one_device_moves_nothing():
    assert seconds(gather(MIB, ("data",)), layout(data=1), cluster(1, 8)) == 0.0
    assert link(cluster(1, 8), layout(data=1), ("data",)).rate == math.inf
