"""What the present devices can do, measured on all of them at once: products by type and size, memory, kernels, collectives by kind, size and devices.

Every figure is the fastest of several runs, since other work on a machine only makes them slower, and of a program that does the thing many times,
so that the call itself does not count.
"""

import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from meshloom.core.files import human
from meshloom.core.vary import vary

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
"""Collectives that are measured."""


class Point(NamedTuple):
    """One measurement. what: "products", "memory", "kernel" or a collective. n: devices that take part. size: rows of a product, bytes of an array.
    seconds: of one."""

    what: str
    n: int
    size: int
    seconds: float
    dtype: str = ""


class Effort(NamedTuple):
    """How much is measured. products: rows of square matrices, by type. bytes: of arrays in memory. groups: devices of a collective, at most so many
    numbers. moved: bytes of arrays in collectives. seconds: of one program at least, to look past its call. tries: runs of which the fastest counts."""

    products: Mapping[str, tuple[int, ...]]
    bytes: tuple[int, ...]
    moved: tuple[int, ...]
    groups: int
    seconds: float
    tries: int


EFFORTS = {
    "cpu": Effort({"float32": (128, 256, 512), "bfloat16": (256,), "float16": (256,)}, (1 << 22, 1 << 24), (1 << 12, 1 << 20, 1 << 22), 8, 0.01, 6),
    "quick": Effort({"float32": (128, 512), "bfloat16": (256,)}, (1 << 22,), (1 << 12, 1 << 22), 2, 0.01, 4),
    "other": Effort({t: (2048, 4096, 8192) for t in ("float32", "bfloat16", "float16")}, (1 << 28,), (1 << 12, 1 << 20, 1 << 27), 8, 0.05, 6),
}  # fmt: skip
"""Of simulated devices; of these in some ten seconds; of accelerators."""


def clock(platform: str) -> float:
    """Seconds since some moment. Of simulated devices, which keep all cores busy, those that the cores worked for this process, shared over them: so
    other work on the machine does not count."""
    return time.process_time() / cores() if platform == "cpu" else time.perf_counter()


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def seconds_of(run: Callable[[], Any], tries: int, platform: str) -> float:
    """Seconds of the fastest of a few runs, behind one that compiles."""
    jax.block_until_ready(run())
    times = []
    for _ in range(tries):
        begin = clock(platform)
        jax.block_until_ready(run())
        times.append(clock(platform) - begin)
    return min(times)


def repeated(step: Callable[[Any, Any], Any], given: tuple[jax.Array, ...], mesh: Mesh, effort: Effort) -> float:
    """Seconds of one `step`, a function of one device's state and of what does not change, done over and over by all devices of a mesh.
    given: of all devices, their first axis split over them; the first is the state."""
    axes = mesh.axis_names
    split = PartitionSpec(axes)

    def local(times: jax.Array, state: jax.Array, *rest: jax.Array) -> jax.Array:
        return lax.fori_loop(0, times, lambda _, s: vary(step(s, rest), frozenset(axes)), state)

    many = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(PartitionSpec(), *(split,) * len(given)), out_specs=split))
    platform = mesh.devices.flat[0].platform
    once = seconds_of(lambda: many(2, *given), 2, platform) / 2
    times = int(max(4, min(2000, effort.seconds / max(once, 1e-7))))
    return seconds_of(lambda: many(times, *given), effort.tries, platform) / times


def mesh_of(devices: list, n: int) -> Mesh:
    """All devices as groups of n neighbours: mesh axes `rest`, `group`."""
    return Mesh(np.array(devices[: len(devices) // n * n]).reshape(-1, n), ("rest", "group"))


def spread(mesh: Mesh, shape: tuple[int, ...], dtype: str = "float32") -> jax.Array:
    """Small numbers, an array of that shape on each device."""
    where = jax.NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    return jax.jit(lambda: jnp.full((mesh.size * shape[0], *shape[1:]), 1e-3, dtype), out_shardings=where)()


def products(devices: list, dtype: str, rows: int, effort: Effort) -> Point:
    """A product of square matrices, on all devices at once."""
    mesh = mesh_of(devices, len(devices))
    x, w = (spread(mesh, (rows, rows), dtype) for _ in range(2))
    took = repeated(lambda s, rest: lax.dot(s, rest[0]), (x, w), mesh, effort)
    return Point("products", len(devices), rows, took, dtype)


def memory(devices: list, size: int, effort: Effort) -> Point:
    """An array read and another written, on all devices at once.  size: bytes of one."""
    mesh = mesh_of(devices, len(devices))
    took = repeated(lambda s, _: s * 1.000001 + 1e-9, (spread(mesh, (size // 4,)),), mesh, effort)
    return Point("memory", len(devices), size, took, "float32")


def between(devices: list, size: int, effort: Effort) -> Point:
    """A norm and a gated activation of an array, on all devices at once: what lies between products.  size: bytes of the array, 256 features wide."""
    mesh = mesh_of(devices, len(devices))

    def norm(s: jax.Array) -> jax.Array:
        return s * lax.rsqrt((s * s).mean(-1, keepdims=True) + 1e-5)

    took = repeated(lambda s, _: jax.nn.silu(lax.optimization_barrier(norm(s))) * s, (spread(mesh, (size // 1024, 256)),), mesh, effort)
    return Point("between", len(devices), size, took, "float32")


def kernel(devices: list, effort: Effort) -> Point:
    """A product too small to take time, on all devices at once: what is left is the kernel's start."""
    mesh = mesh_of(devices, len(devices))
    x, w = (spread(mesh, (8, 8)) for _ in range(2))

    def ten(s: jax.Array, rest: Any) -> jax.Array:
        for _ in range(10):
            s = lax.optimization_barrier(lax.dot(s, rest[0]))
        return s

    return Point("kernel", len(devices), 8, repeated(ten, (x, w), mesh, effort) / 10)


def _moved(kind: str, n: int) -> Callable[[jax.Array, Any], jax.Array]:
    """A collective over `group` whose result can be its input."""
    around = [(i, (i + 1) % n) for i in range(n)]
    return {
        "all-gather": lambda s, _: lax.all_gather(s, "group", tiled=True)[: s.shape[0]],
        "reduce-scatter": lambda s, _: jnp.tile(lax.psum_scatter(s, "group", tiled=True), n) * (1 / n),
        "all-reduce": lambda s, _: lax.psum(s, "group") * (1 / n),
        "all-to-all": lambda s, _: lax.all_to_all(s.reshape(n, -1), "group", 0, 0).reshape(-1),
        "collective-permute": lambda s, _: lax.ppermute(s, "group", around),
    }[kind]


BESIDE = {
    "reduce-scatter": lambda n: lambda s, _: jnp.tile(s[: len(s) // n], n) * (1 / n),
    "all-reduce": lambda n: lambda s, _: s * (1 / n),
}
"""What `_moved` does beside moving, whose time is taken off."""


def collective(devices: list, kind: str, n: int, size: int, effort: Effort) -> Point:
    """A collective of groups of n neighbours, all groups at once.  size: bytes of the whole array, as `parallel.base.Collective` counts them."""
    mesh = mesh_of(devices, n)
    own = size // 4 // (n if kind == "all-gather" else 1)
    given = (spread(mesh, (max(n, own // n * n),)),)
    took = repeated(_moved(kind, n), given, mesh, effort)
    still = repeated(BESIDE[kind](n), given, mesh, effort) if kind in BESIDE else 0.0
    return Point(kind, n, size, max(took - still, 0.1 * took), "float32")


def groups(count: int, most: int) -> list[int]:
    """Powers of two from 2 up to the devices that there are; the first and the last ones where only some are wanted."""
    found = [n for n in (2**i for i in range(1, 20)) if n <= count]
    return found if len(found) <= most else [*found[: most // 2], *found[-(most - most // 2) :]]


def plan(devices: list, effort: Effort) -> list[tuple[str, Callable[[], Point]]]:
    """What to measure, each with a phrase that says what it is."""
    todo: list[tuple[str, Callable[[], Point]]] = []
    for dtype, sizes in effort.products.items():
        todo += [(f"{dtype} products of {rows} rows", partial(products, devices, dtype, rows, effort)) for rows in sizes]
    todo += [(f"memory, {human(size)}", partial(memory, devices, size, effort)) for size in effort.bytes]
    todo.append(("between products", partial(between, devices, effort.bytes[0] // 4, effort)))
    todo.append(("start of a kernel", partial(kernel, devices, effort)))
    for kind in KINDS:
        for n in groups(len(devices), effort.groups):
            todo += [(f"{kind} of {n}, {human(size)}", partial(collective, devices, kind, n, size, effort)) for size in effort.moved]
    return todo
