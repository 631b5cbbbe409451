"""How long stages take to be found, and what slots cost that stages leave empty.

    python benchmarks/stages.py [--what assign|slots]

`assign`: layers of a random order of weights on machines of nodes of 8 devices, 64 micro-batches, where memory does not bind and where it does; CPU
seconds of this process. `slots`: what a tick costs in a pipeline's layers, forward, of one token.
"""

import argparse
import time

import numpy as np

from meshloom.models.table import MODELS
from meshloom.plan.assign import Profile, Task, assign, submeshes
from meshloom.plan.balance import balanced, heaviest, kind_costs, lightest, tick
from meshloom.runner.place import place

V3 = dict(
    layers=61, embed=7168, heads=128, kv_heads=128, ffn=18432, vocab=129280, experts=256, top=8, expert_ffn=2048, first_dense=3, shared=1, groups=8,
    top_groups=4, key_rank=512, query_rank=1536, nope_head=128, rope_head=64, value_head=128,
)  # fmt: skip
"""DeepSeek-V3, arXiv 2412.19437, section 4.2."""


def task(layers: int, nodes: int, memory: int) -> Task:
    """Stages whose speed grows with devices to the power of 0.766 (85 % kept with each doubling)."""
    meshes, work = submeshes(nodes, 8), np.random.default_rng(0).uniform(0.5, 2, layers)
    total, n = np.concatenate([[0], np.cumsum(work)]), np.array([mesh.devices for mesh in meshes])
    count = np.maximum(np.arange(layers)[None] - np.arange(layers)[:, None] + 1, 0)[..., None]
    seconds = (total[None, 1:] - total[:-1, None])[..., None] / n**0.766
    return Task(Profile(seconds, count * 1000 // n, np.broadcast_to(-(-64 // n), seconds.shape)), meshes, nodes, 8, memory, "1f1b", 64)


def assigned() -> None:
    print("| layers | devices | memory | stages | values of the slowest stage tried | seconds |\n|---|---|---|---|---|---|")
    for layers, nodes in ((32, 2), (96, 8)):
        for said, memory in (("free", 10**9), ("bound", 1000 * layers // (8 * nodes) + 300)):
            start = time.process_time()
            found = assign(task(layers, nodes, memory))
            print(f"| {layers} | {nodes * 8} | {said} | {len(found.parts)} | {found.tried} | {time.process_time() - start:.1f} |")


def slots() -> None:
    model, c = MODELS["deepseek"], MODELS["deepseek"].Config(**V3)
    kinds, costs = model.kinds(c), kind_costs(model, c, 4096)
    print("| stages | slots by default | a tick, GFLOP | stated | with `skip` | a tick, GFLOP |\n|---|---|---|---|---|---|")
    for stages in (2, 4, 8, 16):
        default, even = place(kinds, stages, 1), lightest([costs[kind] for kind in kinds], stages)
        most = heaviest(place(kinds, stages, 1, even), costs)
        dense = sum(kind.stack == kinds[0].stack for kind in default.kinds)
        said = "+".join(map(str, balanced(model, c, 4096, stages))) or "the same"
        print(
            f"| {stages} | {dense} dense, {len(default.kinds) - dense} sparse | {tick(default, costs) / 1e9:.2f} | {said} | "
            f"{'+'.join(map(str, even))} | {most / 1e9:.2f} |"
        )


if __name__ == "__main__":
    asked = argparse.ArgumentParser(description="Stages: the search, and what empty slots cost.")
    asked.add_argument("--what", choices=("assign", "slots"), default="assign")
    {"assign": assigned, "slots": slots}[asked.parse_args().what]()
