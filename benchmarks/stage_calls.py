"""What a call of a stage's program, or a move of its message, costs the process that issues them (`runner/stages.py`).

    python benchmarks/stage_calls.py [--stages 4] [--micro 16] [--arrays 4,40,400]

Stages that compute next to nothing, on simulated CPU devices, 1F1B. It prints, for each number of parameters of a stage, the calls of a step and the CPU
time of the issuing thread by call: the least of several steps, so that a busy machine does not disturb it.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np

from meshloom.parallel.schedules import make
from meshloom.runner.stages import Stage, calls, place, submeshes, value_and_grad

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--stages", type=int, default=4)
parser.add_argument("--micro", type=int, default=16)
parser.add_argument("--arrays", default="4,40,400")
parser.add_argument("--steps", type=int, default=20)


def main() -> None:
    """A line for each number of arrays."""
    asked = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", asked.stages)
    total = lambda w: sum(w[name][0] for name in w)
    inner = Stage(lambda w, x, data: x + total(w))
    stages = [
        Stage(lambda w, x, data: data["x"] + total(w), ("x",)),
        *[inner] * (asked.stages - 2),
        Stage(lambda w, x, d: jnp.sum(x) + total(w)),
    ]
    schedule, meshes = make("1f1b", len(stages), asked.micro), submeshes([{"data": 1}] * len(stages))
    step, many = value_and_grad(stages, schedule, meshes), calls(stages, schedule)
    for arrays in map(int, asked.arrays.split(",")):
        params = place(stages, schedule, meshes, [{str(i): np.ones(3, np.float32) for i in range(arrays)} for _ in stages])
        spent = []
        for _ in range(asked.steps):
            begun = time.thread_time()
            done = step(params, {"x": np.ones((asked.micro, 8), np.float32)})
            spent.append(time.thread_time() - begun)
            jax.block_until_ready(done)
        each = min(spent) / sum(many) * 1e6
        print(
            f"{arrays} parameters a stage: {many.programs} programs and {many.moves} moves, {each:.0f} us each, {min(spent) * 1e3:.1f} ms a step"
        )


if __name__ == "__main__":
    main()
