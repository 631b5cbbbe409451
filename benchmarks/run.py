"""Meshloom beside PyTorch and transformers on this machine: `make bench`, or `python benchmarks/run.py [--quick] [--write docs/speed.md]`.

Each comparison starts all of its programs, lets them take turns, and prints medians, ratios within a round with their quartiles, and CPU times.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import measure
import report
import startup
from shapes import SHAPES
from turns import Program, interleave

OURS = "meshloom"


class Suite(NamedTuple):
    """One comparison. programs: name -> (script, job), and a shape where it is not the comparison's. same: programs whose `key` must agree turn by
    turn. rounds, warm: turns, usual and quick."""

    title: str
    shape: str
    programs: dict[str, tuple[str, ...]]
    same: tuple[str, ...]
    key: str
    unit: str
    rounds: tuple[int, int] = (7, 3)
    warm: int = 2


def training(title: str, shape: str) -> Suite:
    """Train steps of one model."""
    programs = {
        OURS: ("ours", "train"),
        "PyTorch": ("peers", "eager"),
        "torch.compile": ("peers", "compile"),
        "Trainer": ("peers", "trainer"),
    }
    return Suite(title, shape, programs, (OURS, "PyTorch", "torch.compile"), "loss", "tokens", warm=3)


SUITES = {
    "gpt": training("Train step, GPT-2 shape", "gpt"),
    "llama": training("Train step, Llama shape", "llama"),
    "decode": Suite(
        "Greedy decoding, Llama shape, one prompt of 32 tokens",
        "llama",
        {OURS: ("ours", "decode"), "generate": ("peers", "generate"), "generate, static cache": ("peers", "static")},
        (OURS, "generate"),
        "ids",
        "new tokens",
        (5, 3),
        1,
    ),
    "experts": Suite(
        "Train step with experts, and the dense one of as many active parameters",
        "llama",
        {OURS: ("ours", "train"), "8 experts, 2 a token": ("ours", "train", "experts")},
        (OURS,),
        "loss",
        "tokens",
        warm=3,
    ),
}
CORES = os.cpu_count() or 1


def compare(suite: Suite, quick: bool, tiny: bool, place: Path) -> tuple[str, list[measure.Row]]:
    """Runs one suite.  Returns its part of the page, and the rows."""
    full = lambda shape: shape + ("-tiny" if tiny else "")
    name = full(suite.shape)
    shape = SHAPES[name]
    for each in {name, *(full(asked[2]) for asked in suite.programs.values() if asked[2:])}:
        _export(each, str(place / each), place)
    programs: list[Program] = []
    facts: dict[str, Any] = {}
    try:
        for label, (script, job, *other) in suite.programs.items():
            own = full(other[0]) if other else name
            command = [sys.executable, str(HERE / f"{script}.py"), job, own, str(place / own)]
            programs.append(Program(label, command, {}, place / f"{label.replace(' ', '-')}.log"))
            facts[label] = programs[-1].hear()  # one after the other: starting is not what is measured
        answers = interleave(programs, suite.rounds[quick], suite.warm)
    finally:
        for p in programs:
            p.close()
    rows = measure.rows(answers, OURS, CORES)
    amount = facts[OURS].get("new", shape.batch * shape.seq)
    return "\n\n".join([f"### {suite.title}", _about(name, suite, answers), report.compared(rows, suite.unit, amount)]), rows


def _export(name: str, weights: str, place: Path) -> None:
    """Writes the weights that every program starts from."""
    p = Program("export", [sys.executable, str(HERE / "ours.py"), "export", name, weights], {}, place / "export.log")
    if p.process.wait(300):
        raise RuntimeError(f"Writing the starting weights failed:\n{p.log.read_text()[-2000:]}")
    p.close()


def _about(name: str, suite: Suite, answers: measure.Answers) -> str:
    """The shape, and that the programs did the same."""
    shape = SHAPES[name]
    sizes = ", ".join(f"{k} {v}" for k, v in shape.model.items())
    if len(suite.same) == 1:
        experts = SHAPES[name.replace(suite.shape, "experts")].model
        other = ", ".join(f"{k} {v}" for k, v in experts.items() if shape.model.get(k) != v)
        return f"{sizes}; {shape.batch} sequences of {shape.seq} tokens. With experts: {other}. The product's own step in both."
    if suite.key == "loss":
        far = measure.disagreement(answers, suite.same)
        same = f"AdamW, clipping by the global norm, fp32, the same weights and batches: losses agree to {far:.0e} over all steps."
        return f"{sizes}; {shape.batch} sequences of {shape.seq} tokens. {same}"
    ours, theirs = (answers[n][-1]["ids"] for n in suite.same)
    return f"{sizes}. {sum(a == b for a, b in zip(ours, theirs))} of {len(ours)} new tokens are equal to those of `generate`."


def begin(quick: bool, tiny: bool) -> str:
    """Start-up and waiting for data, as a part of the page."""
    sets = ("train.steps=1000", "model.layers=1", "model.embed=32") if tiny else ("train.steps=1000",)
    cold, warm = startup.starts(again=1 if quick or tiny else 3, sets=sets)
    best = sorted(warm)[len(warm) // 2]
    rows = [
        ("`meshloom train quickstart` to the first step, all caches empty", f"{cold.seconds:.1f} s (CPU {cold.cpu:.1f} s)"),
        ("the same, second time", f"{best.seconds:.1f} s (CPU {best.cpu:.1f} s)"),
        ("part of a step spent on waiting for data", f"{best.waiting:.2%}"),
    ]
    return "### Starting, and the loader\n\n" + report.table(("what", "measured"), rows)


def main(argv: list[str]) -> int:
    """Runs what is asked for, prints it, and writes it where told."""
    parse = argparse.ArgumentParser(description=__doc__)
    parse.add_argument("--only", default="gpt,llama,decode,experts,start", help="comma-separated: gpt, llama, decode, experts, start")
    parse.add_argument("--quick", action="store_true", help="three rounds instead of seven")
    parse.add_argument("--tiny", action="store_true", help="tiny models: checks the benchmark, says nothing about speed")
    parse.add_argument("--write", type=Path, help="put the tables into this page")
    parse.add_argument("--json", type=Path, help="put the rows into this file")
    asked = parse.parse_args(argv)
    wanted, load = asked.only.split(","), os.getloadavg()[0]
    parts, found = [], {}
    jobs: dict[str, Callable[[], str]] = {}
    for name, suite in SUITES.items():

        def job(name: str = name, suite: Suite = suite) -> str:
            with tempfile.TemporaryDirectory() as place:
                part, found[name] = compare(suite, asked.quick, asked.tiny, Path(place))
            return part

        jobs[name] = job
    jobs["start"] = lambda: begin(asked.quick, asked.tiny)
    if unknown := set(wanted) - set(jobs):
        parse.error(f"--only {', '.join(sorted(unknown))} is not a comparison. There are: {', '.join(jobs)}.")
    for name in wanted:
        parts.append(jobs[name]())
        print(parts[-1] + "\n", flush=True)
    if asked.json:
        asked.json.write_text(json.dumps({name: [r._asdict() for r in rows] for name, rows in found.items()}, indent=1))
    if asked.write:
        report.write(asked.write, report.page(parts, "make bench" + ' ARGS="--quick"' * asked.quick, load))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
