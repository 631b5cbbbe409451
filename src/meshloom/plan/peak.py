"""The highest rate of arithmetic of the devices at hand, for MFU."""

import functools
import time

import jax
import jax.numpy as jnp

from meshloom.plan.hardware import kind_of

NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""How a recipe calls a type -> how hardware.yaml does."""


@functools.cache
def peak(precision: str) -> float | None:
    """Operations a second of one device; None where it is not in the table. A CPU is measured: all its cores, shared by its simulated devices."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return measured() / len(jax.local_devices())
    found = kind_of(device)
    return found.flops.get(NAMES[precision]) if found else None


def measured(size: int = 1024, tries: int = 4) -> float:
    """The best rate of a few fp32 matrix products on this machine, operations a second. Takes about 0.1 s on two cores."""
    x = jnp.ones((size, size), jnp.float32)
    product = jax.jit(lambda a: a @ a)
    product(x).block_until_ready()
    times = []
    for _ in range(tries):
        begin = time.perf_counter()
        product(x).block_until_ready()
        times.append(time.perf_counter() - begin)
    return 2 * size**3 / min(times)
