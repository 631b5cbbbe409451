"""What this machine can do, measured: products by type, memory, collectives by size."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from meshloom.plan.hardware import Hardware, Link


def best(run: Callable[[], Any], tries: int = 4) -> float:
    """Seconds of the fastest of a few runs, behind one that compiles."""
    jax.block_until_ready(run())
    times = []
    for _ in range(tries):
        begin = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - begin)
    return min(times)


def of_cpu(devices: int, kept: Path | None) -> Hardware:
    """This machine."""
    x, y = jnp.ones((1024, 1024), jnp.float32), jnp.ones(2**24, jnp.float32)
    product, add = jax.jit(lambda a: a @ a), jax.jit(lambda a: a + 1)
    flops = 2 * 1024**3 / best(lambda: product(x))
    memory = 2 * y.nbytes / best(lambda: add(y))
    link = Link(memory / 2, 5e-5)
    kinds = {"float32": flops, "bfloat16": flops / 4, "float16": flops / 4}
    return Hardware("cpu", "cpu", 16 * 2**30, memory, kinds, 1.0, devices, link, link, 0, ("measured",), shared=True)
