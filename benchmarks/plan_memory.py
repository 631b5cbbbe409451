"""What a device needs in a train step, by the compiler: steps compiled for simulated CPU devices and for TPU topologies, no accelerator present.

pip install "jax[tpu]" && python benchmarks/plan_memory.py [--only WORD] [--list]

Each case is compiled in a process of its own and one line is added to plan_memory.jsonl; a case whose line is there with the same job is not compiled
again.  Takes seconds for a CPU case, minutes for a large TPU one.  docs/plan_memory.md says what the numbers are and holds the prediction against them.

--fit prints the rows of WORKING (src/meshloom/plan/layer.py) of this platform, fitted to the lines that are there; --page the tables of the docs.
"""

import argparse
import datetime
import json
import os
import random
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
LLAMA_150M = {"family": "llama", "layers": 8, "embed": 1024, "heads": 8, "kv_heads": 8, "ffn": 2816, "vocab": 16384, "max_seq": 4096}
LLAMA_100M = {**LLAMA_150M, "vocab": 8192, "max_seq": 1024}
MODELS = {
    "llama-150m": LLAMA_150M,
    "llama-100m": LLAMA_100M,
    "llama": CPU,
    "gpt2": GPT2,
    "moe": MOE,
    "llama-1b": LLAMA_1B,
    "llama2-7b": LLAMA_7B,
    "llama3-1b": LLAMA3_1B,
    "llama3-70b": LLAMA_70B,
}


def case(on: str, model: str | dict[str, Any], layout: str, rows: int, remat: str, micro: int = 1, **more: Any) -> dict[str, Any]:
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
    case("v5e:2x2", "llama-150m", "", 2, "full", seq=2048),
    case("v5e:2x2", "llama-150m", "", 32, "full", seq=128),
    case("v5e:2x4", "llama-100m", "zero3=8", 64, "selective", seq=1024),
)
"""Where, which model, layout, rows of a micro-batch, what is kept, micro-batches."""
SHAPES = 8
"""Random shapes on one device, which the rows of WORKING are fitted to besides."""


def random_cases() -> list[dict[str, Any]]:
    """Small models of random sizes under each remat, and three with a large vocabulary."""
    rng, found = random.Random("llamaFalse"), []
    for _ in range(SHAPES):
        heads, head = rng.choice((4, 8, 8, 16)), rng.choice((32, 64))
        keys = rng.choice([n for n in (1, 2, 4, 8, 16) if heads % n == 0])
        sizes = {"layers": rng.choice((3, 4, 6)), "embed": rng.choice((256, 512, 768)), "heads": heads, "kv_heads": keys, "head": head}
        sizes |= {"ffn": rng.choice((512, 1024, 1408, 2048)), "vocab": 512, "max_seq": 4096}
        seq = rng.choice((128, 256, 512))
        rows = rng.choice((2048, 4096)) // seq
        found += [case("cpu:1", {"family": "llama", **sizes}, "", rows, remat, seq=seq) for remat in ("full", "none", "selective")]
    for at, (vocab, embed, seq, rows) in enumerate([(32768, 256, 256, 4), (16384, 512, 256, 8), (50304, 256, 512, 4)]):
        sizes = {
            "layers": 2,
            "embed": embed,
            "heads": 4,
            "kv_heads": 2,
            "head": 64,
            "ffn": 512,
            "vocab": vocab,
            "max_seq": 4096,
            "tied": bool(at % 2),
        }
        found.append(case("cpu:1", {"family": "llama", **sizes}, "", rows, "full", seq=seq))
    return found


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


def sizes(job: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a case's model."""
    return MODELS[job["model"]] if isinstance(job["model"], str) else job["model"]


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
    asked = tpu.Job(sizes(job), **given, platform=on if on == "cpu" else "tpu")
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


def account(line: dict[str, Any]) -> tuple[Any, dict[str, int]]:
    """(shapes of a line's step, bytes of a device by kind, as predicted)."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "src"))
    from meshloom.models.table import MODELS as FAMILIES
    from meshloom.parallel.table import build
    from meshloom.plan.cost import shapes
    from meshloom.plan.memory import device_memory, stored
    from meshloom.plan.stages import pipeline
    from meshloom.runner.run import How

    model = FAMILIES[line["sizes"]["family"]]
    c = model.Config(**line["sizes"])
    lay = build(line["layout"], c, line["seq"], "cpu" if line["on"].startswith("cpu") else "tpu")
    how = How("scan", line["remat"])
    x = shapes(model, c, lay, line["seq"], line["sequences"], line["micro"], how, line["dtype"], packed=False)
    held, pipe = stored(lay, model.specs(c)), pipeline(model, x)
    return x, dict(device_memory(model, x, {"parameters": held, "optimizer": 2 * held}, pipe and pipe.flight).kinds)


def needed(line: dict[str, Any]) -> int:
    """Bytes that a compiled step needs of a device: its arguments, its temporaries, and the results that are not made in place of arguments."""
    found = line["bytes"]
    return found["argument"] + found["temp"] + found.get("output", 0) - found.get("alias", 0)


FITTED = ("stream", "enters", "heads", "keys", "wide", "down", "scores", "block", "weights")
"""Arrays of a layer that are fitted; those of experts are too few to tell apart."""


def fitted() -> None:
    """Least squares with no negative number, of bytes relative to each program's, over dense models without a pipeline."""
    import numpy as np
    from scipy.optimize import nnls

    for platform in ("cpu", "v5"):
        for remat in ("full", "selective", "none"):
            rows, wanted = [], []
            for line in known():
                plain = "bytes" in line and line["remat"] == remat and line["on"].startswith(platform) and "experts" not in line["sizes"]
                if not plain or "pipe" in line["layout"] or (platform == "cpu" and line["dtype"] != "float32"):
                    continue
                x, kinds = account(line)
                if kinds["loss"] or kinds["update"]:
                    continue
                from meshloom.plan.layer import parts

                found, total = parts(x), needed(line)
                rows.append([getattr(found, part) / total for part in FITTED])
                wanted.append((total - sum(kinds.values()) + kinds["layer"]) / total)
            if rows:
                copies, _ = nnls(np.array(rows), np.array(wanted))
                said = {part: round(float(n), 1) for part, n in zip(FITTED, copies)}
                print(platform, remat, len(rows), "programs", said, "largest error", f"{max(abs(np.array(rows) @ copies - wanted)):.1%}")


def page() -> None:
    """The tables of docs/plan_memory.md."""
    for title, where in (("Simulated devices of a CPU", "cpu:8"), ("TPU topologies", "v5")):
        print(
            f"**{title}**\n\n| on | model | layout | sequences | kept | compiled, MB | predicted, MB | off |\n|---|---|---|---|---|---|---|---|"
        )
        for line in known():
            if line["on"].startswith(where) and "bytes" in line:
                true, foretold = needed(line) / 1e6, sum(account(line)[1].values()) / 1e6
                said = f"`{line['layout'] or 'one device'}` | {line['sequences']} x {line['seq']} in {line['micro']} | {line['remat']}"
                print(f"| {line['on']} | {line['model']} | {said} | {true:,.0f} | {foretold:,.0f} | {foretold / true - 1:+.1%} |")
        print()


def main() -> None:
    """Measures what is not known yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose line holds this")
    parser.add_argument("--number", type=int, help="the case of this number alone")
    parser.add_argument("--list", action="store_true", help="says what there is and compiles nothing")
    parser.add_argument("--one", type=int, help="compiles the case of this number here and prints its line")
    parser.add_argument("--fit", action="store_true", help="prints fitted rows of WORKING")
    parser.add_argument("--page", action="store_true", help="prints the tables of the docs")
    given, every = parser.parse_args(), [*CASES, *random_cases()]
    if given.one is not None:
        print("LINE " + json.dumps(measured(every[given.one])), flush=True)
        return
    if given.fit or given.page:
        fitted() if given.fit else page()
        return
    for number, job in enumerate(every):
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
        line = json.loads(lines[0][5:]) | {"sizes": sizes(job), "command": "python benchmarks/plan_memory.py"}
        print("    ", line.get("bytes", line.get("error")), line.get("seconds"), flush=True)
        with DATA.open("a") as out:
            out.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
