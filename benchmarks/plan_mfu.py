"""Predicted MFU beside what MaxText published, as a table and a scatter picture.  Nothing is run; the facts are in data/maxtext.yaml.

    python benchmarks/plan_mfu.py [--picture docs/pictures/plan_mfu.svg]

Both sides by one formula (plan.flops.train_flops, attention below the diagonal alone): what was published is turned into the time of a step first. Their
programs are not ours: MaxText multiplies panels while tensor parallelism's arrays move, which we wait for, and runs flash attention on TPUs, whose scores
ours writes out. So three predictions stand side by side: `ours`, of our own program; `flash`, with an attention kernel that keeps its scores on the
chip; `theirs`, with that and with what moves inside a layer hidden behind its work.
"""

import argparse
import sys
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

from meshloom.core import yamls
from meshloom.models.table import MODELS
from meshloom.parallel.base import LAYER, PLACES
from meshloom.parallel.table import build
from meshloom.plan import time as timing
from meshloom.plan import work
from meshloom.plan.cost import shapes
from meshloom.plan.flops import train_flops, visible_keys
from meshloom.plan.hardware import Link, read
from meshloom.runner.run import How

DATA = Path(__file__).parent / "data" / "maxtext.yaml"
WAYS = ("ours", "flash", "theirs")


class Row(NamedTuple):
    """A published run. published, predicted: MFU, the latter by way."""

    chip: str
    label: str
    published: float
    predicted: dict[str, float]


def row(given: dict[str, Any], models: dict[str, Any]) -> Row:
    """One run of the file."""
    model, cluster = MODELS["llama"], read(given["on"])
    if rail := given.get("rail"):
        h = cluster.hardware
        cluster = cluster._replace(hardware=h._replace(between=Link(0.9 * rail, h.between.latency)))
    c = model.Config(**models[given["model"]], max_seq=given["seq"], tied=False)
    seq, tokens = given["seq"], given["batch"] * given["seq"]
    flops, peak = train_flops(model, c, seq), cluster.hardware.flops["bfloat16"]
    whole = flops + 12 * c.layers * c.heads * c.head * (seq - visible_keys(seq, None))
    seconds = tokens / given["tokens"] if "tokens" in given else tokens * whole / (given["tflops"] * 1e12)
    lay = build(given["layout"], c, seq, cluster.hardware.platform)
    x = shapes(model, c, lay, seq, given["batch"] * cluster.devices, 1, How("scan", given["remat"]), "bfloat16", False)
    told = {way: _way(way, lambda: timing.step_time(model, given["layout"], x, cluster).total) for way in WAYS}
    mfu = lambda time: tokens * flops / (time * peak)
    label = f"{given['model']} on {given['on']}"
    return Row(cluster.hardware.name, label, mfu(seconds), {way: mfu(time) for way, time in told.items()})


def _way(way: str, run: Any) -> float:
    """A prediction under one of WAYS, which differ in two tables of the cost model."""
    inside, beside = set(work.INSIDE), dict(timing.BESIDE)
    try:
        work.INSIDE |= {"blocks", "stream", "reference"} if way != "ours" else set()
        if way == "theirs":
            moving = {name: "backward" if p.back else "forward" for name, p in PLACES.items() if p.often == LAYER}
            timing.BESIDE.update(moving)
        return run()
    finally:
        work.INSIDE.clear(), work.INSIDE.update(inside)
        timing.BESIDE.clear(), timing.BESIDE.update(beside)


def rows() -> list[Row]:
    """All runs of the file."""
    data = yamls.read(DATA)
    return [row(given, data["models"]) for given in data["rows"]]


def table(found: list[Row]) -> str:
    """Markdown: every run, then the errors by way."""
    lines = [f"| run | published | {' | '.join(WAYS)} |", "|---|---|" + "---|" * len(WAYS)]
    lines += [f"| {r.label} | {r.published:.1%} | " + " | ".join(f"{r.predicted[way]:.1%}" for way in WAYS) + " |" for r in found]
    for way in WAYS:
        errors = [r.predicted[way] / r.published - 1 for r in found]
        lines.append(f"\n`{way}`: median error {median(map(abs, errors)):.1%}, from {min(errors):+.1%} to {max(errors):+.1%}")
    return "\n".join(lines)


def draw(found: list[Row], path: Path) -> None:
    """The scatter, SVG or PNG: published across, predicted up, a colour a chip."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "plan_mfu", "font.size": 9})
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 6))
    colours = dict(zip(dict.fromkeys(r.chip for r in found), ("#2f6fb3", "#2e8b57", "#d9661f", "#8a3fa0", "#777777")))
    for chip, colour in colours.items():
        mine = [r for r in found if r.chip == chip]
        across = [100 * r.published for r in mine]
        axes.plot(across, [100 * r.predicted["ours"] for r in mine], "x", color=colour, markersize=5)
        axes.plot(across, [100 * r.predicted["flash"] for r in mine], "o", color=colour, label=chip, markersize=5)
        axes.vlines(
            across, [100 * r.predicted["ours"] for r in mine], [100 * r.predicted["flash"] for r in mine], color=colour, linewidth=0.6
        )
    axes.plot([15, 90], [15, 90], color="#999999", linewidth=0.8)
    axes.fill_between([15, 90], [13.5, 81], [16.5, 99], color="#999999", alpha=0.12, label="within 10 %")
    axes.set(
        xlim=(15, 85),
        ylim=(15, 85),
        xlabel="published MFU, %",
        ylabel="predicted MFU, %",
        title="MaxText's published runs: o with flash attention, x without",
    )
    axes.legend(loc="upper left")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=Path, help="write the scatter to this .svg or .png file")
    given = parser.parse_args()
    found = rows()
    print(table(found))
    if given.picture:
        draw(found, given.picture)


if __name__ == "__main__":
    main()
