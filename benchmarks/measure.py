"""What interleaved answers say: medians, and ratios with their spread."""

from statistics import median
from typing import Any, NamedTuple

Answers = dict[str, list[dict[str, Any]]]


class Row(NamedTuple):
    """One program against the base. wall, cpu: median seconds a turn, CPU divided by the cores. ratio: how many times as long as the base, median over
    rounds of the ratio within one round; low, high: its quartiles. cpu_ratio: the same by CPU time."""

    name: str
    wall: float
    cpu: float
    ratio: float
    low: float
    high: float
    cpu_ratio: float


def quartiles(values: list[float]) -> tuple[float, float]:
    """The lower and the upper quartile, linear between neighbours."""
    ordered = sorted(values)

    def at(part: float) -> float:
        where = part * (len(ordered) - 1)
        low = int(where)
        return ordered[low] + (where - low) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])

    return at(0.25), at(0.75)


def rows(answers: Answers, base: str, cores: int) -> list[Row]:
    """A Row a program, against `base`, from the rounds that count."""
    kept = {name: [a for a in given if not a["warm"]] for name, given in answers.items()}

    def one(name: str) -> Row:
        walls = [a["wall"] / b["wall"] for a, b in zip(kept[name], kept[base])]
        cpus = [a["cpu"] / max(b["cpu"], 1e-9) for a, b in zip(kept[name], kept[base])]
        wall, cpu = (median(a[kind] for a in kept[name]) for kind in ("wall", "cpu"))
        return Row(name, wall, cpu / cores, median(walls), *quartiles(walls), median(cpus))

    return [one(name) for name in kept]


def disagreement(answers: Answers, names: tuple[str, ...], key: str = "loss") -> float:
    """The largest relative difference of a number (the loss) between programs in the same turn: that they do the same work."""
    series = [[a[key] for a in answers[name]] for name in names]
    return max((abs(a - b) / max(abs(a), 1e-9) for other in series[1:] for a, b in zip(series[0], other)), default=0.0)
