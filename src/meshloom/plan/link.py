"""How long what moves between devices takes: alpha-beta links under each mesh axis.

Mesh axes are laid over a cluster innermost first: inside a node, then over nodes, as ranks are counted; over a torus, an axis takes a whole dimension of
its size where one is free (as `jax.experimental.mesh_utils` does), else parts of dimensions from the last on; slices of a torus come last.

A gather, or a scatter, of B bytes (whole) over n devices: each sends B (n-1)/n (`cost.wire_bytes`), an all-reduce is both.
- switch, g of the group's devices in a node: all rails at once, so the group leaves a node with g times a device's rate: min(inside, g between).
- torus: all dimensions at once, each a ring that sends both ways (2 links), or a line where it does not wrap around (1). Where a group takes every s-th
  device of a dimension, s groups share its links.
An exchange (all-to-all): switch: (n-g)/n of B through `between`, the rest inside, at the same time. Torus, ring of e devices: the links of a dimension
carry B e / 8 each, of a line B e / 4.  A step to the neighbour: one link, one direction.
Latency: log2 steps on a switch (recursive doubling); on a torus half way around each ring, or along each line. A CPU's devices meet once, and each wakes
all the others (measured: 28, 50, 84 us for 2, 4, 8 of 8 devices on 2 cores); to pass an array on, all devices of the mesh meet. There, and wherever it
was measured, `Hardware.slower` has kinds whose bytes take longer than a gather's.
Sources: scaling book, 'Sharded matrices' and 'GPUs'; Thakur, Rabenseifner, Gropp 2005 (doi 10.1177/1094342005051521), section 4.
"""

import functools
import math
from collections.abc import Mapping
from typing import NamedTuple

from meshloom.core.layout import Layout
from meshloom.parallel.base import Collective
from meshloom.plan.cost import wire_bytes
from meshloom.plan.hardware import Cluster, Link


class Side(NamedTuple):
    """What devices that take part have of one dimension of a cluster. extent: so many of its places. stride: one of so many, on average."""

    extent: int
    stride: int


class Group(NamedTuple):
    """Devices that take part in a collective, as they lie. sides: by dimension of the cluster's shape."""

    sides: tuple[Side, ...]

    @property
    def size(self) -> int:
        """How many they are."""
        return math.prod(side.extent for side in self.sides)


def places(sizes: Mapping[str, int], shape: tuple[int, ...], torus: int) -> dict[str, tuple[Side, ...]]:
    """Mesh axis -> its devices in each dimension of a shape; stride: devices of the dimension from one to the next.  sizes: outermost first.
    Raises ValueError where they do not fit."""
    return _places(tuple(sizes.items()), shape, torus)


@functools.lru_cache(1024)
def _places(mesh: tuple[tuple[str, int], ...], shape: tuple[int, ...], torus: int) -> dict[str, tuple[Side, ...]]:
    sizes = dict(mesh)
    used, found, first = [1] * len(shape), {}, len(shape) - torus if torus else len(shape)
    for name in reversed(sizes):
        left, own = sizes[name], {}
        whole = [d for d in range(first, len(shape)) if used[d] == 1 and shape[d] == left > 1]
        for d in [*whole[-1:], *reversed(range(len(shape)))]:
            part = math.gcd(left, shape[d] // used[d])
            if part > 1:
                own[d] = Side(part, used[d])
                used[d] *= part
                left //= part
        if left > 1:
            raise ValueError(
                f"A mesh of {math.prod(sizes.values())} devices ({' x '.join(f'{a}={n}' for a, n in sizes.items())}) cannot be laid over "
                f"{'x'.join(str(n) for n in shape)}: for '{name}' of {sizes[name]} there is no room. Use a layout whose axes divide the cluster's sides."
            )
        found[name] = tuple(own.get(d, Side(1, used[d])) for d in range(len(shape)))
    return found


def group(cluster: Cluster, layout: Layout, axes: tuple[str, ...]) -> Group:
    """Where the devices lie that take part in a collective over these mesh axes.  Raises ValueError for a mesh that the cluster has no room for."""
    where, sides = places(layout.sizes, cluster.shape, cluster.hardware.torus), []
    for d in range(len(cluster.shape)):
        parts = [where[a][d] for a in axes if where[a][d].extent > 1]
        extent = math.prod(p.extent for p in parts)
        span = max((p.extent * p.stride for p in parts), default=1)
        sides.append(Side(extent, -(-span // extent)))
    return Group(tuple(sides))


def link(cluster: Cluster, layout: Layout, axes: tuple[str, ...]) -> Link:
    """The effective link of a gather or a scatter over these mesh axes: bytes that a device sends a second, and the seconds of its steps."""
    h, g = cluster.hardware, group(cluster, layout, axes)
    inner, outer = _split(cluster, g)
    here, apart = math.prod(s.extent for s in inner), math.prod(s.extent for s in outer)
    rates, late = [], 0.0
    if here > 1:
        rate, late = _torus(cluster, inner) if h.torus else (h.inside.rate, h.inside.latency * steps(h.platform, here))
        rates.append(rate)
    if apart > 1:
        rates.append(here * h.between.rate)
        late += h.between.latency * steps(h.platform, apart)
    return Link(min(rates, default=math.inf), late)


def _split(cluster: Cluster, g: Group) -> tuple[tuple[Side, ...], tuple[Side, ...]]:
    """The dimensions that `inside` joins, and those that `between` does."""
    n = cluster.hardware.torus or 1
    return g.sides[-n:], g.sides[:-n]


def steps(platform: str, n: int) -> int:
    """Steps of a collective over a switch; on a CPU each device wakes all others, one after the other."""
    return n if platform == "cpu" else math.ceil(math.log2(n))


def _wraps(cluster: Cluster, d: int, side: Side) -> bool:
    """Whether a group goes all the way around a dimension that is a ring.  d: counted within the torus."""
    length = cluster.shape[-cluster.hardware.torus :][d]
    return side.extent * side.stride == length and length % cluster.hardware.wrap == 0


def _torus(cluster: Cluster, sides: tuple[Side, ...]) -> tuple[float, float]:
    """Rate and latency of a gather over parts of a torus."""
    h, rate, late = cluster.hardware, 0.0, 0.0
    for d, side in enumerate(sides):
        if side.extent > 1:
            ring = _wraps(cluster, d, side)
            rate += h.inside.rate * (2 if ring else 1) / side.stride
            late += h.inside.latency * side.stride * (side.extent // 2 if ring else side.extent - 1)
    return rate, late


def exchange(cluster: Cluster, layout: Layout, axes: tuple[str, ...]) -> float:
    """Seconds that a device needs for each byte of its array in an all-to-all over these mesh axes."""
    h, g = cluster.hardware, group(cluster, layout, axes)
    inner, _ = _split(cluster, g)
    here, n = math.prod(s.extent for s in inner), g.size
    away = (n - here) / n / h.between.rate if n > here else 0.0
    if not h.torus:
        return max(away, (here - 1) / n / h.inside.rate)
    loads = [s.extent * s.stride / (8 if _wraps(cluster, d, s) else 4) / h.inside.rate for d, s in enumerate(inner) if s.extent > 1]
    return max([away, *loads])


def neighbour(cluster: Cluster, layout: Layout, axes: tuple[str, ...]) -> Link:
    """The link to the next device along these mesh axes, the slowest of all steps of that kind."""
    h, g = cluster.hardware, group(cluster, layout, axes)
    inner, outer = _split(cluster, g)
    if any(s.extent > 1 for s in outer):
        return h.between
    if h.platform == "cpu":
        return h.inside._replace(latency=h.inside.latency * cluster.devices)
    far = max((s.stride for s in inner if s.extent > 1), default=1) if h.torus else 1
    return Link(h.inside.rate / far, h.inside.latency * far)


def seconds(c: Collective, layout: Layout, cluster: Cluster) -> float:
    """How long a step's collectives of one kind take, one after the other: each starts, makes its steps, and sends what `wire_bytes` says."""
    h = cluster.hardware
    if layout.size(c.axes) == 1:
        return 0.0
    around, slower = c.kind == "collective-permute", h.slower.get(c.kind, 1.0)
    way = (neighbour if around else link)(cluster, layout, c.axes)
    twice = 2 if c.kind == "all-reduce" and h.platform != "cpu" else 1
    sent = c.bytes * exchange(cluster, layout, c.axes) if c.kind == "all-to-all" else wire_bytes(c, layout) / way.rate
    return c.count * (h.start + twice * way.latency) + slower * sent
