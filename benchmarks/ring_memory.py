"""Bytes that attention in a ring adds on a device, from 4k to 64k tokens, as the compiler of a TPU (or of this CPU) lays them out.

    python benchmarks/ring_memory.py --topology v5e:2x4 [--what attention | step] [--devices 4,8] [--lengths 4096,...]

Nothing runs and no TPU is needed: the program is compiled ahead of time for a topology (package `libtpu`), and `memory_analysis()` of the compiled program
is read. Without `libtpu`, `--topology cpu` compiles for simulated CPU devices. Forward and backward of one attention call, or a whole train step.
"""

import argparse
import os
from typing import Any

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--topology", default="cpu", help="such as v5e:2x4, or cpu")
parser.add_argument("--what", default="attention", choices=("attention", "step"))
parser.add_argument("--devices", default="4,8")
parser.add_argument("--lengths", default="4096,8192,16384,32768,65536")
parser.add_argument("--layout", default="context={n}", help="of a step, with {n} for the devices")
HEADS, KV_HEADS, HEAD = 8, 2, 128
MODEL = dict(layers=4, embed=1024, heads=HEADS, kv_heads=KV_HEADS, head=HEAD, ffn=2816, vocab=32000, max_seq=1 << 17)
MIB = 1 << 20


def devices_of(topology: str) -> list[Any]:
    """The devices of a topology, or simulated ones."""
    if topology != "cpu":
        from tpu import devices

        return devices(topology)
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    import jax

    jax.config.update("jax_platforms", "cpu")
    return jax.devices()


def attention(n: int, length: int, devices: list[Any]) -> Any:
    """The compiled program of one call, forward and backward: one row, bf16, 8 heads of 128 (2 for keys), causal."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from meshloom.core.mesh import make_mesh
    from meshloom.ops.ring import ring_attention
    from meshloom.parallel.context import CONTEXT

    mesh, split = make_mesh(CONTEXT.layout(n), devices), PartitionSpec(None, "context")
    local = lambda q, k, v: ring_attention(q, k, v, axes=("context",), ring=n, scale=HEAD**-0.5)
    ring = jax.shard_map(local, mesh=mesh, in_specs=split, out_specs=split)

    def both(q: Any, k: Any, v: Any, dy: Any) -> Any:
        y, back = jax.vjp(ring, q, k, v)
        return y, back(dy)

    arrays = [
        jax.ShapeDtypeStruct((1, length, h, HEAD), jnp.bfloat16, sharding=NamedSharding(mesh, split))
        for h in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    ]
    return jax.jit(both).lower(*arrays).compile()


def step(n: int, length: int, devices: list[Any], layout: str) -> Any:
    """The compiled gradient of a small Llama: one row, bf16, 4 layers of width 1,024, remat full."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from meshloom.core.batch import Batch
    from meshloom.core.mesh import make_mesh, shardings
    from meshloom.core.order import padded
    from meshloom.core.spec import abstract
    from meshloom.models.table import MODELS
    from meshloom.objectives.lm import lm
    from meshloom.parallel.table import build
    from meshloom.plan.plan import Plan
    from meshloom.runner.run import How
    from meshloom.train.gradient import batch_shardings, make_gradient

    model = MODELS["llama"]
    c = model.Config(**MODEL)
    lay = build(layout.format(n=n), c, length, devices[0].platform)
    plan = Plan(make_mesh(lay, devices), lay, How("scan", "full"), 1, "bfloat16")
    where, rows = batch_shardings(plan), lay.size(lay.batch)
    of = lambda kind, at: jax.ShapeDtypeStruct((1, rows, padded(lay, length)), kind, sharding=at)
    ints = {name: of(jnp.int32, getattr(where, name)) for name in ("tokens", "targets", "segments", "positions")}
    samples = jax.ShapeDtypeStruct((1, rows), jnp.int32, sharding=where.samples)
    batch = Batch(**ints, weights=of(jnp.float32, where.weights), samples=samples)
    params = abstract(model.specs(c), shardings(plan.mesh, lay, "rest", model.specs(c)))
    scale = jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(plan.mesh, PartitionSpec()))
    return jax.jit(make_gradient(model, c, plan, lm())).lower(params, batch, None, scale).compile()


def main() -> None:
    """Prints a Markdown table."""
    given = parser.parse_args()
    devices = devices_of(given.topology)
    counts, lengths = ([int(n) for n in text.split(",")] for text in (given.devices, given.lengths))
    print("| tokens | " + " | ".join(f"{n} devices, MiB" for n in counts) + " | scores of one head, whole, MiB |", flush=True)
    print("| --- |" + " --- |" * (len(counts) + 1), flush=True)
    for length in lengths:
        cells = []
        for n in counts:
            compiled = attention(n, length, devices) if given.what == "attention" else step(n, length, devices, given.layout)
            cells.append(f"{compiled.memory_analysis().temp_size_in_bytes / MIB:,.1f}")
        print(f"| {length:,} | " + " | ".join(cells) + f" | {length * length * 4 / MIB:,.0f} |", flush=True)


if __name__ == "__main__":
    main()
