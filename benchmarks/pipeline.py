"""Pipelines by schedule: memory as micro-batches grow, compile time, copies of what a stage keeps, and the work that a step does.

    python benchmarks/pipeline.py --what memory [--topology v5p:2x2x2]      # bytes that the gradient of 4, 16 and 64 micro-batches takes
    python benchmarks/pipeline.py --what compile [--topology v5p:2x2x2]     # a 32-layer model's step
    python benchmarks/pipeline.py --what copies [--topology v5p:2x2x2]      # copies of ring buffers and gradient sums inside loops
    python benchmarks/pipeline.py --what work                               # this CPU: products with matrices, by schedule and as simulated; times

For a TPU topology (package `libtpu`) programs are compiled ahead of time and no TPU is needed; without --topology, for 8 simulated CPU devices.
`autodiff` is the gradient of a pipelined forward pass (autodiff.py).
"""

import argparse
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

MODEL = {"family": "llama", "layers": 8, "embed": 256, "heads": 8, "kv_heads": 8, "ffn": 1024, "vocab": 1024, "max_seq": 256}
ROWS, SEQ = 16, 256
"""Sequences of a micro-batch over all devices, and tokens of each."""
SCHEDULES = ("gpipe", "1f1b", "interleaved2", "zb", "autodiff")
MIB = 1 << 20


def ready(topology: str) -> list[Any]:
    """The devices of a topology, or 8 simulated ones."""
    if topology == "cpu":
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    sys.path.insert(0, str(Path(__file__).parent))
    import jax
    import tpu

    return jax.devices() if topology == "cpu" else tpu.devices(topology)


def job(schedule: str, micro: int, given: argparse.Namespace, **more: Any) -> Any:
    """What is compiled.  more: fields of the model, or of the job, that differ."""
    import tpu

    layout = given.layout.format(schedule.replace("autodiff", "gpipe")) if schedule in SCHEDULES else schedule
    fields = {name: more.pop(name) for name in tuple(more) if name in MODEL}
    return tpu.Job({**MODEL, **fields}, layout, SEQ, more.pop("rows", ROWS) * micro, micro, given.remat, given.dtype)._replace(**more)


def lowered(schedule: str, job: Any, there: list[Any]) -> Any:
    """The gradient of a step under a schedule (or a layout without any), or as `autodiff` makes it, traced and not compiled."""
    import autodiff
    import jax
    import tpu

    from meshloom.objectives.lm import lm
    from meshloom.train.gradient import make_gradient

    make = autodiff.make_gradient if schedule == "autodiff" else make_gradient
    model, c, plan = tpu.planned(job, there)
    return jax.jit(make(model, c, plan, lm())).lower(*arguments(job, there))


def arguments(job: Any, there: list[Any]) -> tuple[Any, ...]:
    """What a gradient takes, abstract."""
    import jax
    import tpu

    from meshloom.core.mesh import shardings
    from meshloom.core.spec import abstract

    model, c, plan = tpu.planned(job, there)
    params = abstract(model.specs(c), shardings(plan.mesh, plan.layout, "rest", model.specs(c)))
    scale = jax.NamedSharding(plan.mesh, jax.P())
    return params, tpu.rows(job, plan), None, jax.ShapeDtypeStruct((), "float32", sharding=scale)


def filled(abstract: Any) -> Any:
    """Arrays for what is abstract: random numbers of small size, ones for whole numbers and single ones."""
    import jax
    import numpy as np

    def one(a: Any) -> Any:
        random = np.random.default_rng(0).normal(0, 0.02, a.shape)
        made = random if a.dtype.kind == "f" and a.shape else np.ones(a.shape)
        return jax.device_put(made.astype(a.dtype), a.sharding)

    return jax.tree.map(one, abstract)


def memory(given: argparse.Namespace, there: list[Any]) -> Iterable[tuple]:
    """Bytes of a gradient, by schedule and number of micro-batches."""
    yield "schedule", *(f"{m} micro-batches, MiB" for m in given.micro), "code, MiB"
    for schedule in given.schedules:
        compiled = [lowered(schedule, job(schedule, m, given), there).compile(compiler_options=given.options) for m in given.micro]
        found = [c.memory_analysis() for c in compiled]
        yield (
            f"`{schedule}`",
            *(f"{f.temp_size_in_bytes / MIB:,.1f}" for f in found),
            f"{found[-1].generated_code_size_in_bytes / MIB:,.1f}",
        )


def copied(given: argparse.Namespace, there: list[Any]) -> Iterable[tuple]:
    """Arrays of one activation's size and more that are copied in loops of the gradient."""
    import executed

    yield "schedule", "micro-batches", "copied in loops: array x places in the program"
    for schedule in given.schedules:
        text = lowered(schedule, job(schedule, given.micro[-1], given), there).compile(compiler_options=given.options).as_text()
        found = executed.copies(text, ROWS // 2 * SEQ * MODEL["embed"] * (2 if given.dtype == "bfloat16" else 4))
        yield f"`{schedule}`", given.micro[-1], ", ".join(f"{kind} x {n}" for kind, n in found) or "none"


def compiling(given: argparse.Namespace, there: list[Any]) -> Iterable[tuple]:
    """CPU seconds of tracing and compiling a whole train step of a 32-layer model, and times those without a pipeline."""
    import tpu

    yield "layout", "CPU seconds", "of those without a pipeline"
    base = 0.0
    for schedule in ("data=8", *(name for name in given.schedules if name != "autodiff")):
        start = time.process_time()
        tpu.step(job(schedule, 8, given, layers=32), there)
        took = time.process_time() - start
        base = base or took
        yield f"`{job(schedule, 8, given).layout}`", f"{took:.1f}", f"{took / base:.2f}"


SMALL = {"embed": 128, "heads": 4, "kv_heads": 4, "ffn": 512, "rows": 2}


def predicted(schedule: str, micro: int, unit: float, head: float) -> float:
    """Operations of one device by the simulator, in lockstep, where a backward runs the forward again.  unit: of the forward of a stage.  head: of
    what is outside the layers, for one micro-batch."""
    from meshloom.parallel.schedules import make
    from meshloom.parallel.simulate import RECOMPUTE, simulate
    from meshloom.parallel.slots import compile

    return simulate(compile(make(schedule, 4, micro)), RECOMPUTE).wall["uniform"] * unit + micro * head


def work(given: argparse.Namespace, there: list[Any]) -> Iterable[tuple]:
    """Operations of matrix products and CPU seconds of a step on simulated devices, in turns; as simulated."""
    import executed

    micro = given.micro[-1]
    names = [name for name in given.schedules if name != "zb"]
    jobs = {name: job(name, micro, given, **SMALL) for name in ("data=2", *names)}
    programs = {name: lowered(name, j, there).compile() for name, j in jobs.items()}
    arrays = {name: filled(arguments(j, there)) for name, j in jobs.items()}
    some = executed.products(programs["data=2"].as_text())
    more = executed.products(lowered("data=2", job("data=2", micro, given, **SMALL, layers=16), there).compile().as_text())
    unit, head = (more - some) / micro / 12, (2 * some - more) / micro / 4  # of 8 layers, three times a forward; vocabulary over 4 stages
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in programs}
    for _ in range(given.rounds + 1):
        for name, program in programs.items():
            cpu, wall = time.process_time(), time.perf_counter()
            sys.modules["jax"].block_until_ready(program(*arrays[name]))
            times[name].append((time.process_time() - cpu, time.perf_counter() - wall))
    cpu, wall = ({name: median(t[i] for t in took[1:]) for name, took in times.items()} for i in (0, 1))
    yield (
        "schedule",
        "operations of a device, G",
        "of the simulator's",
        "CPU s",
        "of those without a pipeline",
        "of the simulator's",
        "s",
        "of `autodiff`'s",
    )
    for name in names:
        found, said = executed.products(programs[name].as_text()), predicted(name.replace("autodiff", "gpipe"), micro, unit, head)
        ratio, ahead = cpu[name] / cpu["data=2"], said * 8 / (some * 2)
        rest = (f"{wall[name]:.2f}", f"{wall[name] / wall['autodiff']:.2f}" if "autodiff" in wall else "")
        yield f"`{name}`", f"{found / 1e9:.1f}", f"{found / said:.4f}", f"{cpu[name]:.2f}", f"{ratio:.2f}", f"{ratio / ahead:.2f}", *rest


WHAT = {"memory": memory, "copies": copied, "compile": compiling, "work": work}


def parser() -> argparse.ArgumentParser:
    """What the command line takes."""
    listed = lambda kind: lambda text: [kind(part) for part in text.split(",")]
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--what", default="memory", choices=WHAT)
    made.add_argument("--topology", default="cpu", help="such as v5p:2x2x2, or cpu")
    made.add_argument("--schedules", type=listed(str), default=SCHEDULES)
    made.add_argument("--micro", type=listed(int), default=[4, 16, 64])
    made.add_argument("--layout", default="pipe=4:{} data=2", help="with {} for the schedule")
    made.add_argument("--remat", default="none", choices=("none", "selective", "full"))
    made.add_argument("--effort", type=float, default=0.0, help="of a TPU's compiler, from -1 to 1")
    made.add_argument("--rounds", type=int, default=3, help="of turns that are timed")
    return made


def main() -> None:
    """Prints a Markdown table."""
    given = parser().parse_args()
    given.dtype = "float32" if given.topology == "cpu" else "bfloat16"
    given.options = {"exec_time_optimization_effort": given.effort} if given.effort else None
    for i, row in enumerate(WHAT[given.what](given, ready(given.topology))):
        print("| " + " | ".join(map(str, row)) + " |" + ("\n|" + " --- |" * len(row) if not i else ""), flush=True)


if __name__ == "__main__":
    main()
