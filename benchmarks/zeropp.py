"""Whether ZeRO++'s blocks train as well: the same small model on the shipped corpus, a few hundred steps, with and without them.

python benchmarks/zeropp.py [--steps 300] [--layouts "zero3=8;zero3=8:qg4"]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean

SOURCE = Path(__file__).parent.parent / "src"
COMMAND = "import sys; from meshloom.cli import main; sys.exit(main())"
LAYOUTS = ("zero3=8", "zero3=8:qw8", "zero3=8:qg8", "zero3=8:qg4", "zero3=8:qw8,qg4", "zero1=2:qg4 zero3=4:qw8,qg4")
SMALL = ("model.layers=2", "model.embed=64", "model.heads=4", "model.kv_heads=2", "model.ffn=176", "model.max_seq=64", "data.seq=64")
RUN = ("eval.every=100000", "eval.batches=32", "log.every=1", "checkpoint.every=100000", "sample.prompts=[]", "schedule.warmup=25")
LAST = 50


def losses(layout: str, steps: int, folder: Path) -> tuple[float, float]:
    """(mean training loss of the last steps, held-out loss at the end)."""
    sets = [word for one in (*SMALL, *RUN, f"train.steps={steps}", f"layout={layout}") for word in ("--set", one)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])}
    subprocess.run(
        [sys.executable, "-c", COMMAND, "train", "quickstart", "--devices", "8", "--out", str(folder), *sets],
        env=env, check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    train = [x["loss"] for x in lines if x.get("kind") == "train"]
    valid = [x["loss"] for x in lines if x.get("kind") == "valid"]
    return mean(train[-LAST:]), valid[-1] if valid else float("nan")


def main() -> None:
    """Prints the table of docs/layouts/zero.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--layouts", default=";".join(LAYOUTS), help="separated by semicolons; the first is what others are compared with")
    given = parser.parse_args()
    print(f"| layout | loss of the last {LAST} of {given.steps} steps | held-out loss | against the first |\n|---|---|---|---|", flush=True)
    first = None
    with tempfile.TemporaryDirectory() as folder:
        for i, layout in enumerate(given.layouts.split(";")):
            train, valid = losses(layout, given.steps, Path(folder) / str(i))
            first = first or (train, valid)
            apart = f"{train / first[0] - 1:+.2%}, {valid / first[1] - 1:+.2%}"
            print(f"| `{layout}` | {train:.4f} | {valid:.4f} | {apart if i else ''} |", flush=True)


if __name__ == "__main__":
    main()
