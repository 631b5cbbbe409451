"""`layout: auto` beside layouts written by hand, on simulated devices of this CPU: steps in interleaved rounds, so that other work on the machine strikes all alike.

python benchmarks/plan_auto.py [--rounds 6] [--devices 8]
"""

import argparse
import os
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--rounds", type=int, default=6)
parser.add_argument("--devices", type=int, default=8)
GIVEN = parser.parse_args()
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={GIVEN.devices}"
sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

import jax
import numpy as np

from meshloom.core.batch import Batch
from meshloom.objectives.lm import lm
from meshloom.recipes.launch import choose, method
from meshloom.recipes.load import load_recipe
from meshloom.train.schedule import make_schedule
from meshloom.train.step import make_step

HAND = (
    "data=8",
    "zero1=8",
    "zero2=8",
    "zero3=8",
    "data=4 tensor=2",
    "zero1=4 tensor=2 sequence",
    "data=2 zero3=4",
    "tensor=8",
    "zero1=4 context=2",
)
"""What a person would write."""


def stepper(layout: str):
    """A recipe's step under a layout, compiled, with a batch; and what it is."""
    config = load_recipe("quickstart", [f"layout={layout}"])
    chosen = choose(config)
    plan, c, m = chosen.plan, chosen.config, method(config)
    schedule = make_schedule(config.schedule, config.optimizer.lr, 100)
    made = make_step(chosen.model, c, plan, lm(), m.optimizer, schedule, config.train, 0, 1)
    state = made.start()
    shape = (plan.micro, config.batch.sequences // plan.micro, config.data.seq)
    pick = np.random.default_rng(0)
    fields = {
        "tokens": pick.integers(0, c.vocab, shape, np.int32), "targets": pick.integers(0, c.vocab, shape, np.int32),
        "weights": np.ones(shape, np.float32), "positions": np.broadcast_to(np.arange(shape[2], dtype=np.int32), shape),
        "segments": np.ones(shape, np.int32), "samples": np.arange(shape[0] * shape[1], dtype=np.int32).reshape(shape[:2]),
    }  # fmt: skip
    put = lambda name: jax.device_put(fields[name], getattr(made.batch_shardings, name))
    return chosen.spelling, [made, state, Batch(**{name: put(name) for name in fields})]


def main() -> None:
    """Prints the table."""
    runs = {name: stepper(name) for name in ("auto", *HAND)}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(GIVEN.rounds + 1):
        for name, (_, held) in runs.items():
            begin = time.process_time()
            held[1], _ = held[0].run(held[1], held[2])
            jax.block_until_ready(held[1])
            if number:  # the first compiles
                times[name].append(time.process_time() - begin)
    middle = {name: float(np.median(t)) for name, t in times.items()}
    best = min(middle[name] for name in HAND)
    print(
        f"auto is {runs['auto'][0]}; {GIVEN.rounds} interleaved rounds, seconds of the cores a step\n\n| layout | median | least | of the best by hand |\n|---|---|---|---|"
    )
    for name in sorted(middle, key=lambda n: middle[n]):
        said = f"**auto** ({runs[name][0]})" if name == "auto" else f"`{name}`"
        print(f"| {said} | {middle[name]:.3f} | {min(times[name]):.3f} | {middle[name] / best:.3f} |")


if __name__ == "__main__":
    main()
