"""One check for a machine with one CUDA GPU: the same numbers as the CPU, then speed and memory of a 1B-class model in bf16.

    PYTHONPATH=src python benchmarks/gpu_check.py [--small] [--json FILE] [--seconds 200]

Needs jax (with CUDA), numpy, optax, pydantic and PyYAML. Without a GPU, `--small` runs the same code on the CPU. Exit code 1 where the devices disagree.
"""

import argparse
import json
import math
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

import jax
import jax.numpy as jnp
import numpy as np

from meshloom.core.batch import Batch
from meshloom.core.layout import ONE_DEVICE
from meshloom.core.leaf import dot
from meshloom.core.mesh import make_mesh
from meshloom.core.spec import count, init
from meshloom.models.base import context, unembed
from meshloom.models.table import MODELS
from meshloom.objectives.lm import lm
from meshloom.ops.attention import Case, choose
from meshloom.plan.flops import train_flops
from meshloom.plan.peak import peak
from meshloom.plan.plan import Plan
from meshloom.runner.forward import hidden
from meshloom.runner.gather import gather_step
from meshloom.runner.run import How
from meshloom.train.config import OptimizerConfig, TrainConfig
from meshloom.train.gradient import make_gradient
from meshloom.train.step import make_step

BILLION = {
    "layers": 16, "embed": 2048, "heads": 32, "kv_heads": 8, "head": 64, "ffn": 8192, "vocab": 128256, "max_seq": 8192, "tied": True,
    "rope": {"theta": 500000.0},
}  # fmt: skip
"""Llama 3.2 1B's sizes."""
TINY = {"layers": 2, "embed": 128, "heads": 4, "kv_heads": 2, "head": 64, "ffn": 256, "vocab": 500, "max_seq": 2048}
"""For parity; heads of 64 so that the fused attention serves it."""
LIMITS = {"float32": 2e-5, "bfloat16": 3e-2}
"""Largest relative difference (L2, an array at a time) from the CPU in fp32. bf16 has 8 bits: 1 / 256 in each rounding, through two layers and back."""


class Job(NamedTuple):
    """One measured configuration."""

    batch: int
    seq: int
    remat: str
    packed: bool


JOBS = (Job(8, 2048, "none", False), Job(8, 2048, "none", True), Job(16, 2048, "selective", False), Job(4, 8192, "full", False))
SMALL_JOBS = (Job(2, 64, "selective", True),)


def say(text: str) -> None:
    """Prints progress at once, on standard error."""
    print(text, file=sys.stderr, flush=True)


def device_plan(device: Any, how: How, dtype: str, packed: bool) -> Plan:
    """The plan of one device."""
    layout = replace(ONE_DEVICE, platform=device.platform)
    return Plan(make_mesh(layout, [device]), layout, how, 1, dtype, packed)


def batch_of(vocab: int, batch: int, seq: int, packed: bool, seed: int = 0) -> Batch:
    """Random tokens [1, batch, seq]; packed: two documents a row, cut at a different place in each."""
    ids = np.random.default_rng(seed).integers(0, vocab, (1, batch, seq + 1)).astype(np.int32)
    cut = (np.arange(batch) * 7 % (seq // 2) + seq // 4)[None, :, None]
    at = np.broadcast_to(np.arange(seq), (1, batch, seq))
    segments, positions = (1 + (at >= cut), np.where(at >= cut, at - cut, at)) if packed else (None, at)
    weights = np.where(at == cut - 1, 0, 1) if packed else np.ones_like(at)
    i32 = lambda a: None if a is None else a.astype(np.int32)
    rows = np.arange(batch, dtype=np.int32)[None]
    return Batch(ids[..., :-1], ids[..., 1:], weights.astype(np.float32), i32(segments), i32(positions), rows)


# ---- parity ----


def outcome(device: Any, how: How, dtype: str, packed: bool, weights: Any, seq: int) -> dict[str, np.ndarray]:
    """Logits, loss and gradients of the tiny model on one device, in fp32 on the host. Products in full precision where the type is fp32."""
    model = MODELS["llama"]
    c = model.Config(**TINY)
    plan = device_plan(device, how, dtype, packed)
    batch = jax.device_put(batch_of(c.vocab, 2, seq, packed), device)
    params = jax.device_put(weights, device)

    def run(params: Any, batch: Batch) -> tuple[Any, ...]:
        w, whole = gather_step(plan.layout, model.specs(c), params, dtype)
        first = jax.tree.map(lambda a: a[0], batch)
        x, outer, _, _ = hidden(model, c, plan.layout, w, whole, first.tokens, context(first, None), how)
        logits = dot(plan.layout, "btd,vd->btv", x, unembed(outer))[..., : c.vocab]
        grads, sums, _ = make_gradient(model, c, plan, lm())(params, batch, None, jnp.float32(1))
        return logits.astype(jnp.float32), sums["loss"] / sums["tokens"], grads

    with jax.default_matmul_precision("highest" if dtype == "float32" else "default"):
        logits, loss, grads = jax.device_get(jax.jit(run)(params, batch))
    named = {"gradient " + jax.tree_util.keystr(path): g for path, g in jax.tree_util.tree_leaves_with_path(grads)}
    return {"logits": logits, "loss": np.asarray(loss), **named}


def apart(a: np.ndarray, b: np.ndarray) -> float:
    """|a - b| / |b|, L2."""
    return float(np.linalg.norm((a - b).astype(np.float64)) / max(np.linalg.norm(b.astype(np.float64)), 1e-30))


def parity(device: Any, seq: int, packings: tuple[bool, ...] = (False, True)) -> list[dict[str, Any]]:
    """The device against the CPU in fp32, with one document a row and with packed ones: largest differences and where they are."""
    cpu, model = jax.devices("cpu")[0], MODELS["llama"]
    with jax.default_device(cpu):
        weights = jax.device_get(init(model.specs(model.Config(**TINY)), jax.random.key(1)))
    found = []
    for packed in packings:
        base = outcome(cpu, How("unroll"), "float32", packed, weights, seq)
        for dtype, limit in LIMITS.items():
            ours = outcome(device, How("scan"), dtype, packed, weights, seq)
            far = {name: apart(ours[name], base[name]) for name in base}
            worst = max(far, key=lambda name: far[name])
            ok = all(math.isfinite(v) and v <= limit for v in far.values())
            gradient = max(v for name, v in far.items() if name.startswith("gradient"))
            row = {"dtype": dtype, "packed": packed, "logits": far["logits"], "loss": far["loss"], "gradient": gradient}
            found.append({**row, "limit": limit, "worst": worst, "attention": row_of(device, TINY, 2, seq, dtype, packed), "ok": ok})
            say(f"parity {dtype} packed={packed}: {'ok' if ok else 'DISAGREES'}, worst {worst} {far[worst]:.1e} (limit {limit:g})")
    return found


def row_of(device: Any, sizes: dict[str, Any], batch: int, seq: int, dtype: str, packed: bool) -> str:
    """The attention row that serves a shape, and why not the ones before it."""
    heads, kv_heads, head = sizes["heads"], sizes["kv_heads"], sizes["head"]
    return choose(Case(device.platform, seq, seq, heads, kv_heads, head, dtype, batch, segments=packed)).explain()


# ---- speed ----


def speed(device: Any, job: Job, sizes: dict[str, Any], dtype: str, steps: int) -> dict[str, Any]:
    """Tokens a second, MFU and peak memory of the product's train step (AdamW, fp32 master) on random tokens."""
    model = MODELS["llama"]
    c = model.Config(**sizes)
    plan = device_plan(device, How("scan", job.remat), dtype, job.packed)
    train = TrainConfig(steps=1000, precision={"bfloat16": "bf16", "float32": "fp32"}[dtype])
    step = make_step(model, c, plan, lm(), OptimizerConfig(), lambda done: jnp.float32(1e-4), train, 0, 1)
    state = step.start(None)
    batch = jax.device_put(batch_of(c.vocab, job.batch, job.seq, job.packed), step.batch_shardings)
    begun = time.perf_counter()
    state, told = step.run(state, batch)
    first = float(told["loss"]) / float(told["tokens"])
    compiled = time.perf_counter() - begun
    state, told = step.run(state, batch)
    float(told["loss"])
    begun = time.perf_counter()
    for _ in range(steps):
        state, told = step.run(state, batch)
    last = float(told["loss"]) / float(told["tokens"])  # waits for the device
    seconds = (time.perf_counter() - begun) / steps
    tokens = job.batch * job.seq
    rate, top = train_flops(model, c, job.seq) * tokens / seconds, peak(train.precision)
    memory = (device.memory_stats() or {}).get("peak_bytes_in_use")
    return {
        **job._asdict(), "parameters": count(model.specs(c)), "dtype": dtype, "seconds": seconds, "tokens_per_s": tokens / seconds, "tflops": rate / 1e12,
        "mfu": rate / top if top else None, "peak_gib": memory / 2**30 if memory else None, "compile_s": compiled, "loss": [first, last],
        "attention": row_of(device, sizes, job.batch, job.seq, dtype, job.packed), "ok": math.isfinite(last) and last < first,
    }  # fmt: skip


def speeds(device: Any, small: bool, until: float) -> list[dict[str, Any]]:
    """Each job that time allows. Memory's peak is that of all jobs so far, so they stand in order of need; one that does not fit is reported."""
    rows: list[dict[str, Any]] = []
    for job in SMALL_JOBS if small else JOBS:
        if rows and time.perf_counter() > until:
            rows.append({**job._asdict(), "skipped": "no time left", "ok": True})
            continue
        try:
            rows.append(speed(device, job, TINY if small else BILLION, "bfloat16", 3 if small else 20))
        except jax.errors.JaxRuntimeError as error:
            rows.append({**job._asdict(), "skipped": str(error).splitlines()[0][:200], "ok": False})
        say(f"speed {job}: " + (rows[-1].get("skipped") or f"{rows[-1]['tokens_per_s']:,.0f} tokens/s"))
    return rows


def table(report: dict[str, Any]) -> str:
    """The report for people."""
    lines = [f"{report['device']}, jax {report['jax']}, Python {report['python']}", "", "parity with the CPU in fp32 (relative, L2)"]
    lines.append(f"{'type':9} {'packed':6} {'logits':>8} {'loss':>8} {'gradient':>8} {'limit':>8}  attention")
    for r in report["parity"]:
        numbers = f"{r['logits']:8.1e} {r['loss']:8.1e} {r['gradient']:8.1e} {r['limit']:8.0e}"
        lines.append(f"{r['dtype']:9} {r['packed']!s:6} {numbers}  {r['attention']}{'' if r['ok'] else '  DISAGREES: ' + r['worst']}")
    lines += [
        "",
        f"{'batch x seq':12} {'remat':9} {'packed':6} {'tokens/s':>10} {'TFLOP/s':>8} {'MFU':>6} {'peak GiB':>8} {'compile s':>9}",
    ]
    for r in report["speed"]:
        about = f"{r['batch']} x {r['seq']}"
        head = f"{about:12} {r['remat']:9} {r['packed']!s:6}"
        if "skipped" in r:
            lines.append(f"{head} {r['skipped']}")
            continue
        mfu, gib = (f"{r['mfu']:.1%}" if r["mfu"] else "?"), (f"{r['peak_gib']:.1f}" if r["peak_gib"] else "?")
        lines.append(f"{head} {r['tokens_per_s']:10,.0f} {r['tflops']:8.1f} {mfu:>6} {gib:>8} {r['compile_s']:9.1f}")
    return "\n".join([*lines, "", f"{report['seconds']:.0f} s in all; {'all well' if report['ok'] else 'NOT all well'}"])


def main(argv: list[str]) -> int:
    """Checks, measures, prints the table and then the JSON."""
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--small", action="store_true", help="tiny models everywhere: for the CPU")
    parse.add_argument("--json", type=Path, help="write the report there too")
    parse.add_argument("--seconds", type=float, default=200, help="start no new measurement after this")
    asked = parse.parse_args(argv)
    begun, device = time.perf_counter(), jax.devices()[0]
    if device.platform == "cpu" and not asked.small:
        parse.error("JAX sees no GPU here. Install jax with CUDA, or give --small to run the check on the CPU.")
    say(f"{device.device_kind}: parity")
    report: dict[str, Any] = {"device": device.device_kind, "jax": jax.__version__, "python": sys.version.split()[0]}
    report["parity"] = parity(device, 64, (True,)) if asked.small else parity(device, 512)
    report["speed"] = speeds(device, asked.small, begun + asked.seconds)
    report |= {"seconds": time.perf_counter() - begun, "ok": all(r["ok"] for r in report["parity"] + report["speed"])}
    print(table(report), flush=True)
    print(json.dumps(report), flush=True)
    if asked.json:
        asked.json.write_text(json.dumps(report, indent=1))
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
