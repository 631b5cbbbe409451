"""A schedule in the terminal: its timeline, a column for each slot of a tick, and its numbers; several side by side.  Imports no JAX."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from meshloom.parallel.schedules import LETTERS, Op, spell
from meshloom.parallel.simulate import WAYS
from meshloom.parallel.slots import segments
from meshloom.plan.timeline import DOES, TITLES, Study, asked, holds, shade

IDLE = "\u00b7"
PLAIN = ("white on blue", "black on green", "black on yellow")
"""F, B and W where a terminal has eight colours; the nearest of these to a picture's would be grey."""
MOST = 8
"""Parts into which a long timeline is broken; of more, the first and the last are printed."""


def show(s: Study, console: Any) -> None:
    """Prints one schedule: timeline, time, what is in flight and its bytes."""
    console.print(s.name, style="bold")
    for line in (s.what, asked([s])):
        console.print(line, soft_wrap=True, style="dim")
    console.print()
    timeline(s, console)
    console.print()
    console.print(_times(s))
    console.print()
    console.print(_kept(s, console.width))
    if s.flight:
        console.print()
        console.print(holds(s), soft_wrap=True)
        console.print(_rings(s))


def timeline(s: Study, console: Any) -> None:
    """Prints what each stage does in each tick, broken into parts where the console is narrower."""
    from rich.text import Text

    schedule = s.table.schedule
    work: dict[tuple[int, int, int], Op] = {(tick, stage, op.kind): op for tick, stage, op in schedule.each()}
    wide = max(len(spell(op, schedule.stages, schedule.chunks)) for op in work.values()) + 1
    columns = [(tick, kind) for start, stop, on in segments(s.table) for tick in range(start, stop) for kind in range(3) if on[kind]]
    side = len(f"stage {schedule.stages - 1}") + 2
    parts = _broken(columns, max(1, (console.width - side) // wide))
    for i, part in enumerate(parts):
        if part is None:
            console.print(Text("...", style="dim"))
            continue
        console.print() if i else None
        heads = [str(tick) if j == 0 or part[j - 1][0] != tick else "" for j, (tick, _) in enumerate(part)]
        console.print(Text("tick".ljust(side) + "".join(head.ljust(wide) for head in heads), style="dim"))
        for stage in range(schedule.stages):
            line = Text(f"stage {stage}".ljust(side))
            for tick, kind in part:
                op = work.get((tick, stage, kind))
                if op is None:
                    line.append(IDLE.ljust(wide), style="dim")
                else:
                    fill, ink = shade(kind, op.part // schedule.stages, schedule.chunks)
                    style = PLAIN[kind] if console.color_system == "standard" else f"{ink} on {fill}"
                    line.append(spell(op, schedule.stages, schedule.chunks).ljust(wide), style=style)
            console.print(line)
    does = [f"{LETTERS[k]} {said}" for k, said in enumerate(DOES) if any(kind == k for _, kind in columns)]
    console.print(Text(f"{', '.join(does)}; {IDLE} idle. A stage does the columns of a tick one after the other.", style="dim"))


def _broken(columns: list[tuple[int, int]], most: int) -> list[list[tuple[int, int]] | None]:
    """Columns (tick, kind) in parts of so many at most, a tick whole in each; None for those that are left out."""
    parts: list[list[tuple[int, int]] | None] = []
    part: list[tuple[int, int]] = []
    for _, tick in groupby(columns, lambda column: column[0]):
        own = list(tick)
        if part and len(part) + len(own) > most:
            parts.append(part)
            part = []
        part += own
    parts.append(part)
    return parts if len(parts) <= MOST else [*parts[: MOST // 2], None, *parts[-MOST // 2 + 1 :]]


def _grid(names: Sequence[str]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, name in enumerate(names):
        table.add_column(name, justify="right" if i else "left")
    return table


def _times(s: Study) -> Any:
    """How long a step takes under each way to run it."""
    table = _grid(("time of a step", "time", "idle", ""))
    table.columns[3].justify = "left"
    for way, title in TITLES.items():
        table.add_row(title, f"{s.times.wall[way]:g}", f"{s.times.bubble[way]:.1%}", f"[dim]{WAYS[way]}[/]")
    table.add_row("No stage ever waits", f"{s.times.useful:g}", "0.0%", "")
    return table


def _kept(s: Study, width: int) -> Any:
    """What each stage has in flight."""
    stages = s.table.schedule.stages
    shown = list(range(stages)) if 26 + 5 * stages <= width else [*range(4), None, *range(stages - 2, stages)]
    table = _grid(("in flight at most, on stage", *(f"{stage}" if stage is not None else "..." for stage in shown)))
    table.add_row("inputs kept from F to B", *(f"{s.times.kept[stage]}" if stage is not None else "" for stage in shown))
    if s.table.schedule.splits:
        table.add_row("left by B for W", *(f"{s.times.late[stage]}" if stage is not None else "" for stage in shown))
    return table


def _rings(s: Study) -> Any:
    """The ring buffers of a device and their bytes."""
    from meshloom.plan.explain import size

    assert s.flight
    table = _grid(("holds", "places", "bytes of one", "bytes"))
    for ring in s.flight.rings.values():
        table.add_row(ring.holds, str(ring.places), size(ring.each), size(ring.bytes))
    if s.flight.chunk:
        table.add_row("what B works on, made again", "1", size(s.flight.chunk), size(s.flight.chunk))
    table.add_section()
    table.add_row("in all", "", "", size(s.flight.bytes), style="bold")
    return table


def compare(studies: Sequence[Study], left: dict[str, str], console: Any) -> None:
    """Prints schedules side by side.  left: name -> why a schedule is not among them."""
    console.print(asked(studies), style="dim")
    names = ("schedule", "ticks", "time", "idle", "idle asynchronous", "inputs kept", "left for W")
    model = any(s.flight for s in studies)
    table = _grid((*names, *(("bytes in flight",) if model else ())))
    for s in studies:
        bubble, late = s.times.bubble, max(s.times.late)
        row = (s.name, f"{s.times.ticks}", f"{s.times.wall['uniform']:g}", f"{bubble['uniform']:.1%}", f"{bubble['asynchronous']:.1%}")
        table.add_row(*row, f"{max(s.times.kept)}", f"{late}" if late else "-", *([_bytes(s)] if model else []))
    console.print(table)
    ideal = f"{studies[0].times.useful:g}"
    console.print(
        f"time, idle: of one program in lockstep; {ideal} if no stage ever waited. inputs kept, left for W: on the stage with most.",
        style="dim",
    )  # fmt: skip
    if studies[0].flight:
        console.print(f"bytes in flight: on each device, of {studies[0].flight.said}.", style="dim")
    for name, why in left.items():
        console.print(f"{name}: {why}", style="dim")


def _bytes(s: Study) -> str:
    from meshloom.plan.explain import size

    assert s.flight
    return size(s.flight.bytes)
