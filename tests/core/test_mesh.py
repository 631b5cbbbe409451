"""Meshes from layouts, and the partitions of trees."""

import jax
import pytest
from jax.sharding import PartitionSpec as P

from meshloom.core.layout import ONE_DEVICE, Layout
from meshloom.core.mesh import make_mesh, partitions, shardings
from meshloom.core.spec import spec

LAYOUT = Layout({"data": 2, "tensor": 2}, rest={"ffn": ("tensor",)})
SPECS = {"w": spec({"embed": 4, "ffn": 6}, "embed ffn"), "b": spec({"embed": 4}, "embed")}


def test_first_devices_outermost_axis_first() -> None:
    mesh = make_mesh(LAYOUT)
    assert mesh.axis_names == ("data", "tensor") and mesh.devices.shape == (2, 2)
    assert [d.id for d in mesh.devices.flat] == [d.id for d in jax.devices()[:4]]
    assert make_mesh(ONE_DEVICE).size == 1


def test_partitions_follow_a_table() -> None:
    assert partitions(LAYOUT, "rest", SPECS) == {"w": P(None, ("tensor",)), "b": P(None)}
    assert shardings(make_mesh(LAYOUT), LAYOUT, "rest", SPECS)["w"].shard_shape((4, 6)) == (4, 3)


def test_refuses_more_devices_than_there_are() -> None:
    with pytest.raises(
        ValueError, match=r"needs 16 devices \(data=16\), and this machine has 8. Ask for 8 or fewer, or simulate .* --devices 16"
    ):
        make_mesh(Layout({"data": 16}))


def test_refuses_sizes_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match="Axis 'ffn' of size 6 cannot be split over 4 devices"):
        partitions(Layout({"tensor": 4}, rest={"ffn": ("tensor",)}), "rest", SPECS)
