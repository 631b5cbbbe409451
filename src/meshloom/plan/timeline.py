"""The timeline of a pipeline: what is shown of a schedule, and its picture as SVG or PNG.  `ticks.py` prints the same.  Imports no JAX."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from meshloom.parallel.schedules import LETTERS, Schedule, W
from meshloom.parallel.simulate import RECOMPUTE, STASH, WAYS, Simulated, simulate, times
from meshloom.parallel.slots import Table, compile
from meshloom.plan.page import INK, PAPER, SOFT, WIDTH, Page, box, heading, page, text, width, write


class Ring(NamedTuple):
    """A ring buffer on every stage's device.  places: with one that takes what nobody reads, where there is one.  each: bytes of one place."""

    holds: str
    places: int
    each: int

    @property
    def bytes(self) -> int:
        """All of it."""
        return self.places * self.each


class Flight(NamedTuple):
    """said: of which model and micro-batch.  layers: of a chunk.  rings: by name.  chunk: bytes that the backward of one chunk works on: the inputs of
    its layers, made again by B, or what it reads out of its place."""

    said: str
    layers: int
    rings: dict[str, Ring]
    chunk: int

    @property
    def bytes(self) -> int:
        """Most that is held at a time."""
        return sum(ring.bytes for ring in self.rings.values()) + self.chunk


class Study(NamedTuple):
    """All that is shown of one schedule.  what: it is, in a phrase.  costs: of a whole stage's F, B and W.  flight: what it holds of a model, where there
    is one."""

    what: str
    table: Table
    costs: tuple[float, float, float]
    times: Simulated
    flight: Flight | None = None

    @property
    def name(self) -> str:
        """The schedule's."""
        return self.table.schedule.name


def study(s: Schedule, stash: bool = False, what: str = "a table of your own") -> Study:
    """A schedule with its times.  stash: B finds what it needs; else it runs the forward again.  Raises ValueError for a table that cannot be run."""
    costs, table = STASH if stash else RECOMPUTE, compile(s)
    return Study(what, table, costs, simulate(table, costs))


TITLES = {"uniform": "One program in lockstep", "stage": "Own work in lockstep", "asynchronous": "A program for each stage"}
"""Way to run a table -> its heading."""
COLOURS = ("#2f6fb3", "#2e8b57", "#d9661f")
"""Of F, B and W."""
DOES = ("forward", "backward", "gradients of the weights")
LANE, LABEL, SIDE = 21.0, 56.0, 96.0
"""Height of a stage's lane; room for its name, and for its numbers on the right; points."""
MOST = 12_000
"""Boxes that a picture holds."""


def draw(studies: Sequence[Study], path: Path) -> None:
    """Writes a picture: of one schedule, both ways to run it; of several, each as it runs.  path: .svg or .png; else a ValueError, and also for more
    than anyone could see."""
    p, height = compose(studies)
    write(p, height, path)


def compose(studies: Sequence[Study]) -> tuple[Page, float]:
    """The page, and how high it is."""
    ways = ("uniform", "asynchronous") if len(studies) == 1 else ("uniform",)
    boxes = len(ways) * sum(int((s.table.schedule.ops[..., 0] >= 0).sum()) for s in studies)
    if boxes > MOST:
        raise ValueError(
            f"A picture of {boxes:,} pieces of work is more than can be seen; {MOST:,} is the most. Ask for fewer micro-batches: "
            "between the ends of a step the same ticks repeat."
        )
    p, first = page({}), studies[0].table.schedule
    end = text(p, 20, 22, first.name if len(studies) == 1 else "Schedules", 18, bold=True)
    text(
        p,
        end + 12,
        24,
        studies[0].what if len(studies) == 1 else "each as one program runs it, in lockstep",
        11.5,
        SOFT,
        room=WIDTH - 32 - end,
    )
    text(p, 20, 44, asked(studies), 11.5, SOFT, room=WIDTH - 40)
    text(p, 20, 60, holds(studies[0]) if len(studies) == 1 else "", 11.5, SOFT, room=WIDTH - 40)
    y = _legend(p, studies, 62 + 16 * bool(len(studies) == 1 and studies[0].flight))
    longest = max(s.times.wall[way] for s in studies for way in ways)
    for s in studies:
        for way in ways:
            y = _panel(p, s, way, y + 10, longest, len(studies) > 1)
    return p, y + 8


def asked(studies: Sequence[Study]) -> str:
    """What is shown, in a line."""
    s = studies[0].table.schedule
    parts = f", {s.chunks} chunks on each" if len(studies) == 1 and s.chunks > 1 else ""
    f, b, w = studies[0].costs
    again = " (B runs the forward again)" if (f, b, w) == RECOMPUTE else ""
    both = f"B {b:g} and W {w:g}" if all(each.table.schedule.splits for each in studies) else f"B {b + w:g}"
    both = f"B {b + w:g}, or {b:g} and W {w:g}" if len({each.table.schedule.splits for each in studies}) > 1 else both
    return f"{_many(s.stages, 'stage')}{parts}, {_many(s.micro, 'micro-batch')}; a stage's F takes 1, {both}{again}"


def holds(s: Study) -> str:
    """The memory of what is in flight, in a line; "" where there is no model."""
    if not s.flight:
        return ""
    from meshloom.plan.explain import size

    layers = f"{_many(s.flight.layers, 'layer')} {'a chunk' if s.table.schedule.chunks > 1 else 'a stage'}"
    return f"{s.flight.said}, {layers}: {size(s.flight.bytes)} in flight on each device"


def _many(n: int, what: str) -> str:
    return f"{n} {what}{('es' if what.endswith('h') else 's') * (n > 1)}"


def shade(kind: int, chunk: int, chunks: int) -> tuple[str, str]:
    """The colour of a piece of work, lighter for later chunks, and that of what is written on it."""
    pale = 0.6 * chunk / max(chunks - 1, 1)
    parts = [int(COLOURS[kind][i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(n + (255 - n) * pale):02x}" for n in parts), "#ffffff" if pale < 0.3 else INK


def _legend(p: Page, studies: Sequence[Study], y: float) -> float:
    """What the colours say.  Returns where it ends."""
    x, splits = 20.0, any(s.table.schedule.splits for s in studies)
    for kind, said in enumerate(DOES):
        if kind < W or splits:
            box(p, x, y - 5, 14, 10, COLOURS[kind], COLOURS[kind])
            x = text(p, x + 19, y, f"{LETTERS[kind]}  {said}", 10.5) + 22
    box(p, x, y - 5, 14, 10, PAPER, SOFT, 0.5)
    x = text(p, x + 19, y, "idle", 10.5) + 22
    more = "; lighter: later chunks of the stage" if any(s.table.schedule.chunks > 1 for s in studies) else ""
    text(p, x, y, f"numbers are micro-batches{more}", 10.5, SOFT, room=WIDTH - 20 - x)
    return y + 12


def _panel(p: Page, s: Study, way: str, y: float, longest: float, several: bool) -> float:
    """The lanes of all stages, to scale.  longest: time that fills the page.  Returns where it ends."""
    schedule = s.table.schedule
    said = f"{s.times.bubble[way]:.1%} idle, time {s.times.wall[way]:g}"
    y = (
        heading(p, y, s.name if several else TITLES[way], f"{said}; {_many(s.times.ticks, 'tick')}" if several else f"{said}; {WAYS[way]}")
        + 4
    )
    left, scale = 20 + LABEL, (WIDTH - 40 - LABEL - SIDE) / longest
    right = WIDTH - 20 - SIDE + 10
    text(p, right, y + 2, "inputs kept" + (" / for W" if schedule.splits else ""), 9, SOFT)
    y += 10
    for stage in range(schedule.stages):
        top = y + stage * LANE
        text(p, 20, top + LANE / 2 - 1, f"stage {stage}", 10.5, SOFT)
        box(p, left, top, s.times.wall[way] * scale, LANE - 3, PAPER, "none", 0, f"{s.name}-{way}-{stage}")
        kept = f"{s.times.kept[stage]}" + (f" / {s.times.late[stage]}" if schedule.splits else "")
        text(p, right, top + LANE / 2 - 1, kept, 10.5, mono=True)
    for (kind, micro, part), (start, stop) in times(s.table, s.costs, way)[0].items():
        top, x, wide = y + part % schedule.stages * LANE, left + start * scale, (stop - start) * scale
        fill, ink = shade(kind, part // schedule.stages, schedule.chunks)
        box(p, x, top, wide, LANE - 3, fill, "white", min(0.8, wide / 6))
        size = min(9.0, 9 * (wide - 1.5) / width(str(micro), 9))
        if size >= 4.5:
            text(p, x + wide / 2, top + LANE / 2 - 1.5, str(micro), size, ink, at="center")
    return y + schedule.stages * LANE
