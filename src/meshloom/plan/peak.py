"""The highest rate of arithmetic of the devices at hand, for MFU."""

import functools
import time

import jax
import jax.numpy as jnp

PEAKS = {
    "NVIDIA A100": {"bf16": 312e12, "fp16": 312e12, "fp32": 19.5e12},
    "NVIDIA H100": {"bf16": 989e12, "fp16": 989e12, "fp32": 67e12},
    "NVIDIA H200": {"bf16": 989e12, "fp16": 989e12, "fp32": 67e12},
    "NVIDIA B200": {"bf16": 2250e12, "fp16": 2250e12, "fp32": 75e12},
    "NVIDIA L40S": {"bf16": 362e12, "fp16": 362e12, "fp32": 91.6e12},
    "NVIDIA GeForce RTX 4090": {"bf16": 165.2e12, "fp16": 165.2e12, "fp32": 82.6e12},
    "TPU v4": {"bf16": 275e12},
    "TPU v5 lite": {"bf16": 197e12},
    "TPU v5": {"bf16": 459e12},
    "TPU v6 lite": {"bf16": 918e12},
}
"""Dense peaks a device, operations a second, by the start of JAX's device kind. Source: the makers' data sheets."""


@functools.cache
def peak(precision: str) -> float | None:
    """Operations a second of one device; None where it is not in the table. A CPU is measured: all its cores, shared by its simulated devices."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return measured() / len(jax.local_devices())
    known = [kind for kind in PEAKS if device.device_kind.startswith(kind)]
    return PEAKS[max(known, key=len)].get(precision) if known else None


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
