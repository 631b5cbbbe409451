"""Devices as a mesh, and where the arrays of a tree lie on it."""

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from meshloom.core.layout import Layout
from meshloom.core.spec import Spec, is_spec
from meshloom.core.tree import Tree


def make_mesh(layout: Layout, devices: list | None = None) -> Mesh:
    """The mesh of a layout over the first devices, outermost axis first. Raises ValueError if there are too few."""
    devices = jax.devices() if devices is None else devices
    need = layout.devices
    if need > len(devices):
        asked = " x ".join(f"{name}={size}" for name, size in layout.sizes.items())
        raise ValueError(
            f"The layout needs {need} devices ({asked}), and this machine has {len(devices)}. Ask for {len(devices)} or fewer, or simulate them on "
            f"the CPU with --devices {need}."
        )
    shape = tuple(layout.sizes.values())
    return Mesh(np.array(devices[:need]).reshape(shape), tuple(layout.sizes), axis_types=(AxisType.Auto,) * len(shape))


def partitions(layout: Layout, table: str, specs: Tree) -> Tree:
    """The PartitionSpec of every array of a tree under a table. Raises ValueError where a size does not divide."""

    def one(s: Spec) -> PartitionSpec:
        layout.shard_shape(table, s)
        return layout.partition(table, s.axes)

    return jax.tree.map(one, specs, is_leaf=is_spec)


def shardings(mesh: Mesh, layout: Layout, table: str, specs: Tree) -> Tree:
    """The NamedSharding of every array of a tree under a table."""
    return jax.tree.map(lambda p: NamedSharding(mesh, p), partitions(layout, table, specs), is_leaf=lambda x: isinstance(x, PartitionSpec))
