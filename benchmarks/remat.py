"""What patterns of remat cost and save on this CPU, and whether the chosen ones are the best: compiled bytes, steps measured in turns.

python benchmarks/remat.py [--rounds 5] > benchmarks/remat.json

One device, the whole train step, layers in a loop. Time is the processor's, over all cores, so that what else runs on the machine counts little.
Limits are bytes that a step may add to what is stored, by the formulas; the compiler's bytes of the chosen pattern stand beside them. docs/remat.md
shows the tables.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

import jax
import numpy as np

from meshloom.core.batch import Batch
from meshloom.core.mesh import make_mesh
from meshloom.core.remat import spelled, words_of
from meshloom.core.spec import init
from meshloom.models.table import MODELS
from meshloom.objectives.lm import lm
from meshloom.parallel.table import build
from meshloom.plan.cost import shapes
from meshloom.plan.hardware import read
from meshloom.plan.memory import stored
from meshloom.plan.plan import Plan
from meshloom.plan.remat import choose
from meshloom.runner.run import How
from meshloom.train.config import OptimizerConfig, ScheduleConfig, TrainConfig
from meshloom.train.schedule import make_schedule
from meshloom.train.step import make_step

MODEL = {"family": "llama", "layers": 8, "embed": 128, "heads": 4, "kv_heads": 4, "ffn": 344, "vocab": 512, "max_seq": 256}
SEQ, ROWS = 256, 8
PATTERNS = ("none", "selective", "full", "full 4, none 4", "full:2")
SHARES = (0.35, 0.6, 0.85)
"""Limits, between what `full` and `none` need by the formulas."""


def case() -> tuple[Any, Any, Any]:
    """Model, configuration, layout of one device."""
    model = MODELS[MODEL["family"]]
    c = model.Config(**MODEL)
    return model, c, build("", c, SEQ, "cpu")


def program(remat: str) -> tuple[Any, Any, Any]:
    """The compiled step, its state and a batch."""
    model, c, lay = case()
    plan = Plan(make_mesh(lay), lay, How("scan", remat), 1, "float32", packed=False)
    schedule = make_schedule(ScheduleConfig(kind="constant"), 1e-3, 10)
    step = make_step(model, c, plan, lm(), OptimizerConfig(), schedule, TrainConfig(steps=10), 0, 1)
    state = step.start(init(model.specs(c), jax.random.key(0), step.shardings.params))
    rng, shape = np.random.default_rng(0), (1, ROWS, SEQ)
    tokens = rng.integers(0, c.vocab, (1, ROWS, SEQ + 1)).astype(np.int32)
    where = np.broadcast_to(np.arange(SEQ, dtype=np.int32), shape)
    rows = Batch(tokens[..., :-1], tokens[..., 1:], np.ones(shape, np.float32), None, where, np.arange(ROWS, dtype=np.int32)[None])
    rows = jax.tree.map(jax.device_put, rows, step.batch_shardings)
    return step.run.lower(state, rows).compile(), state, rows


def measured(patterns: list[str], rounds: int) -> dict[str, dict[str, float]]:
    """Pattern -> bytes that the compiler says a step adds, processor seconds (of all cores) of the cheapest of its steps, all patterns in turns."""
    made = {remat: program(remat) for remat in patterns}
    states = {remat: state for remat, (_, state, _) in made.items()}
    took: dict[str, list[float]] = {remat: [] for remat in patterns}
    for turn in range(rounds + 1):
        for remat, (step, _, rows) in made.items():
            begin = time.process_time()
            states[remat], told = step(states[remat], rows)
            jax.block_until_ready((states[remat], told))
            took[remat] += [time.process_time() - begin] * (turn > 0)
    return {
        remat: {
            "temp": made[remat][0].memory_analysis().temp_size_in_bytes,
            "seconds": min(took[remat]),
            "median": float(np.median(took[remat])),
        }
        for remat in patterns
    }


def main() -> None:
    """Prints the rows."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--rounds", type=int, default=5)
    rounds = asked.parse_args().rounds
    model, c, lay = case()
    cluster = read("cpu:1")
    x = shapes(model, c, lay, SEQ, ROWS, 1, How("scan"), "float32", False)
    given = model, x, "", cluster
    alone = choose(*given, 10**15).alone
    limits = [int(alone["full"][0] + share * (alone["none"][0] - alone["full"][0])) for share in SHARES]
    chosen = {limit: choose(*given, limit) for limit in limits}
    patterns = list(dict.fromkeys(spelled(words_of(p, c.layers)) for p in (*PATTERNS, *(found.remat for found in chosen.values()))))
    found = measured(patterns, rounds)
    out = {
        "model": MODEL, "seq": SEQ, "sequences": ROWS, "stored": 3 * stored(lay, model.specs(c)), "rounds": rounds,
        "hardware": {"flops": cluster.hardware.flops["float32"], "bandwidth": cluster.hardware.bandwidth},
        "alone": alone, "measured": found,
        "chosen": [{"limit": limit, "remat": one.remat, "peak": one.peak, "added": one.seconds} for limit, one in chosen.items()],
    }  # fmt: skip
    print(json.dumps(out, indent=1))


if __name__ == "__main__":
    main()
