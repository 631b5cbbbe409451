"""The machine that a plan is for: its rates along the axes of a mesh, and its memory."""

import itertools
import math
import re
from collections.abc import Mapping

from meshloom.auto.price import Rates
from meshloom.core.layout import Layout
from meshloom.parallel.base import Collective
from meshloom.plan.hardware import Cluster
from meshloom.plan.hlo import KINDS
from meshloom.plan.link import seconds

BYTES = 10**9
"""Of the collective by which the seconds for each byte are measured."""
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def rates(cluster: Cluster, sizes: Mapping[str, int]) -> Rates:
    """What a mesh over a cluster can do. Mesh axes of one device are left out.  Raises ValueError if the mesh has more devices than the cluster."""
    h, need = cluster.hardware, math.prod(sizes.values())
    if need > cluster.devices:
        asked = " ".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(
            f"The mesh {asked} has {need} devices, and {cluster.label} has {cluster.devices}. Use a smaller mesh, or a larger machine with "
            f"on='{h.name}:...'."
        )
    split = {name: size for name, size in sizes.items() if size > 1}
    flops = {dtype: rate * h.efficiency for dtype, rate in h.flops.items()}
    flops.setdefault("float32", min(flops.values()))
    return Rates(split, flops, h.bandwidth * h.stream, ways(cluster, split), h.memory, cluster.label)


def ways(cluster: Cluster, sizes: Mapping[str, int]) -> dict[tuple[str, tuple[int, ...]], tuple[float, float]]:
    """(kind of collective, numbers of mesh axes) -> seconds of one, and seconds for each byte: the lines that `plan.link.seconds` draws."""
    layout, names, found = Layout(sizes), list(sizes), {}
    for kind in KINDS:
        for n in range(1, len(names) + 1):
            for axes in itertools.combinations(range(len(names)), n):
                one = Collective(kind, tuple(names[a] for a in axes), 1, 0, "step", "")
                bare = seconds(one, layout, cluster)
                found[kind, axes] = (bare, (seconds(one._replace(bytes=BYTES), layout, cluster) - bare) / BYTES)
    return found


def size(said: int | float | str) -> int:
    """Bytes, from a number or from words like "40GB".  Raises ValueError for what is neither, and for none at all."""
    found = _SIZE.fullmatch(said) if isinstance(said, str) else None
    if isinstance(said, str) and (not found or found[2].upper() not in UNITS):
        raise ValueError(f"'{said}' is no size of memory. Write bytes, or a number with one of KB, MB, GB, KiB, MiB, GiB: '40GB'.")
    whole = float(found[1]) * UNITS[found[2].upper()] if found else float(said)
    if not 0 < whole < math.inf:
        raise ValueError(f"memory={said!r} is no memory of a device. Give the bytes of one device, like '40GB'.")
    return int(whole)
