"""`meshloom plan --compile`: the train step of a plan by the vendor's compiler, no accelerator present, beside what was predicted."""

import time
from typing import Any

import jax

from meshloom.plan.explain import size
from meshloom.plan.hardware import Cluster
from meshloom.plan.search import Candidate
from meshloom.recipes.topology import Job, against_formula, compiled, devices


def there(cluster: Cluster) -> list:
    """The devices to compile for: a TPU topology, or the simulated devices of this process.  Raises ValueError for hardware whose compiler needs it to be
    there, and for fewer devices than the plan takes."""
    h = cluster.hardware
    if h.platform == "tpu":
        if cluster.slices > 1:
            raise ValueError(
                f"--compile compiles for one slice, and {cluster.label} has {cluster.slices}. Plan one slice, or leave --compile out."
            )
        return devices(cluster.label)
    if h.platform == "cpu":
        found = jax.devices()
        if found[0].platform != "cpu" or len(found) < cluster.devices:
            raise ValueError(
                f"--compile needs {cluster.devices} CPU devices, and this process has {len(found)}. Say --devices {cluster.devices}."
            )
        return found[: cluster.devices]
    raise ValueError(
        f"--compile cannot compile for {h.name}: the compiler of GPUs needs one to be present. It compiles for TPUs (--on v5p:4x4x4, with libtpu) and for "
        "simulated CPU devices (--on cpu:8)."
    )


def job_of(asked: Any, one: Candidate) -> Job:
    """What to compile of a plan."""
    q = asked.question
    platform = q.cluster.hardware.platform
    return Job(asked.tree, one.spelling, q.seq, q.sequences, one.micro, one.how.remat, q.dtype, platform, one.how.runner)


def compare(asked: Any, one: Candidate) -> list[str]:
    """Memory and collectives of the compiled step beside the prediction, as lines."""
    cluster, job = asked.question.cluster, job_of(asked, one)
    where, begin = there(cluster), time.perf_counter()
    program = compiled(job, where)
    took = time.perf_counter() - begin
    m = program.memory_analysis()
    have = m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes + m.temp_size_in_bytes
    out = ["", f"Compiled     for {where[0].device_kind} x {len(where)} in {took:.0f} s"]
    out.append(
        f"  memory     {size(have)} on each device by the compiler, {size(one.memory.total)} predicted ({one.memory.total / have - 1:+.1%})"
    )
    out.append(f"             {size(m.argument_size_in_bytes)} stored and batch, {size(m.temp_size_in_bytes)} in the step")
    rows = against_formula(job, where, program.as_text() or "")
    out += [f"  {'kind':20} {'over':24} {'arrays':>8} {'formula':>8} {'bytes':>10} {'formula':>10}"]
    for row in rows:
        cells = f"{row.found[0]:8,} {row.formula[0]:8,} {size(row.found[1]):>10} {size(row.formula[1]):>10}"
        out.append(f"  {row.kind:20} {' x '.join(row.axes):24} {cells}{'' if row.equal else '  differs'}")
    have, want = (sum(row[side][1] for row in rows) for side in (2, 3))
    return [*out, f"  moved in all: {size(have)} by the compiler, {size(want)} by formula"]
