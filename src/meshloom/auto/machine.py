"""The machine that a plan is for: its rates along the axes of a mesh, and its memory."""

import math
import re
from collections.abc import Mapping

from meshloom.auto.price import Rates
from meshloom.plan.hardware import Cluster, Link

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
    links = [_link(cluster, math.prod(list(split.values())[i:])) for i in range(len(split))]
    flops = {dtype: rate * h.efficiency for dtype, rate in h.flops.items()}
    flops.setdefault("float32", min(flops.values()))
    return Rates(
        split, flops, h.bandwidth * h.stream, tuple(l.rate for l in links), tuple(l.latency for l in links), h.start, h.memory, cluster.label
    )  # fmt: skip


def _link(cluster: Cluster, reach: int) -> Link:
    """The link along a mesh axis that, with the axes inside it, spans `reach` devices: that of a node or slice while these fit into one."""
    return cluster.hardware.inside if reach <= cluster.devices // cluster.slices else cluster.hardware.between


def size(said: int | float | str) -> int:
    """Bytes, from a number or from words like "40GB".  Raises ValueError for what is neither, and for none at all."""
    found = _SIZE.fullmatch(said) if isinstance(said, str) else None
    if isinstance(said, str) and (not found or found[2].upper() not in UNITS):
        raise ValueError(f"'{said}' is no size of memory. Write bytes, or a number with one of KB, MB, GB, KiB, MiB, GiB: '40GB'.")
    whole = float(found[1]) * UNITS[found[2].upper()] if found else float(said)
    if whole <= 0:
        raise ValueError(f"memory={said!r} leaves a device no memory. Give the bytes of one device, like '40GB'.")
    return int(whole)
