"""One model under several layouts: the same losses, other bytes. Then the same formulas for a model that no laptop holds.

    python examples/layouts.py [--steps 3] ["data=2 zero3=4" "tensor=2" ...]

Each layout trains the shipped corpus on eight simulated CPU devices and is held against one device. What a device keeps is counted on its arrays and
must be what the formula says; what it sends is by formula, which `meshloom verify` compares with the compiled program. The second table makes no
array: a 6.7B model on 64 devices, from its specs. About 50 s on two CPU cores. It prints (6 and 5 lines such as)

    zero3=8                    8.2294  1e-07  1.1874  1e-07  519.5 KiB  reduce-scatter 1.2 MiB, all-gather 1.5 MiB, all-reduce 35 B
    zero3=64                   kept   1.2 GiB  in a step about   5.8 GiB more  sent reduce-scatter 12.4 GiB, all-gather 24.2 GiB, all-reduce 39 B
"""

import argparse
from collections import Counter
from itertools import islice

import jax

from meshloom.core.mesh import make_mesh
from meshloom.data.config import Data
from meshloom.data.loader import Loader
from meshloom.data.sets import open_sets
from meshloom.data.tokenizer import load
from meshloom.models.llama import MODEL, Config
from meshloom.objectives.lm import lm
from meshloom.parallel.table import build
from meshloom.plan.cost import shapes, step_cost, wire_bytes
from meshloom.plan.explain import size
from meshloom.plan.memory import counted, stored, working
from meshloom.plan.plan import Plan
from meshloom.runner.run import How
from meshloom.train.config import OptimizerConfig, ScheduleConfig, TrainConfig
from meshloom.train.feed import Feed
from meshloom.train.optimizer import make_optimizer
from meshloom.train.schedule import make_schedule
from meshloom.train.step import make_step, state_of

SMALL, SEQ, ROWS = Config(layers=2, embed=64, heads=8, kv_heads=4, ffn=176, vocab=4096, max_seq=64), 64, 8
LARGE = Config(layers=32, embed=4096, heads=32, ffn=11008, vocab=32000, max_seq=4096, tied=False)
LAYOUTS = ("data=8", "zero1=8", "zero3=8", "zero3=2 tensor=4 sequence")
LARGE_LAYOUTS = ("data=64", "zero1=64", "zero3=64", "zero3=16 tensor=4 sequence", "data=4 zero3=4 tensor=4 sequence")
TRAIN = TrainConfig(steps=1000)


def run(spelling: str, loader: Loader, steps: int) -> tuple[list[float], list[float], int]:
    """Trains a few steps.  Returns losses, gradient norms, and the bytes that a device keeps of the parameters and the optimizer's state."""
    layout = build(spelling, SMALL, SEQ)
    plan = Plan(make_mesh(layout), layout, How("scan"), micro=1, dtype="float32")
    schedule = make_schedule(ScheduleConfig(kind="constant"), 1e-3, TRAIN.steps)
    step = make_step(MODEL, SMALL, plan, lm(), OptimizerConfig(), schedule, TRAIN, seed=0, per_step=1)
    state, losses, norms = step.start(None), [], []
    for batch in islice(Feed(plan, ROWS, SEQ).train(loader, start=0), steps):
        state, told = step.run(state, batch)
        losses.append(float(told["loss"] / told["tokens"]))
        norms.append(float(told["norm"]))
    return losses, norms, counted([state.params, state.opt])


def formulas(spelling: str, c: Config, seq: int, rows: int, how: How, dtype: str) -> tuple[int, int, str]:
    """Bytes that a device keeps, that a step adds (an estimate), and what it sends in a step, by kind. Makes no array."""
    layout, specs = build(spelling, c, seq), MODEL.specs(c)
    state = state_of(make_optimizer(OptimizerConfig(), specs), specs, TRAIN)
    x, sent = shapes(MODEL, c, layout, seq, rows, 1, how, dtype), Counter()
    for moved in step_cost(spelling, x):
        sent[moved.kind] += wire_bytes(moved, layout)
    told = ", ".join(f"{kind} {size(n)}" for kind, n in sent.items()) or "nothing"
    return stored(layout, [state.params, state.opt]), sum(working(MODEL, x).values()), told


def main() -> None:
    """Both tables."""
    asked = argparse.ArgumentParser(description="One model under several layouts.")
    asked.add_argument("--steps", type=int, default=3)
    asked.add_argument("layouts", nargs="*", default=LAYOUTS)
    args = asked.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    loader = open_sets(Data(seq=SEQ), load("shipped"), seed=0).train
    one = run("", loader, args.steps)
    print(f"{'layout':26} loss    differs  norm    differs       kept  sent by a device in a step")
    for spelling in ("", *args.layouts):
        losses, norms, kept = run(spelling, loader, args.steps) if spelling else one
        near = [max(abs(a / b - 1) for a, b in zip(got, first)) for got, first in ((losses, one[0]), (norms, one[1]))]
        formula, _, sent = formulas(spelling, SMALL, SEQ, ROWS, How("scan"), "float32")
        assert kept == formula and max(near) < 1e-5
        numbers = f"{losses[-1]:.4f}  {near[0]:.0e}  {norms[-1]:.4f}  {near[1]:.0e}  {size(kept):>9}"
        print(f"{spelling or 'one device':26} {numbers}  {sent}")
    print("\n6.7B parameters, 64 devices, 256 rows of 4,096 tokens, bf16, remat full")
    for spelling in LARGE_LAYOUTS:
        kept, more, sent = formulas(spelling, LARGE, 4096, 256, How("scan", "full"), "bfloat16")
        print(f"{spelling:32} kept {size(kept):>9}  in a step about {size(more):>9} more  sent {sent}")


if __name__ == "__main__":
    main()
