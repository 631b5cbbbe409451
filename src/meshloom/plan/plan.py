"""A plan: where a run's arrays live and how its step runs. A value: print it, edit it, save it."""

from typing import NamedTuple

from jax.sharding import Mesh

from meshloom.core.layout import Layout
from meshloom.runner.run import How


class Plan(NamedTuple):
    """mesh, layout: the devices and what they hold. how: runner and remat. micro: micro-batches a step. dtype: type of the arithmetic.
    packed: whether rows hold several documents, so that attention needs their segments."""

    mesh: Mesh
    layout: Layout
    how: How
    micro: int
    dtype: str
    packed: bool = True
