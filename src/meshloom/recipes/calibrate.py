"""`meshloom calibrate`: measures the present devices and writes what the planner needs to know of them."""

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

from meshloom import __version__
from meshloom.core import yamls
from meshloom.core.files import check_ours, human, write_text
from meshloom.plan.cost import SENT
from meshloom.plan.hardware import Hardware, kind_of
from meshloom.plan.link import steps
from meshloom.plan.measure import EFFORTS, KINDS, Effort, Point, cores, plan

HEAD = "# Measured by `meshloom calibrate` "
"""How a file of hardware that was measured begins."""


def calibrate(name: str, out: Path, quick: bool = False) -> dict[str, Any]:
    """Measures, prints what was found, writes the entry.  Returns it."""
    from rich.console import Console

    check_ours(out, HEAD, "hardware that was measured")
    devices, begin = jax.devices(), time.perf_counter()
    console = Console()
    points = measured(devices, effort_of(devices[0].platform, quick), console)
    entry = entry_of(name, devices, points)
    write_text(out, f"{HEAD}{__version__} on {time.strftime('%d %B %Y')}.\n{yamls.text(entry)}")
    show(entry, points, console)
    console.print(
        f"Measured in {time.perf_counter() - begin:.0f} s. Written to {out}; use it as: meshloom plan MODEL --on {out}", soft_wrap=True
    )
    return entry


def effort_of(platform: str, quick: bool) -> Effort:
    """How much to measure."""
    return EFFORTS["quick" if platform == "cpu" and quick else "cpu" if platform == "cpu" else "other"]


def measured(devices: list, effort: Effort, console: Any = None) -> list[Point]:
    """All points, with a display of how far it is on a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    todo, points = plan(devices, effort), []
    columns = (TextColumn("{task.description:40}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True, disable=console is None or not console.is_terminal) as bar:
        task = bar.add_task("", total=len(todo))
        for what, run in todo:
            bar.update(task, description=what)
            points.append(run())
            bar.advance(task)
    return points


def entry_of(name: str, devices: list, points: Iterable[Point]) -> dict[str, Any]:
    """What `plan.hardware.own` reads. Of simulated devices the rates are the machine's, of others one device's.
    Where the device is in the table, its peaks are kept, and what was measured is the part of them that it reaches."""
    points, count, platform = list(points), len(devices), devices[0].platform
    many = count if platform == "cpu" else 1
    known = kind_of(devices[0])
    rates = best(points, "products", lambda p: many * 2 * p.size**3 / p.seconds)
    bandwidth = max(many * 2 * p.size / p.seconds for p in points if p.what == "memory")
    kernels = [p.seconds for p in points if p.what == "kernel"]
    start, latency, rate, slower = fit(points, platform)
    where = {"rate": round(many * rate), "latency": round(latency, 9)}
    return {
        "name": name,
        "title": f"{devices[0].device_kind}, {cores()} cores shared by simulated devices" if platform == "cpu" else devices[0].device_kind,
        "platform": {"cuda": "gpu", "rocm": "gpu"}.get(platform, platform),
        "memory": _memory(devices[0]),
        **({"shared": True, "shape": str(count)} if platform == "cpu" else {"shape": f"{jax.process_count()}x{len(jax.local_devices())}"}),
        **_against(known, rates, bandwidth),
        "node": len(jax.local_devices()),
        "start": round(start, 9),
        "op": round(min(kernels) / many, 10) if kernels else 0.0,
        **({"between_products": round(between)} if (between := _between(points, many)) and platform == "cpu" else {}),
        "inside": where,
        "between": dict(where),
        "slower": {kind: round(n, 3) for kind, n in slower.items()},
        "sources": [f"measured by `meshloom calibrate` on {count} devices; `between` was not: it is as `inside`"],
    }


def _against(known: Hardware | None, rates: dict[str, float], bandwidth: float) -> dict[str, Any]:
    """Peaks and what is reached of them: of the table where the device is in it, else what was measured."""
    if known is None:
        return {"bandwidth": round(bandwidth), "flops": {t: round(r) for t, r in rates.items()}, "efficiency": 1.0}
    part = max(rates[t] / known.flops[t] for t in rates if t in known.flops)
    reached = {"stream": round(min(1.0, bandwidth / known.bandwidth), 3), "efficiency": round(min(1.0, part), 3)}
    return {"bandwidth": round(known.bandwidth), "flops": {t: round(r) for t, r in known.flops.items()}, **reached}


def _between(points: list[Point], many: int) -> float:
    """Bytes a second of a norm (one number read, one written) and a gated activation (two read, one written)."""
    return max((many * 5 * p.size / p.seconds for p in points if p.what == "between"), default=0.0)


def best(points: list[Point], what: str, rate: Any) -> dict[str, float]:
    """Type -> the highest rate of the points of one kind."""
    found: dict[str, float] = {}
    for p in points:
        if p.what == what:
            found[p.dtype] = max(found.get(p.dtype, 0.0), rate(p))
    return found


def fit(points: list[Point], platform: str) -> tuple[float, float, float, dict[str, float]]:
    """Alpha and beta.  Returns seconds to start, seconds of a step, bytes a device sends a second, and by kind how much slower than a gather it is.

    The smallest arrays tell start and step, by least squares over groups of different sizes (all of it start where there is one size); what the largest
    take beyond that tells the rate, the median over groups."""
    import numpy as np

    moved = [p for p in points if p.what in KINDS]
    if not moved:  # one device: nothing to measure, and nothing will move
        return 0.0, 0.0, 1e12, {}
    small = [p for p in moved if p.size == min(q.size for q in moved) and p.what != "collective-permute"]
    made = np.array([[1.0, steps(platform, p.n)] for p in small])
    took = np.array([p.seconds for p in small])
    if len({p.n for p in small}) > 1:
        start, step = np.linalg.lstsq(made / took[:, None], np.ones(len(small)), rcond=None)[0]
        start, step = (
            (start, step)
            if start > 0 and step > 0
            else (0.0, float(np.mean(took / made[:, 1])))
            if start <= 0
            else (float(took.mean()), 0.0)
        )
    else:
        start, step = float(took.min()), 0.0
    rates: dict[str, float] = {}
    for kind in KINDS:
        large = [p for p in moved if p.what == kind and p.size == max(q.size for q in moved)]
        beyond = [max(p.seconds - start - step * steps(platform, p.n), 0.1 * p.seconds) for p in large]
        sent = [SENT.get(kind, lambda n: (n - 1) / n)(p.n) * p.size for p in large]
        rates[kind] = float(np.median([n / t for n, t in zip(sent, beyond)]))
    gather = rates["all-gather"]
    return float(start), float(step), gather, {kind: gather / r for kind, r in rates.items() if kind != "all-gather"}


def _memory(device: Any) -> int:
    """Bytes that a device says it has; of a CPU the machine's."""
    stats = device.memory_stats() if hasattr(device, "memory_stats") else None
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def show(entry: dict[str, Any], points: list[Point], console: Any) -> None:
    """Prints what was found: the entry's figures, then collectives by size."""
    from rich.table import Table

    whole = " (the machine)" if entry.get("shared") else " a device"
    table = Table(box=None, show_header=False, pad_edge=False)
    for dtype, flops in entry["flops"].items():
        table.add_row(f"{dtype} products", f"{flops * entry['efficiency'] / 1e9:,.1f} billion operations a second{whole}")
    table.add_row("memory", f"{human(entry['bandwidth'] * entry.get('stream', 1.0))} a second{whole}")
    table.add_row(
        "collectives",
        f"{entry['start'] * 1e6:.1f} us to start, {entry['inside']['latency'] * 1e6:.1f} us a step, {human(entry['inside']['rate'])} a second{whole}",
    )
    for kind, times in entry["slower"].items():
        table.add_row("", f"bytes of {kind} take {times:.2f} times as long as a gather's")
    console.print(table, highlight=False)
    sizes = sorted({p.size for p in points if p.what in KINDS})
    if not sizes:
        return
    table = Table(box=None, pad_edge=False)
    for head in ("collective", "devices", *(human(n) for n in sizes)):
        table.add_column(head, justify="left" if head == "collective" else "right")
    for kind, n in dict.fromkeys((p.what, p.n) for p in points if p.what in KINDS):
        mine = {p.size: p.seconds for p in points if (p.what, p.n) == (kind, n)}
        table.add_row(kind, str(n), *(f"{mine[size] * 1e6:,.0f} us" for size in sizes))
    console.print(table, highlight=False)
