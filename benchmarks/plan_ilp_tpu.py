"""Plans of `ml.parallelize` beside what a TPU's compiler makes of them: memory of a device and collectives. Needs libtpu, no TPU; minutes.

    PYTHONPATH=src python benchmarks/plan_ilp_tpu.py [--memory 175MB] [--mesh "x=8"]

The program is a step of Adam on six residual MLPs (1024 wide, 4096 inside, 8192 rows), each computed again in the backward pass."""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import topologies
from jax.sharding import Mesh

import meshloom as ml
from meshloom.plan.hlo import collectives, total

ADAM = optax.adam(1e-2)
TOPOLOGY = "v5e:2x4"


def step(p, s, x):
    """New parameters and state, and the loss."""

    def block(q, y):
        return y + jax.nn.relu(y @ q["up"]) @ q["down"]

    def loss(p):
        y = x
        for q in p:
            y = jax.checkpoint(block)(q, y)
        return jnp.mean(y * y)

    value, grad = jax.value_and_grad(loss)(p)
    change, s = ADAM.update(grad, s, p)
    return optax.apply_updates(p, change), s, value


def main() -> None:
    """The plan's numbers, then the compiler's."""
    asked = argparse.ArgumentParser(description="Plans beside a TPU's compiler.")
    asked.add_argument("--mesh", default="x=8")
    asked.add_argument("--memory", default=None)
    a = asked.parse_args()
    sizes = {name: int(n) for name, n in (word.split("=") for word in a.mesh.split())}
    devices = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGY).devices
    f = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    p = [{"up": f(1024, 4096), "down": f(4096, 1024)} for _ in range(6)]
    args = (p, jax.eval_shape(ADAM.init, p), f(8192, 1024))
    mesh = Mesh(np.array(devices).reshape(tuple(sizes.values())), tuple(sizes))
    made = ml.parallelize(step, args, mesh=mesh, batch_argnums=2, donate_argnums=(0, 1), memory=a.memory, on=TOPOLOGY)
    compiled = made.lower(*args).compile()
    memory = compiled.memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes - memory.alias_size_in_bytes
    print(
        f"memory of a device: planned {made.plan.memory / 1e6:.0f} MB, compiled {held / 1e6:.0f} MB, peak {memory.peak_memory_in_bytes / 1e6:.0f} MB"
    )
    print("planned ", made.plan.total)
    print("compiled", total(collectives(compiled.as_text(), sizes)))


if __name__ == "__main__":
    main()
