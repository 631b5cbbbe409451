"""What a layout of an array costs: bytes on a device, what a change of layout moves, seconds of that and of arithmetic."""

import math
from collections.abc import Mapping
from typing import NamedTuple

Spec = tuple[int, ...]
"""For every mesh axis, the array axis that it splits, or WHOLE."""
WHOLE = -1


class Move(NamedTuple):
    """One collective.  kind: as XLA names it.  bytes: the larger of what goes in and what comes out, on one device, as plan.hlo counts."""

    kind: str
    axes: tuple[int, ...]
    bytes: int


class Rates(NamedTuple):
    """What seconds follow from.  sizes: devices on each mesh axis, outermost first.  flops: a second, of one device, that large products reach, by
    type.  bandwidth: bytes a second to its memory.  ways: (kind of collective, mesh axes) -> seconds of one, and seconds for each byte.
    memory: bytes of a device.  label: the machine in words."""

    sizes: Mapping[str, int]
    flops: Mapping[str, float]
    bandwidth: float
    ways: Mapping[tuple[str, tuple[int, ...]], tuple[float, float]]
    memory: int
    label: str

    @property
    def mesh(self) -> tuple[int, ...]:
        """Devices on each mesh axis."""
        return tuple(self.sizes.values())

    def devices(self, axes: tuple[int, ...]) -> int:
        """Devices along these mesh axes together."""
        return math.prod(self.mesh[a] for a in axes)

    def moved(self, move: Move) -> float:
        """Seconds of one collective."""
        one, each = self.ways[move.kind, move.axes]
        return one + each * move.bytes

    def computed(self, flops: float, dtype: str) -> float:
        """Seconds of this many operations on one device."""
        return flops / self.flops.get(dtype, self.flops["float32"])

    def touched(self, size: float) -> float:
        """Seconds to read or write these bytes on one device."""
        return size / self.bandwidth


def parts(spec: Spec, mesh: tuple[int, ...]) -> int:
    """Devices that share an array."""
    return math.prod(n for n, d in zip(mesh, spec) if d != WHOLE)


def specs(shape: tuple[int, ...], mesh: tuple[int, ...]) -> list[Spec]:
    """Every way to split an array: each mesh axis over one axis that it divides, or over none. The whole array comes first."""
    found: list[Spec] = [()]
    for _ in mesh:
        found = [(*s, d) for s in found for d in range(-1, len(shape))]
    return [s for s in found if divides(s, shape, mesh)]


def divides(spec: Spec, shape: tuple[int, ...], mesh: tuple[int, ...]) -> bool:
    """Whether each axis is divisible by the devices that split it."""
    return all(shape[d] % math.prod(n for n, e in zip(mesh, spec) if e == d) == 0 for d in set(spec) if d != WHOLE)


def reshard(have: Spec, want: Spec, size: int, mesh: tuple[int, ...]) -> tuple[Move, ...]:
    """What takes an array of `size` bytes from one layout to another: devices first keep their part along mesh axes that split it anew (free), then
    exchange, then gather. Where two mesh axes split one array axis the outer one comes first, so that one cannot come or go under the other without
    devices changing places."""
    if have == want:
        return ()
    now, moves = list(have), []
    for x, (h, w) in enumerate(zip(have, want)):
        if h == WHOLE and w != WHOLE:
            under = nested(x, w, now)
            now[x] = w
            moves += _places(now, w, size, mesh) if under else []
    for x, w in enumerate(want):
        if now[x] != w and w != WHOLE:
            for d in (now[x], w):
                moves += _places(now, d, size, mesh) if nested(x, d, now) else []
            moves.append(Move("all-to-all", (x,), size // parts(tuple(now), mesh)))
            now[x] = w
    left = [x for x, w in enumerate(want) if now[x] != w]
    for d in sorted({now[x] for x in left}):
        axes = tuple(x for x in left if now[x] == d)
        stay = [x for x, e in enumerate(now) if e == d and x not in axes]
        moves += _places(now, d, size, mesh) if stay and min(axes) < max(stay) else []
        for x in axes:
            now[x] = WHOLE
        moves.append(Move("all-gather", axes, size // parts(tuple(now), mesh)))
    return tuple(m for m in moves if math.prod(mesh[a] for a in m.axes) > 1)


def nested(axis: int, d: int, spec: list[int] | Spec) -> bool:
    """Whether a mesh axis that comes to, or leaves, array axis `d` has another one inside it there."""
    return any(e == d and x > axis for x, e in enumerate(spec))


def _places(now: list[int], d: int, size: int, mesh: tuple[int, ...]) -> list[Move]:
    """Devices change places along the mesh axes that split one array axis."""
    return [Move("collective-permute", tuple(x for x, e in enumerate(now) if e == d), size // parts(tuple(now), mesh))]
