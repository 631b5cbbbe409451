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
from typing import Any

MODEL = {"family": "llama", "layers": 8, "embed": 256, "heads": 8, "kv_heads": 8, "ffn": 1024, "vocab": 1024, "max_seq": 256}
ROWS, SEQ = 16, 256
"""Sequences of a micro-batch over all devices, and tokens of each."""
SCHEDULES = ("gpipe", "1f1b", "interleaved2", "autodiff")
MIB = 1 << 20


def ready(topology: str) -> list[Any]:
    """The devices of a topology, or 8 simulated ones."""
    if topology == "cpu":
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    sys.path.insert(0, str(Path(__file__).parent))
    import tpu

    return tpu.jax.devices() if topology == "cpu" else tpu.devices(topology)


def lowered(
    schedule: str, micro: int, there: list[Any], layout: str, remat: str = "none", dtype: str = "bfloat16", model: Any = None
) -> Any:
    """The gradient of a step under a schedule, or as `autodiff` makes it, traced and not compiled."""
    import autodiff
    import tpu

    from meshloom.train.gradient import make_gradient

    make = autodiff.make_gradient if schedule.startswith("autodiff") else make_gradient
    spelling = layout.format(schedule.replace("autodiff", "gpipe"))
    made, c, plan = tpu.planned(tpu.Job(model or MODEL, spelling, SEQ, ROWS * micro, micro, remat, dtype), there)
    params = tpu.abstract(made.specs(c), tpu.shardings(plan.mesh, plan.layout, "rest", made.specs(c)))
    rows = tpu.rows(tpu.Job(made, spelling, SEQ, ROWS * micro, micro, remat, dtype), plan)
    return tpu.jax.jit(make(made, c, plan, tpu.lm())).lower(params, rows, None, tpu.jax.ShapeDtypeStruct((), "float32"))


def memory(given: argparse.Namespace, there: list[Any]) -> Iterable[tuple]:
    """Bytes of a gradient, by schedule and number of micro-batches."""
    yield "schedule", *(f"{m} micro-batches, MiB" for m in given.micro), "code, MiB"
    for schedule in given.schedules:
        cells, code = [], 0
        for micro in given.micro:
            start = time.time()
            found = lowered(schedule, micro, there, given.layout, given.remat).compile(compiler_options=given.options).memory_analysis()
            cells.append(f"{found.temp_size_in_bytes / MIB:,.1f}")
            code = found.generated_code_size_in_bytes
            print(schedule, micro, cells[-1], f"{code / MIB:.1f}", f"{time.time() - start:.0f}s", file=sys.stderr, flush=True)
        yield f"`{schedule}`", *cells, f"{code / MIB:,.1f}"


WHAT = {"memory": memory}


def main() -> None:
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    listed = lambda kind: lambda text: [kind(part) for part in text.split(",")]
    parser.add_argument("--what", default="memory", choices=WHAT)
    parser.add_argument("--topology", default="cpu", help="such as v5p:2x2x2, or cpu")
    parser.add_argument("--schedules", type=listed(str), default=SCHEDULES)
    parser.add_argument("--micro", type=listed(int), default=[4, 16, 64])
    parser.add_argument("--layout", default="pipe=4:{} data=2", help="with {} for the schedule")
    parser.add_argument("--remat", default="none", choices=("none", "selective", "full"))
    parser.add_argument("--effort", type=float, default=0.0, help="of a TPU's compiler, from -1 to 1")
    given = parser.parse_args()
    given.options = {"exec_time_optimization_effort": given.effort} if given.effort else None
    for i, row in enumerate(WHAT[given.what](given, ready(given.topology))):
        print("| " + " | ".join(map(str, row)) + " |" + ("\n|" + " --- |" * len(row) if not i else ""), flush=True)


if __name__ == "__main__":
    main()
