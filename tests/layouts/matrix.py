"""Every pair of strategies that can share a mesh, each proven against one device: `make matrix` runs all of it and writes docs/matrix.md.

    python -m layouts.matrix [--write docs/matrix.md] [--model llama] [--jobs 2] [--keep done.jsonl]

A run that is ended early goes on from the file given by --keep; results of another version of the source are not taken.

The pairs are made from the STRATEGIES table, so a new strategy is in the matrix by having a row in SIZES.  Each pair is proven on a dense model and
on one with experts, those of each kind by turns; every schedule of a pipeline too, with what works inside a stage. A cell is one row of
`meshloom verify`: loss, norm, all gradients and five optimizer steps against one device, bytes stored and collectives against the formulas.
"""

import argparse
import hashlib
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

SIZES = {
    "pipe": "pipe=2",
    "data": "data=2",
    "zero1": "zero1=2",
    "zero2": "zero2=2",
    "zero3": "zero3=2",
    "tensor": "tensor=2",
    "sequence": "tensor=2 sequence",
    "context": "context=2",
    "ulysses": "ulysses=2",
    "expert": "expert=2",
    "tensor2d": "tensor2d=2x2",
    "tensor25d": "tensor25d=2x2x2",
    "tensor3d": "tensor3d=2x2x2",
}
"""The smallest spelling of each strategy that splits something."""
DENSE, SPARSE = ("llama", "gpt2"), ("moe", "moe-capacity")
MODELS = {
    "llama": ("quickstart", "model.variant=qwen3", "model.vocab=385", "model.kv_heads=2", "model.qkv_bias=true", "model.o_bias=true"),
    "gpt2": ("quickstart", "model.family=gpt2", "model.vocab=385", "model.tied=false"),
    "moe": ("moe-small", "model.vocab=385"),
    "moe-capacity": ("moe-small", "model.vocab=385", "model.tied=false", "model.capacity=1.0"),
}
"""A recipe and what is changed in it: odd vocabularies, grouped key heads, biases, tied and untied, experts dropless and with capacity."""
LARGE = (
    "data=2 zero3=2 tensor=4 sequence",
    "zero3=8 tensor=2",
    "data=4 zero2=4 tensor=2 sequence",
    "zero3=16 tensor=2 sequence",
    "pipe=2:interleaved2 zero3=4 tensor=2 sequence",
    "pipe=4:gpipe tensor=2 zero1=2",
    "pipe=4:zb context=2 data=2",
    "pipe=4:1f1b,stash zero3=4 tensor=2",
)
"""Products on 16 and 32 devices."""
SCHEDULES = ("gpipe", "interleaved2", "zb", "1f1b,stash")
INSIDE = ("zero1", "zero2", "zero3", "tensor", "sequence", "context", "expert")
"""What every schedule is proven with, beside the pairs."""
PATIENT = ("--xla_cpu_collective_call_warn_stuck_timeout_seconds=900", "--xla_cpu_collective_call_terminate_timeout_seconds=1800")
"""On a busy machine 32 simulated devices may keep each other waiting for longer than XLA's 40 s."""
BATCH = 4
"""Cells that a process takes at a time."""
DEVICES = 16
"""Simulated; the suite has 8 and takes its sample from the pairs that fit."""


class Pair(NamedTuple):
    """Two strategies (or one twice) and the spelling that joins them; spelling is empty where they cannot share a mesh, and `why` says why."""

    first: str
    second: str
    spelling: str
    why: str = ""


def join(*names: str) -> str:
    """The spelling of several strategies together, each word once."""
    return " ".join(dict.fromkeys(word for name in names for word in SIZES[name].split()))


def pairs() -> Iterator[Pair]:
    """Every strategy alone and every two together, in the order of the table."""
    from meshloom.parallel.table import devices

    for first, second in itertools.combinations_with_replacement(SIZES, 2):
        try:
            spelling = join(first, second)
            need = devices(spelling)
        except ValueError as why:
            yield Pair(first, second, "", str(why))
            continue
        if need > DEVICES:
            yield Pair(first, second, "", f"needs {need} devices; the matrix has {DEVICES}")
        else:
            yield Pair(first, second, spelling)


def cells() -> list[tuple[str, str]]:
    """All of the matrix as (model, spelling): every pair and product on a dense model and on one with experts, every schedule on one of them."""
    found = []
    for i, spelling in enumerate(dict.fromkeys([pair.spelling for pair in pairs() if pair.spelling] + list(LARGE))):
        found += [] if "expert" in spelling else [(DENSE[i % 2], spelling)]
        found.append((with_experts(spelling, i), spelling))
    scheduled = [f"{SIZES['pipe']}:{schedule} {SIZES[name]}" for schedule in SCHEDULES for name in INSIDE]
    experts = lambda i, spelling: i % 4 > 1 or "expert" in spelling
    return found + [(with_experts(spelling, i) if experts(i, spelling) else DENSE[i % 2], spelling) for i, spelling in enumerate(scheduled)]


def with_experts(spelling: str, turn: int) -> str:
    """The model with experts whose turn it is; a capacity counts places along whole sequences."""
    return SPARSE[0 if "context" in spelling or "ulysses" in spelling else turn % 2]


def sample(every: int, most: int = 8) -> dict[str, list[str]]:
    """A part of the matrix that fits the suite: model -> spellings. One pair in `every` of those on up to `most` devices, the models by turns."""
    from meshloom.parallel.table import devices

    todo = [pair.spelling for pair in pairs() if pair.spelling and pair.first != pair.second and devices(pair.spelling) <= most]
    out: dict[str, list[str]] = {name: [] for name in MODELS}
    for i, spelling in enumerate(todo[::every]):
        out[with_experts(spelling, i // 2) if i % 2 or "expert" in spelling else DENSE[i // 2 % 2]].append(spelling)
    return out


class Result(NamedTuple):
    """One pair on one model. said: "equal", why it is refused, or what is wrong."""

    model: str
    spelling: str
    said: str
    worst: float
    moved: int


def prove(model: str, spellings: list[str], steps: int = 5) -> Iterator[Result]:
    """Runs layouts of one model, one after another."""
    from meshloom.recipes import verify
    from meshloom.recipes.load import load_recipe

    case = verify.case(load_recipe(MODELS[model][0], (*MODELS[model][1:], "batch.micro_batches=2")))
    for row in verify.check(case, tuple(spellings), steps):
        worst = max(row.differences.get(name, 0.0) for name in ("loss", "gradient", "norm")) if row.differences else 0.0
        said = f"refused: {row.refused}" if row.refused else "; ".join(row.wrong) or "equal"
        yield Result(model, row.spelling, said, worst, sum(line.found[1] for line in row.moved))


def page(results: list[Result], seconds: float) -> str:
    """docs/matrix.md."""
    bad = [r for r in results if r.said != "equal" and not r.said.startswith("refused")]
    equal = [r for r in results if r.said == "equal"]
    lines = [
        "# Every pair of strategies, proven",
        "",
        "Each cell is `meshloom verify` of two strategies together on a small odd model: five optimizer steps against one device. *equal* means: loss, norm",
        "and every gradient within 1e-5 of one device, weights within 1e-4 after five steps, stored bytes and collectives of the compiled program equal to",
        "the formulas. The number is the largest relative difference of loss, norm and gradients.",
        "",
        f"`make matrix` made this page: {len(equal)} of {len(results)} cells equal, {len(bad)} wrong, {len(results) - len(equal) - len(bad)} refused with",
        f"a sentence; {seconds / 60:.0f} min on {os.cpu_count()} cores.",
        "",
    ]
    for model in dict.fromkeys(r.model for r in results):
        lines += [
            f"## {model}",
            "",
            f"`{' '.join(MODELS[model])}`",
            "",
            "| layout | result | largest difference | bytes moved a step |",
            "| --- | --- | --- | --- |",
        ]
        lines += [f"| `{r.spelling}` | {r.said} | {r.worst:.1e} | {r.moved:,} |" for r in results if r.model == model]
        lines.append("")
    apart = [p for p in pairs() if not p.spelling]
    lines += ["## Pairs that cannot share a mesh", "", "| strategies | why |", "| --- | --- |"]
    lines += [f"| {p.first}, {p.second} | {p.why} |" for p in apart]
    return "\n".join(lines) + "\n"


def run(todo: list[tuple[str, str]], jobs: int) -> Iterator[Result]:
    """The results of cells as they come, from several processes. A process takes a few cells of one model at a time."""
    batches = [(model, [spelling for name, spelling in todo if name == model]) for model in MODELS]
    batches = [(model, spellings[i : i + BATCH]) for model, spellings in batches for i in range(0, len(spellings), BATCH)]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for done in as_completed([pool.submit(_proven, *batch) for batch in batches]):
            yield from done.result()


def version() -> str:
    """A hash of the package's source."""
    import meshloom

    found = hashlib.sha256()
    for path in sorted(Path(meshloom.__file__).parent.rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def kept(path: Path | None) -> list[tuple[Result, float]]:
    """The results that an earlier run of the same source has left, and the seconds after which each came."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path and path.is_file() else []
    mine = [line for line in lines if line["version"] == version()]
    if lines:
        print(f"{len(mine)} cells are taken from {path}; {len(lines) - len(mine)} there are of another version of the source", flush=True)
    return [(Result(**line["result"]), line["seconds"]) for line in mine]


def _proven(model: str, spellings: list[str]) -> list[Result]:
    return list(prove(model, spellings))


def main() -> int:
    """Runs what was asked for; exit status 1 where a cell is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, help="the page to write")
    parser.add_argument("--model", choices=MODELS, action="append", help="only these models")
    parser.add_argument("--only", default="", help="only layouts in whose spelling this stands")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--keep", type=Path, help="a file of results, to go on from where a run was ended")
    given = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = " ".join(("--xla_force_host_platform_device_count=32", *PATIENT))
    todo = [(model, spelling) for model, spelling in cells() if model in (given.model or MODELS) and given.only in spelling]
    before = [(r, seconds) for r, seconds in kept(given.keep) if (r.model, r.spelling) in todo]
    results, spent = [r for r, _ in before], max((seconds for _, seconds in before), default=0.0)
    have, start = {(r.model, r.spelling) for r in results}, time.time() - spent
    for result in run([cell for cell in todo if cell not in have], given.jobs):
        print(f"{result.model:12} {result.spelling:40} {result.said}", flush=True)
        results.append(result)
        if given.keep:
            line = {"version": version(), "seconds": round(time.time() - start, 1), "result": result._asdict()}
            with given.keep.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
    if given.write:
        results.sort(key=lambda r: todo.index((r.model, r.spelling)))
        given.write.write_text(page(results, time.time() - start), encoding="utf-8")
    return any(r.said != "equal" and not r.said.startswith("refused") for r in results)


if __name__ == "__main__":
    sys.exit(main())
