"""What a device needs in a train step, by the compiler: steps compiled for simulated CPU devices and for TPU topologies, no accelerator present.

pip install "jax[tpu]" && python benchmarks/plan_memory.py [--only WORD] [--list]

Each case is compiled in a process of its own and one line is added to plan_memory.jsonl; a case whose line is there with the same job is not compiled
again.  Takes seconds for a CPU case, minutes for a large TPU one.  docs/plan_memory.md says what the numbers are and holds the prediction against them.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CPU = {"family": "llama", "layers": 4, "embed": 512, "heads": 8, "kv_heads": 4, "ffn": 1408, "vocab": 8192, "max_seq": 1024}
GPT2 = {"family": "gpt2", "layers": 4, "embed": 512, "heads": 8, "kv_heads": 8, "ffn": 2048, "vocab": 8192, "max_seq": 1024}
MOE = {**CPU, "family": "moe", "experts": 8, "top": 2, "expert_ffn": 704}
LLAMA_1B = {"family": "llama", "layers": 16, "embed": 2048, "heads": 16, "kv_heads": 8, "ffn": 5632, "vocab": 32000, "max_seq": 4096}
LLAMA_7B = {"family": "llama", "layers": 32, "embed": 4096, "heads": 32, "kv_heads": 32, "ffn": 11008, "vocab": 32000, "max_seq": 4096}
LLAMA3_1B = {
    "family": "llama",
    "layers": 16,
    "embed": 2048,
    "heads": 32,
    "kv_heads": 8,
    "ffn": 8192,
    "vocab": 128256,
    "max_seq": 4096,
    "tied": True,
}
LLAMA_70B = {"family": "llama", "layers": 80, "embed": 8192, "heads": 64, "kv_heads": 8, "ffn": 28672, "vocab": 128256, "max_seq": 8192}
MODELS = {
    "llama": CPU,
    "gpt2": GPT2,
    "moe": MOE,
    "llama-1b": LLAMA_1B,
    "llama2-7b": LLAMA_7B,
    "llama3-1b": LLAMA3_1B,
    "llama3-70b": LLAMA_70B,
}


def case(on: str, model: str, layout: str, rows: int, remat: str, micro: int = 1, **more: Any) -> dict[str, Any]:
    """One case.  rows: sequences of a micro-batch, over all devices."""
    given = {"seq": 512, "dtype": "float32" if on.startswith("cpu") else "bfloat16", **more}
    return {
        "on": on,
        "model": model,
        "layout": layout,
        "seq": given["seq"],
        "sequences": rows * micro,
        "micro": micro,
        "remat": remat,
        "dtype": given["dtype"],
    }


CASES = (
    case("v5e:2x4", "llama-1b", "zero3=8", 8, "full", seq=4096),
    case("v5p:4x4x4", "llama2-7b", "zero3=64", 64, "full", seq=4096),
    case("v5e:16x16", "llama2-7b", "zero3=256", 256, "full", seq=4096),
    case("v5p:8x8x8", "llama3-70b", "zero3=128 tensor=4 sequence", 128, "full", seq=8192),
    case("v5e:2x4", "llama-1b", "zero3=8", 8, "selective", seq=2048),
    case("v5e:2x4", "llama-1b", "zero3=2 tensor=4 sequence", 8, "full", seq=4096),
    case("v5e:2x4", "llama-1b", "zero1=8", 8, "full", 2, seq=2048),
    case("v5e:2x4", "llama-1b", "zero2=8", 8, "full", 2, seq=2048),
    case("v5p:4x4x4", "llama2-7b", "zero3=64", 128, "selective", seq=4096),
    case("v5p:4x4x4", "llama2-7b", "zero3=16 tensor=4 sequence", 64, "full", 2, seq=4096),
    case("v5e:16x16", "llama2-7b", "zero3=32 tensor=8 sequence", 64, "full", seq=4096),
    case("v5p:2x2x2", "llama-1b", "zero3=2 pipe=4", 2, "full", 8, seq=4096),
    case("v5p:8x8x8", "llama3-70b", "zero3=512", 512, "full", seq=8192),
    case("cpu:8", "llama", "data=8", 32, "none"),
    case("cpu:8", "llama", "data=8", 32, "selective"),
    case("cpu:8", "llama", "data=8", 32, "full"),
    case("cpu:8", "llama", "data=8", 32, "full", 4),
    case("cpu:8", "llama", "zero1=8", 32, "full", 2),
    case("cpu:8", "llama", "zero1=8", 32, "none"),
    case("cpu:8", "llama", "zero2=8", 32, "full", 2),
    case("cpu:8", "llama", "zero2=8", 16, "selective"),
    case("cpu:8", "llama", "zero3=8", 32, "full"),
    case("cpu:8", "llama", "zero3=8", 32, "full", 2),
    case("cpu:8", "llama", "zero3=8", 32, "none"),
    case("cpu:8", "llama", "zero3=8", 32, "selective", dtype="bfloat16"),
    case("cpu:8", "llama", "zero1=2 zero3=4", 32, "full", 2),
    case("cpu:8", "llama", "tensor=8", 8, "none"),
    case("cpu:8", "llama", "data=2 tensor=4", 16, "full"),
    case("cpu:8", "llama", "zero3=4 tensor=2", 16, "selective"),
    case("cpu:8", "llama", "zero3=2 tensor=4 sequence", 16, "full", 2),
    case("cpu:8", "llama", "tensor=4 sequence", 8, "none"),
    case("cpu:8", "llama", "zero3=2 context=4", 16, "full", seq=1024),
    case("cpu:8", "llama", "zero3=2 context=4", 16, "none", seq=1024),
    case("cpu:8", "llama", "zero3=4 ulysses=2", 16, "selective"),
    case("cpu:8", "llama", "zero1=2 pipe=4", 8, "full", 8),
    case("cpu:8", "llama", "zero3=4 pipe=2", 16, "full", 4),
    case("cpu:8", "llama", "pipe=2:interleaved2 tensor=4", 8, "full", 4),
    case("cpu:8", "llama", "zero1=2 pipe=4:stash", 8, "none", 8),
    case("cpu:8", "llama", "zero1=2 tensor2d=2x2", 8, "full"),
    case("cpu:8", "gpt2", "zero3=8", 32, "none"),
    case("cpu:8", "gpt2", "data=4 tensor=2", 16, "selective"),
    case("cpu:8", "moe", "zero3=8", 16, "full"),
    case("cpu:8", "moe", "zero1=2 expert=4", 16, "full"),
    case("cpu:8", "moe", "expert=8", 16, "none"),
    case("cpu:8", "llama", "data=8", 8, "full", seq=128),
    case("cpu:8", "llama", "zero1=8", 8, "full", seq=128),
    case("cpu:8", "llama", "zero3=8", 8, "full", 2, seq=128),
    case("v5e:16x16", "llama2-7b", "zero3=256", 1024, "full", seq=4096),
    case("v5e:2x4", "llama3-1b", "zero3=8", 48, "full", seq=4096),
    case("v5e:2x4", "llama3-1b", "zero1=8", 40, "full", 2, seq=4096),
    case("v5p:4x4x4", "llama2-7b", "zero3=16 tensor=4 sequence", 512, "full", seq=4096),
    case("v5p:2x2x2", "llama3-1b", "zero3=2 pipe=4", 12, "full", 8, seq=4096),
    case("v5p:4x4x4", "llama2-7b", "zero3=64", 256, "selective", seq=4096),
)
"""Where, which model, layout, rows of a micro-batch, what is kept, micro-batches."""
DATA = Path(__file__).with_suffix(".jsonl")
JOB = ("on", "model", "layout", "seq", "sequences", "micro", "remat", "dtype")


def name(job: dict[str, Any]) -> str:
    """A case in a line."""
    return (
        f"{job['on']} {job['model']} [{job['layout']}] {job['sequences']} x {job['seq']} in {job['micro']}, {job['remat']}, {job['dtype']}"
    )


def known() -> list[dict[str, Any]]:
    """What has been measured."""
    return [json.loads(line) for line in DATA.read_text().splitlines()] if DATA.exists() else []


def measured(job: dict[str, Any]) -> dict[str, Any]:
    """Compiles one case here.  Returns its line, less the command."""
    on, _, shape = job["on"].partition(":")
    if on == "cpu":
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={shape}"
    sys.path.insert(0, str(Path(__file__).parent))
    import jax
    import tpu

    there = jax.devices() if on == "cpu" else tpu.devices(job["on"])
    given = {key: job[key] for key in JOB if key not in ("on", "model")}
    asked = tpu.Job(MODELS[job["model"]], **given, platform=on if on == "cpu" else "tpu")
    begin = time.perf_counter()
    line = {**job, "devices": len(there), "jax": jax.__version__, "date": datetime.datetime.now(datetime.UTC).date().isoformat()}
    if on != "cpu":
        from importlib.metadata import version

        line |= {"libtpu": version("libtpu"), "kind": there[0].device_kind, "cores": there[0].num_cores}
    try:
        compiled = tpu.step(asked, there)
    except jax.errors.JaxRuntimeError as why:
        return {**line, "error": str(why).split("\n\n")[0][:600]}
    m = compiled.memory_analysis()
    kinds = ("argument", "output", "temp", "alias", "generated_code")
    line["bytes"] = {kind: getattr(m, f"{kind}_size_in_bytes") for kind in kinds} | {"peak": m.peak_memory_in_bytes}
    line["seconds"] = round(time.perf_counter() - begin)
    if on == "cpu":
        line["moved"] = [[x.kind, list(x.axes), *x.found, *x.formula] for x in tpu.against_formula(asked, there, compiled.as_text() or "")]
    return line


def main() -> None:
    """Measures what is not known yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose line holds this")
    parser.add_argument("--number", type=int, help="the case of this number alone")
    parser.add_argument("--list", action="store_true", help="says what there is and compiles nothing")
    parser.add_argument("--one", type=int, help="compiles the case of this number here and prints its line")
    given = parser.parse_args()
    if given.one is not None:
        print("LINE " + json.dumps(measured(CASES[given.one])), flush=True)
        return
    for number, job in enumerate(CASES):
        have = any({key: line[key] for key in JOB} == job for line in known())
        if given.only not in name(job) or given.number not in (None, number) or (have and not given.list):
            continue
        print(f"{number:3} {'known' if have else '     '} {name(job)}", flush=True)
        if given.list:
            continue
        done = subprocess.run([sys.executable, __file__, "--one", str(number)], capture_output=True, text=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith("LINE ")]
        if not lines:
            print(done.stderr[-2000:], flush=True)
            continue
        line = json.loads(lines[0][5:]) | {"command": "python benchmarks/plan_memory.py"}
        print("    ", line.get("bytes", line.get("error")), line.get("seconds"), flush=True)
        with DATA.open("a") as out:
            out.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
