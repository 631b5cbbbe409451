"""A schedule as a program reads it: which micro-batch, chunk and place in a ring buffer each stage uses in each tick.

Four ring buffers hold what lives from one tick to another: `inbox` (activations that have arrived), `kept` (inputs of a part, from its F to its B),
`grads` (cotangents that have arrived) and `late` (what a B leaves for its W). A place is taken again as soon as what it held was read for the last
time. What has nothing to do reads place 0 and writes where nothing is kept at that moment, so that no program needs a choice between whole buffers; a
buffer has one more place, at the index that is its size, only where a stage once has no such place.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from meshloom.parallel.schedules import B, F, Op, Schedule, W, arrange, check, groups

RINGS = ("inbox", "kept", "grads", "late")
"""The ring buffers."""
COLUMNS = {
    "forward": -1, "forward_chunk": 0, "forward_from": "inbox", "forward_keep": "kept", "enter": -1, "leave": -1, "leave_to": "grads",
    "backward": -1, "backward_chunk": 0, "backward_kept": "kept", "backward_from": "grads", "backward_late": "late", "exit": -1,
    "weight": -1, "weight_chunk": 0, "weight_from": "late", "arrive_x": "inbox", "arrive_g": "grads",
}  # fmt: skip
"""Column -> what it says where there is nothing to do: a number, or a ring buffer of which it says a place that is free (0 where it reads).

forward, backward, weight    the micro-batch of the stage's F, B, W; each with its chunk in *_chunk
forward_from, forward_keep   where F reads its input (the first part has none: the embedding), and where it keeps it for B
enter, exit                  the micro-batch whose embedding the first part needs, and whose embedding has its backward; the same on all stages
leave, leave_to              the micro-batch whose head runs, the same on all stages; where the loss's cotangent goes, on the last stage
backward_kept, backward_from where B finds the input and the cotangent; backward_late: where it leaves the work of W
weight_from                  where W finds it
arrive_x                     where the activation goes that arrives at the end of this tick's F
arrive_g                     where the cotangent goes that arrives before this tick's B; it was made in the last tick before that had a B on any stage
"""

WRITES = {"arrive_g": 0.0, "forward_keep": 0.2, "arrive_x": 0.5, "leave_to": 0.6, "backward_late": 0.8}
"""Columns of places that are written -> when in a tick."""
READS = {"inbox": 0.1, "kept": 0.7, "grads": 0.7, "late": 0.9}
"""Ring buffer -> when in a tick it is read."""


class Table(NamedTuple):
    """columns: as in COLUMNS, int32 [ticks, stages].  slots: ring buffer -> places that are kept in.  sizes: the same with the place that writes
    with nothing to do need, where they need one; 1 at least.  used: ring buffer -> places kept in on each stage alone."""

    schedule: Schedule
    columns: dict[str, np.ndarray]
    slots: dict[str, int]
    sizes: dict[str, int]
    used: dict[str, tuple[int, ...]]


class Life(NamedTuple):
    """How long a place is taken: from `start`, in ticks (with a half: after the tick's F), to the end of tick `stop`."""

    start: float
    stop: int
    key: Op


class Taken(NamedTuple):
    """When a place is taken: from each of `starts`, in order, at most until the same of `stops`, which is the last of all that began by then."""

    starts: list[float]
    stops: list[float]

    def at(self, time: float) -> bool:
        """Whether anything is there at a time."""
        before = bisect_right(self.starts, time)
        return before > 0 and self.stops[before - 1] >= time


def compile(s: Schedule) -> Table:
    """The columns of a schedule and its ring buffers.  Raises ValueError for one that `schedules.check` refuses."""
    check(s)
    return _table(s, {op: tick for tick, _, op in s.each()})


def forward_only(stages: int, micro: int, chunks: int = 1) -> Table:
    """The table of a pass without backward. Only F has work; `leave` is the tick in which the last part's output is there. Any number of micro-batches
    fits."""
    orders = [[Op(F, m, v * stages + stage) for m, v in groups(stages, micro, chunks)] for stage in range(stages)]
    s = Schedule("forward", stages, micro, chunks, arrange(orders, chunks))
    return _table(s, {op: tick for tick, _, op in s.each()})


def _table(s: Schedule, done: dict[Op, int]) -> Table:
    lives = _lives(s, done)
    places = {ring: [_places(of) for of in stages] for ring, stages in lives.items()}
    used = {ring: tuple(max(found.values(), default=-1) + 1 for found in stages) for ring, stages in places.items()}
    slots = {ring: max(of) for ring, of in used.items()}
    columns = {
        name: np.full((s.ticks, s.stages), slots[nothing] if isinstance(nothing, str) else nothing, np.int32)
        for name, nothing in COLUMNS.items()
    }
    travels = _travels(s)
    for op, tick in done.items():
        stage, chunk = op.part % s.stages, op.part // s.stages

        def put(name: str, value: int, at: int | slice = stage, tick: int = tick) -> None:
            columns[name][tick, at] = value

        def slot(ring: str, op: Op, stage: int = stage) -> int:
            return places[ring][stage].get(op, slots[ring])

        kind = ("forward", "backward", "weight")[op.kind]
        put(kind, op.micro)
        put(f"{kind}_chunk", chunk)
        if op.kind == F:
            put("forward_from", slot("inbox", op))
            put("forward_keep", slot("kept", op))
            _sent(s, op, put, slot, tick)
        elif op.kind == B:
            put("backward_kept", slot("kept", op._replace(kind=F)))
            put("backward_from", slot("grads", op))
            put("backward_late", slot("late", op._replace(kind=W)))
            _sent(s, op, put, slot, travels.get(tick, tick))
        else:
            put("weight_from", slot("late", op))
    taken = {ring: [_taken(ring, s, lives[ring][i], places[ring][i]) for i in range(s.stages)] for ring in RINGS}
    sizes = {ring: max(1, n) for ring, n in slots.items()}
    for name, ring in COLUMNS.items():
        if not isinstance(ring, str):
            continue
        for tick, stage in np.argwhere(columns[name] == slots[ring]).tolist():
            columns[name][tick, stage] = _free(taken[ring][stage], tick + WRITES[name], slots[ring]) if name in WRITES else 0
        sizes[ring] = max(sizes[ring], int(columns[name].max()) + 1)
    return Table(s, columns, slots, sizes, used)


def _taken(ring: str, s: Schedule, lives: list[Life], places: dict[Op, int]) -> dict[int, Taken]:
    """From when until when each place of a stage is taken, within ticks."""
    first = {"inbox": 0.0, "kept": WRITES["forward_keep"], "late": WRITES["backward_late"]}
    last = s.stages * s.chunks - 1
    start = lambda key: first.get(ring, WRITES["leave_to"] if key.part == last else WRITES["arrive_g"])
    found: dict[int, Taken] = {}
    for begin, end, place in sorted((life.start + start(life.key), life.stop + READS[ring], places[life.key]) for life in lives):
        taken = found.setdefault(place, Taken([], []))
        taken.starts.append(begin)
        taken.stops.append(max(end, taken.stops[-1]) if taken.stops else end)
    return found


def _free(taken: Mapping[int, Taken], at: float, count: int) -> int:
    """The first of `count` places that nothing is in at a time, else the one behind them."""
    return next(place for place in range(count + 1) if place not in taken or not taken[place].at(at))


def _sent(s: Schedule, op: Op, put, slot, tick: int) -> None:
    """Columns of what an F or B sends on, which arrives in `tick`; from the last part to the loss, from the first to the embedding."""
    last = s.stages * s.chunks - 1
    if op.kind == F and op.part == last:
        put("leave", op.micro, slice(None))
        put("leave_to", slot("grads", op._replace(kind=B)))
    elif op.kind == F:
        to = op._replace(part=op.part + 1)
        put("arrive_x", slot("inbox", to, to.part % s.stages), to.part % s.stages)
    if op == Op(F, op.micro, 0):
        put("enter", op.micro, slice(None))
    elif op == Op(B, op.micro, 0):
        put("exit", op.micro, slice(None))
    elif op.kind == B:
        to = op._replace(part=op.part - 1)
        put("arrive_g", slot("grads", to, to.part % s.stages), to.part % s.stages, tick)


def _travels(s: Schedule) -> dict[int, int]:
    """A tick with a B on any stage -> the next such, when what it made arrives."""
    ticks = np.flatnonzero((s.ops[:, :, B, 0] >= 0).any(1)).tolist()
    return dict(pairwise(ticks))


def _lives(s: Schedule, done: dict[Op, int]) -> dict[str, list[list[Life]]]:
    """How long each place is taken, by ring buffer and stage. A life's key is the operation that reads it last; for `kept`, the F that wrote it."""
    lives: dict[str, list[list[Life]]] = {ring: [[] for _ in range(s.stages)] for ring in RINGS}
    travels, last = _travels(s), s.stages * s.chunks - 1
    for op, tick in done.items():
        here = op.part % s.stages
        back, weight = op._replace(kind=B), op._replace(kind=W)
        if op.kind == F and op.part > 0:  # it arrives after the F of its tick has read
            lives["inbox"][here].append(Life(done[op._replace(part=op.part - 1)] + 0.5, tick, op))
        if op.kind == F and back in done:
            lives["kept"][here].append(Life(tick, done[back], op))
        if op.kind == B:
            start = done[op._replace(kind=F)] if op.part == last else travels[done[op._replace(part=op.part + 1)]]
            lives["grads"][here].append(Life(start, tick, op))
        if op.kind == B and weight in done:
            lives["late"][here].append(Life(tick, done[weight], weight))
    return lives


def _places(lives: Iterable[Life]) -> dict[Op, int]:
    """A place for each life: the first that is free. So many are used as ever live at one time, no more."""
    found, free_after = {}, []
    for start, stop, key in sorted(lives):
        place = next((i for i, end in enumerate(free_after) if end < start), len(free_after))
        free_after[place : place + 1] = [stop]
        found[key] = place
    return found


def arrivals(s: Schedule) -> dict[str, np.ndarray]:
    """arrive_x, arrive_g: bool [ticks], whether anything arrives at any stage."""
    found, travels = {name: np.zeros(s.ticks, bool) for name in ("arrive_x", "arrive_g")}, _travels(s)
    for tick, _, op in s.each():
        if op.kind == F and op.part < s.stages * s.chunks - 1:
            found["arrive_x"][tick] = True
        elif op.kind == B and op.part > 0:
            found["arrive_g"][travels[tick]] = True
    return found


def segments(table: Table) -> list[tuple[int, int, tuple[bool, bool, bool]]]:
    """Runs of ticks in which the same kinds are at work on any stage: (first tick, tick after the last, (F, B, W))."""
    active = [(f, b, w) for f, b, w in np.any(table.schedule.ops[..., 0] >= 0, axis=1).tolist()]
    cuts = [0, *(tick for tick in range(1, len(active)) if active[tick] != active[tick - 1]), len(active)]
    return [(start, stop, active[start]) for start, stop in pairwise(cuts)]
