"""Ways of training that save traffic between data replicas, beside plain data parallelism: loss at the end, and bytes that a device sends.

    PYTHONPATH=src python benchmarks/communication.py --steps 240

trains the same small model on the corpus that ships, on four simulated devices (layout data=4), once for each way, and prints the table of
docs/communication.md: held-out loss over the whole split, its distance from the plain run of the same optimizer, and the bytes that a device sends
between replicas in a step, by the formulas that tests hold against the compiled programs, as a mean over the run.
"""

import argparse
import tempfile
from collections import Counter
from pathlib import Path

import jax

SMALL = [
    "model.layers=2", "model.embed=64", "model.heads=4", "model.kv_heads=4", "model.ffn=176", "model.max_seq=64", "data.seq=64",
    "batch.sequences=16", "optimizer.lr=2e-3", "schedule.warmup=20", "eval.every=0", "eval.batches=0", "eval.sequences=64", "sample.prompts=[]",
    "checkpoint.every=0", "log.tensorboard=false", "log.plot=false", "log.every=50", "train.runner=unroll", "layout=data=4",
]  # fmt: skip
WAYS: dict[str, tuple[str, list[str]]] = {
    "adamw": ("", ["optimizer.beta2=0.99"]),
    "1-bit Adam": ("adamw", ["optimizer.kind=onebit_adam", "optimizer.beta2=0.99", "optimizer.freeze_step={third}"]),
    "0/1 Adam": (
        "adamw",
        [
            "optimizer.kind=zero_one_adam",
            "optimizer.beta2=0.99",
            "optimizer.freeze_step={third}",
            "optimizer.local_scaler={third}",
            "optimizer.local_clip=4",
        ],
    ),
    "local SGD, H=8": ("adamw", ["optimizer.beta2=0.99", "outer.kind=local_sgd", "outer.every=8"]),
    "SlowMo, H=8": ("adamw", ["optimizer.beta2=0.99", "outer.kind=slowmo", "outer.every=8", "outer.lr=1.0", "outer.momentum=0.3"]),
    "DiLoCo, H=10": ("adamw", ["optimizer.beta2=0.99", "outer.kind=diloco", "outer.every=10", "outer.lr=0.7", "outer.momentum=0.7"]),
    "lamb": ("", ["optimizer.kind=lamb", "optimizer.beta2=0.99", "optimizer.lr=3e-2"]),
    "1-bit LAMB": ("lamb", ["optimizer.kind=onebit_lamb", "optimizer.beta2=0.99", "optimizer.lr=3e-2", "optimizer.freeze_step={third}"]),
    "sgd, a quarter of the batch": ("", ["optimizer.kind=sgd", "optimizer.momentum=0.9", "optimizer.lr=0.1", "batch.sequences=4"]),
    "sgd, AdaScale": (
        "sgd, a quarter of the batch",
        ["optimizer.kind=sgd", "optimizer.momentum=0.9", "optimizer.lr=0.1", "optimizer.adascale=true"],
    ),
}
"""Way -> (the run to compare it with, settings)."""


def one(name: str, steps: int, folder: Path) -> tuple[float, int, float]:
    """Trains one way.  Returns the held-out loss, the steps done, and the bytes that a device sends between replicas in a step, as a mean."""
    from meshloom.plan.cost import shapes, wire_bytes
    from meshloom.recipes import launch
    from meshloom.recipes.load import load_recipe
    from meshloom.train.method import rule, shape

    sets = [s.format(third=steps // 3) for s in WAYS[name][1]]
    config = load_recipe("quickstart", [*SMALL, f"train.steps={steps}", *sets])
    chosen = launch.choose(config)
    outcome = launch.train(config, folder / name.replace("/", "-").replace(" ", "_"))
    m, plan, specs = launch.method(config), chosen.plan, chosen.model.specs(chosen.config)
    x = shapes(chosen.model, chosen.config, plan.layout, config.data.seq, config.batch.sequences, plan.micro, plan.how, plan.dtype)
    sent = {
        phase: sum(wire_bytes(c, plan.layout) for c in moves(chosen.spelling, x) if "data" in c.axes)
        for phase, moves in shape(m, plan, specs).moves.items()
    }
    made = rule(m, plan, specs, lambda done: done, 1)
    phases = Counter(made.phase(done) if made else "" for done in range(outcome.step))
    assert outcome.loss is not None
    return outcome.loss, outcome.step, sum(sent[phase] * n for phase, n in phases.items()) / outcome.step


def main() -> None:
    """The table, as Markdown."""
    asked = argparse.ArgumentParser(description="Ways of training that save traffic between data replicas, beside plain data parallelism.")
    asked.add_argument("--steps", type=int, default=240)
    asked.add_argument("ways", nargs="*", default=list(WAYS))
    args = asked.parse_args()
    jax.config.update("jax_num_cpu_devices", 4)
    rows: dict[str, tuple[float, int, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in args.ways:
            rows[name] = one(name, args.steps, Path(folder))
    print("\n| way | steps | held-out loss | against | sent a step | of its |\n|---|---|---|---|---|---|")
    for name, (loss, done, sent) in rows.items():
        other = WAYS[name][0]
        beside = (
            f"{loss / rows[other][0] - 1:+.2%} of {other} | {sent:,.0f} | 1/{rows[other][2] / sent:.1f}"
            if other in rows
            else f"| {sent:,.0f} |"
        )
        print(f"| {name} | {done} | {loss:.4f} | {beside} |")


if __name__ == "__main__":
    main()
