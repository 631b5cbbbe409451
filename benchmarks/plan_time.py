"""Predicted against measured time of the real train step, on 8 simulated CPU devices, for layouts of a dense model and of a mixture of experts.

    python benchmarks/plan_time.py --measure [--rounds 5] [--only dense]    # calibrates, measures, writes benchmarks/data/plan_time.json
    python benchmarks/plan_time.py                                          # the table, from that file: nothing is run

Programs take turns, each round in another order, so that other work on the machine meets them all; a measured time is the fastest round's. It is the time that
the cores worked for this process, shared over them (`plan.measure.clock`): simulated devices keep all cores busy, and what else the machine does then
does not count. `wall` in the file is the clock's on the wall, the fastest too.
Predictions are made anew from the file's calibration each time; nothing in them is fitted to these steps.
"""

import argparse
import json
import os
import platform
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

if "--measure" in sys.argv:
    os.environ["JAX_PLATFORMS"] = "cpu"
    # a machine that others use too may keep a device from a collective for longer than the 40 s after which XLA gives up
    patient = "--xla_cpu_collective_call_warn_stuck_timeout_seconds=900 --xla_cpu_collective_call_terminate_timeout_seconds=1800"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8 {patient}"
sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

from meshloom.core.config import load
from meshloom.core.files import write_text
from meshloom.models.table import MODELS
from meshloom.parallel.table import build
from meshloom.plan.cost import shapes
from meshloom.plan.hardware import Cluster, OwnEntry, of_entry
from meshloom.plan.time import Time, step_time
from meshloom.runner.run import How

DATA = Path(__file__).parent / "data" / "plan_time.json"
SEQ, SEQUENCES = 128, 32
SIZES = {"layers": 8, "embed": 256, "heads": 8, "kv_heads": 8, "ffn": 768, "vocab": 2048, "max_seq": 128}
MODELS_USED = {
    "dense": {"family": "llama", **SIZES},
    "experts": {"family": "moe", **SIZES, "layers": 4, "experts": 8, "top": 2, "expert_ffn": 384},
}
"""Name -> fields of a configuration."""


class Job(NamedTuple):
    """A layout of a model. micro: micro-batches."""

    model: str
    layout: str
    micro: int = 1
    remat: str = "none"


JOBS = (
    *(Job("dense", layout) for layout in ("data=8", "zero3=8", "tensor=8", "tensor2d=2x4", "tensor3d=8", "context=8", "ulysses=8")),
    Job("dense", "zero3=8", remat="full"),
    *(Job("dense", layout, 4) for layout in ("zero3=8", "pipe=2 zero1=4", "pipe=8", "pipe=4:stash zero1=2")),
    *(Job("experts", layout) for layout in ("zero1=8", "expert=8", "expert=2 tensor=4", "tensor=8", "context=4 zero1=2")),
    Job("experts", "zero3=8", remat="full"),
    *(Job("experts", layout, 4) for layout in ("expert=8", "pipe=2 zero1=4")),
)


def predicted(job: Job, cluster: Cluster) -> Time:
    """What the planner says of a job."""
    fields = dict(MODELS_USED[job.model])
    model = MODELS[fields.pop("family")]
    c = model.Config(**fields)
    x = shapes(model, c, build(job.layout, c, SEQ), SEQ, SEQUENCES, job.micro, How("scan", job.remat), "float32", False)
    return step_time(model, job.layout, x, cluster)


def spearman(a: list[float], b: list[float]) -> float:
    """Rank correlation of two lists without ties: 1 - 6 sum d^2 / n (n^2 - 1)."""
    rank = lambda values: {at: place for place, at in enumerate(sorted(range(len(values)), key=values.__getitem__))}
    one, other, n = rank(a), rank(b), len(a)
    return 1 - 6 * sum((one[i] - other[i]) ** 2 for i in range(n)) / (n * (n * n - 1))


def program(job: Job) -> Any:
    """The compiled train step of a job, AdamW in it, as a call without arguments that waits for its end."""
    import jax
    import numpy as np

    from meshloom.core.batch import Batch
    from meshloom.core.mesh import make_mesh
    from meshloom.core.order import arranged
    from meshloom.objectives.lm import lm
    from meshloom.plan.plan import Plan
    from meshloom.train.config import OptimizerConfig, ScheduleConfig, TrainConfig
    from meshloom.train.schedule import make_schedule
    from meshloom.train.step import make_step

    fields = dict(MODELS_USED[job.model])
    model = MODELS[fields.pop("family")]
    c = model.Config(**fields)
    layout = build(job.layout, c, SEQ)
    plan = Plan(make_mesh(layout), layout, How("scan", job.remat), job.micro, "float32", False)
    schedule = make_schedule(ScheduleConfig(kind="constant"), 1e-3, 100)
    step = make_step(model, c, plan, lm(), OptimizerConfig(), schedule, TrainConfig(steps=100), 0, 1)
    tokens = np.random.default_rng(0).integers(0, c.vocab, (SEQUENCES, SEQ + 1)).astype(np.int32)
    whole = (tokens[:, :-1], tokens[:, 1:], np.ones((SEQUENCES, SEQ), np.float32))
    cut = lambda a: a.reshape(job.micro, SEQUENCES // job.micro, *a.shape[1:])
    positions = np.broadcast_to(np.arange(SEQ, dtype=np.int32), (SEQUENCES, SEQ)).copy()
    given = Batch(*(cut(a) for a in whole), None, cut(positions), cut(np.arange(SEQUENCES, dtype=np.int32)))  # type: ignore[arg-type]
    batch = jax.tree.map(jax.device_put, arranged(layout, given), step.batch_shardings)
    state = step.start(None)

    def run() -> float:
        nonlocal state
        state, told = step.run(state, batch)
        return float(jax.block_until_ready(told)["loss"])

    return run


def measure(jobs: tuple[Job, ...], rounds: int) -> Iterator[dict[str, Any]]:
    """Every job's fastest step: seconds by the cores' time and on the wall; and the calibration of the same machine.  Yields all that is known after each
    round, so that a run that is ended early has its rounds."""
    import jax

    from meshloom.core.process import keep_compiled
    from meshloom.plan.measure import EFFORTS, clock
    from meshloom.recipes.calibrate import entry_of, measured

    keep_compiled(Path(tempfile.gettempdir()) / "plan_time-xla")  # so that measuring again needs no compiling
    entry = entry_of("cpu", jax.devices(), measured(jax.devices(), EFFORTS["cpu"]))
    runs: dict[Job, Any] = {}
    for job in jobs:
        begin, runs[job] = time.perf_counter(), program(job)
        loss = runs[job]()
        print(f"compiled {job} in {time.perf_counter() - begin:.0f} s, loss {loss:.3f}", file=sys.stderr, flush=True)
    taken: dict[Job, list[tuple[float, float]]] = {job: [] for job in jobs}
    for turn in range(rounds):
        for job in random.Random(turn).sample(jobs, len(jobs)):
            work, wall = clock("cpu"), time.perf_counter()
            runs[job]()
            taken[job].append((clock("cpu") - work, time.perf_counter() - wall))
        print(f"round {turn + 1} of {rounds}", file=sys.stderr, flush=True)
        yield told(entry, taken)


def told(entry: dict[str, Any], taken: dict[Job, list[tuple[float, float]]]) -> dict[str, Any]:
    """What the file holds.  taken: of each job, seconds by the cores' time and on the wall, by round."""
    import jax

    from meshloom.plan.measure import cores

    steps = []
    for job, given in taken.items():
        works, walls = zip(*given)
        steps.append({**job._asdict(), "seconds": min(works), "wall": min(walls), "each": [round(w, 5) for w in works]})
    machine = f"{cores()} cores, {platform.machine()}, {platform.system()}; jax {jax.__version__}; other work on it meanwhile"
    command = "python benchmarks/plan_time.py --measure"
    rounds = min(len(given) for given in taken.values())
    return {"command": command, "date": time.strftime("%d %B %Y"), "machine": machine, "rounds": rounds, "hardware": entry, "steps": steps}


def cluster_of(data: dict[str, Any]) -> Cluster:
    """The machine that a file of measurements was made on."""
    return of_entry(load(OwnEntry, data["hardware"]))


def rows(data: dict[str, Any]) -> list[tuple[Job, float, float]]:
    """Job, measured and predicted seconds."""
    cluster = cluster_of(data)
    jobs = [(Job(**{name: step[name] for name in Job._fields}), step["seconds"]) for step in data["steps"]]
    return [(job, found, predicted(job, cluster).total) for job, found in jobs]


def summary(data: dict[str, Any]) -> dict[str, dict[str, float]]:
    """By model: rank correlation, and relative errors of the predictions: median, largest, and after one factor for all is taken out."""
    found = {}
    for model in dict.fromkeys(step["model"] for step in data["steps"]):
        mine = [(a, b) for job, a, b in rows(data) if job.model == model]
        ratios = sorted(b / a for a, b in mine)
        middle = ratios[len(ratios) // 2]
        off = sorted(abs(r - 1) for r in ratios)
        about = sorted(abs(r / middle - 1) for r in ratios)
        found[model] = {
            "layouts": len(mine), "rank correlation": spearman(*map(list, zip(*mine))), "median error": off[len(off) // 2], "largest error": off[-1],
            "median ratio": middle, "median error about it": about[len(about) // 2], "largest error about it": about[-1],
        }  # fmt: skip
    return found


def text(data: dict[str, Any]) -> str:
    """The table, as Markdown."""
    lines = [f"{data['date']}; {data['machine']}; `{data['command']}`, {data['rounds']} rounds.", ""]
    lines += ["| model | layout | micro-batches | remat | measured, ms | predicted, ms | ratio |", "|---|---|---|---|---|---|---|"]
    for job, found, told in sorted(rows(data), key=lambda row: (row[0].model, row[1])):
        lines.append(
            f"| {job.model} | `{job.layout}` | {job.micro} | {job.remat} | {found * 1e3:.0f} | {told * 1e3:.0f} | {told / found:.2f} |"
        )
    for model, n in summary(data).items():
        lines.append(
            f"\n{model}, {n['layouts']} layouts: rank correlation {n['rank correlation']:.2f}; predicted / measured {n['median ratio']:.2f} in the median, "
            f"and off from that by {n['median error about it']:.0%} in the median, {n['largest error about it']:.0%} at most"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="measure again and write the file")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=sorted(MODELS_USED), help="one model; the file is then not written")
    parser.add_argument("--file", type=Path, default=DATA)
    given = parser.parse_args()
    if given.measure:
        data = {}
        for data in measure(tuple(job for job in JOBS if given.only in (None, job.model)), given.rounds):
            if given.only is None or given.file != DATA:
                write_text(given.file, json.dumps(data, indent=1) + "\n")
    else:
        data = json.loads(given.file.read_text())
    print(text(data))


if __name__ == "__main__":
    main()
