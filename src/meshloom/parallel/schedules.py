"""Schedules of a pipeline as tables: what each stage does in each tick.  numpy only.

The layers are cut into stages x chunks consecutive parts; part chunk * stages + stage lies on that stage. Every part runs each micro-batch once
forward (F) and once backward (B); a schedule that puts off the gradients of the weights has a third kind (W), and its B makes the gradient of the
input alone. A tick has one slot for each kind, and all stages run them in this order; what is sent in a tick can be used from the next tick on.

That F and B share a tick is what makes a program efficient in which all stages keep step: with one operation a tick, neighbours do F and B by turns,
each tick lasts as long as both, and half of the time is lost however many micro-batches there are. With both in a tick,
GPipe and 1F1B with or without interleaving take just the time of stages that never wait for a tick to end; the price is that a micro-batch comes
back after two ticks a stage, so that stage s of S keeps 2 (S - 1 - s) + 1 inputs and not S - s.

Sources: GPipe, arXiv 1811.06965; 1F1B, PipeDream-Flush, arXiv 2006.09503; interleaved, arXiv 2104.04473, section 2.2; ZB-H1, arXiv 2401.10241, section 2.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from meshloom.core.config import nearest
from meshloom.core.files import explained, read_lines

F, B, W = 0, 1, 2
"""Kinds of work: forward; backward; gradients of the weights, where they are apart from B."""
LETTERS, CHUNKS = "FBW", "abcdefghijklmnopqrstuvwxyz"


class Op(NamedTuple):
    """One part's work on one micro-batch.  part: of all parts, chunk * stages + stage."""

    kind: int
    micro: int
    part: int


class Schedule(NamedTuple):
    """ops: int32 [ticks, stages, 3, 2], the micro-batch and the chunk of each kind; -1 for nothing."""

    name: str
    stages: int
    micro: int
    chunks: int
    ops: np.ndarray

    @property
    def ticks(self) -> int:
        """Ticks of a step."""
        return len(self.ops)

    @property
    def splits(self) -> bool:
        """Whether the gradients of the weights are work of their own."""
        return bool((self.ops[:, :, W, 0] >= 0).any())

    def each(self) -> Iterator[tuple[int, int, Op]]:
        """All work with its tick and stage, in the order of time."""
        for tick, stage, kind in np.argwhere(self.ops[..., 0] >= 0).tolist():
            micro, chunk = self.ops[tick, stage, kind].tolist()
            yield tick, stage, Op(kind, micro, chunk * self.stages + stage)


class Row(NamedTuple):
    """A kind of schedule.  warm: forwards of a stage before its first backward, of (stages after it, stages, chunks, micro-batches, ticks that the way
    there and back takes a stage).  late: whether stage s puts off each W by s backwards.  what: in a phrase."""

    warm: Callable[[int, int, int, int, int], int]
    late: bool
    what: str


def _all(after: int, stages: int, chunks: int, micro: int, back: int) -> int:
    return micro * chunks


def _round_trip(after: int, stages: int, chunks: int, micro: int, back: int) -> int:
    return back * after + (chunks - 1) * stages


SCHEDULES = {
    "gpipe": Row(_all, False, "all forwards, then all backwards"),
    "1f1b": Row(_round_trip, False, "a backward as soon as there can be one"),
    "interleaved": Row(_round_trip, False, "1f1b with several chunks of layers on a stage"),
    "zb": Row(_round_trip, True, "1f1b with the gradients of the weights put off into the gaps (ZB-H1)"),
}
"""Name -> how its table is made. `interleaved` is asked for with its chunks: `interleaved2`."""
INTERLEAVED, CELL = re.compile(r"interleaved(\d+)"), re.compile(r"([FBW])(\d{1,6})([a-z]?)")
"""How names and cells of a table are read."""


def chunks_of(name: str) -> int:
    """Chunks of a stage under a schedule's name.  Raises ValueError for a name that is none, with the nearest."""
    found = INTERLEAVED.fullmatch(name)
    if found and 1 < int(found[1]) <= len(CHUNKS):
        return int(found[1])
    if found and int(found[1]) > 1:
        raise ValueError(f"'{name}' is more chunks than there are letters for them. Give {len(CHUNKS)} at most; 2 to 4 is usual.")
    if found:
        raise ValueError(
            f"'{name}' leaves the layers of a stage in one piece. Write '1f1b', or give 2 chunks or more, as in 'interleaved2'."
        )
    if name == "interleaved":
        raise ValueError("'interleaved' lacks the number of chunks on a stage. Write 'interleaved2', or another number of 2 or more.")
    if name in SCHEDULES:
        return 1
    names = [n + "2" * (n == "interleaved") for n in SCHEDULES]
    near = nearest(name, names)
    guess = f" Did you mean '{near}'?" if near else ""
    raise ValueError(f"'{name}' is not a schedule.{guess} There are: {', '.join(names)} (or another number of chunks).")


def described(name: str) -> str:
    """What a schedule does, in a phrase."""
    return SCHEDULES["interleaved" if chunks_of(name) > 1 else name].what


def make(name: str, stages: int, micro: int, packed: bool = True) -> Schedule:
    """The schedule of a name.  packed: the F and the B of a stage share a tick; else a stage does one thing in a tick, as papers draw it.
    Raises ValueError for a name that is none, numbers below 1, and micro-batches that do not fit."""
    chunks = chunks_of(name)
    for what, n in (("stages", stages), ("micro-batches", micro)):
        if n < 1:
            raise ValueError(f"A pipeline of {n} {what} is none. Give 1 or more.")
    if chunks > 1 and micro % stages:
        down = micro // stages * stages
        fits = f"{down} or {down + stages}" if down else f"{stages}"
        raise ValueError(
            f"'{name}' sends micro-batches through {stages} stages in groups of {stages}, and {micro} micro-batches do not fill them. "
            f"The nearest that fit: {fits}."
        )
    row = SCHEDULES["interleaved" if chunks > 1 else name]
    orders = [_order(row, stage, stages, micro, chunks, packed) for stage in range(stages)]
    return Schedule(name, stages, micro, chunks, arrange(orders, chunks, packed))


def groups(stages: int, micro: int, chunks: int) -> list[tuple[int, int]]:
    """(micro-batch, chunk) in the order in which a stage runs them forward: groups of `stages` micro-batches, each through all chunks."""
    if chunks == 1:
        return [(m, 0) for m in range(micro)]
    return [(m, v) for start in range(0, micro, stages) for v in range(chunks) for m in range(start, min(start + stages, micro))]


def _order(row: Row, stage: int, stages: int, micro: int, chunks: int, packed: bool) -> list[Op]:
    """What a stage does, in order: forwards to warm up, then by turns a forward and a backward, then the backwards that are left."""
    todo = groups(stages, micro, chunks)
    forward = [Op(F, m, v * stages + stage) for m, v in todo]
    backward = [Op(B, m, (chunks - 1 - v) * stages + stage) for m, v in todo]
    weight = [op._replace(kind=W) for op in backward] if row.late else []
    warm = min(row.warm(stages - 1 - stage, stages, chunks, micro, 2 if packed or chunks > 1 else 1), len(forward))
    late = min(stage, len(weight))
    order = forward[:warm]
    for i, op in enumerate(backward):
        order += [*forward[warm + i : warm + i + 1], op, *(weight[i - late : i - late + 1] if i >= late else [])]
    return order + weight[len(weight) - late :]


def needs(op: Op, parts: int) -> list[tuple[Op, int]]:
    """What has to be done before an operation, and how many ticks before: 0 on the same stage, 1 where it comes from another part."""
    kind, micro, part = op
    before = [] if part == 0 else [(Op(F, micro, part - 1), 1)]
    after = [] if part == parts - 1 else [(Op(B, micro, part + 1), 1)]
    return (before, [(Op(F, micro, part), 0), *after], [(Op(B, micro, part), 0)])[kind]


def arrange(orders: Sequence[Sequence[Op]], chunks: int, packed: bool = True) -> np.ndarray:
    """Ticks for what each stage does in order, each operation as early as it can be.  packed: several kinds share a tick.  Returns `Schedule.ops`.
    Raises ValueError where stages wait for each other in a circle."""
    stages, ticks, done = len(orders), [], {}
    at = [0] * stages

    def ready(op: Op, tick: int) -> bool:
        return all(done.get(need, tick) + gap <= tick and need in done for need, gap in needs(op, stages * chunks))

    while any(i < len(order) for i, order in zip(at, orders)):
        tick, row = len(ticks), np.full((stages, 3, 2), -1, np.int32)
        for stage, order in enumerate(orders):
            last = -1
            while at[stage] < len(order) and (op := order[at[stage]]).kind > last and ready(op, tick):
                row[stage, op.kind], done[op], last = (op.micro, op.part // stages), tick, op.kind if packed else W
                at[stage] += 1
        if (row < 0).all():
            raise ValueError(_circle(orders, at, done, chunks))
        ticks.append(row)
    return np.stack(ticks)


def _circle(orders: Sequence[Sequence[Op]], at: Sequence[int], done: dict[Op, int], chunks: int) -> str:
    """The sentence for stages that wait for each other: from one that stands still to what it waits for, until one comes again."""
    stages, stage, said = len(orders), next(s for s, order in enumerate(orders) if at[s] < len(order)), {}
    while stage not in said:
        op = orders[stage][at[stage]]
        need = next(need for need, _ in needs(op, stages * chunks) if need not in done)
        said[stage] = f"{spell(op, stages, chunks)} of stage {stage} needs {spell(need, stages, chunks)} of stage {need.part % stages}"
        ahead = orders[need.part % stages][at[need.part % stages]]
        said[stage] += f", which stands behind {spell(ahead, stages, chunks)}" if ahead != need else ""
        stage = need.part % stages
    circle = list(said)[list(said).index(stage) :]
    return f"Stages wait for each other in a circle: {'; '.join(said[s] for s in circle)}."


def spell(op: Op, stages: int, chunks: int) -> str:
    """An operation as a table writes it: kind, micro-batch, and the chunk as a letter where there are several."""
    return f"{LETTERS[op.kind]}{op.micro}{CHUNKS[op.part // stages] if chunks > 1 else ''}"


def check(s: Schedule) -> None:
    """Refuses a table that cannot be run, with a ValueError that names the tick and the stage: work that is not there, done twice, left out, or done
    before what it needs.  A tick in which nothing happens is refused too."""
    if s.ops.shape[1:] != (s.stages, 3, 2) or not s.ticks:
        raise ValueError(
            f"The table of '{s.name}' has the shape {list(s.ops.shape)}. Give [ticks, {s.stages}, 3, 2]: the micro-batch and the chunk of each kind."
        )
    done: dict[Op, int] = {}
    for tick, stage, op in s.each():
        said, chunk = f"In tick {tick} stage {stage} does {spell(op, s.stages, s.chunks)}", op.part // s.stages
        if op.micro >= s.micro or not 0 <= chunk < s.chunks:
            raise ValueError(f"{said} of chunk {chunk}, and there are {s.micro} micro-batches and {s.chunks} chunks, counted from 0.")
        if op in done:
            raise ValueError(f"{said}, which it did in tick {done[op]} already. Take one of them out.")
        done[op] = tick
    kinds = (F, B, W) if s.splits else (F, B)
    for op in (Op(kind, m, part) for m in range(s.micro) for part in range(s.stages * s.chunks) for kind in kinds):
        if op not in done:
            raise ValueError(
                f"The table ends after tick {s.ticks - 1}, and stage {op.part % s.stages} never does {spell(op, s.stages, s.chunks)}. "
                f"Every stage does {', '.join(LETTERS[k] for k in kinds)} of each micro-batch, with each of its chunks."
            )
    idle = np.flatnonzero((s.ops[..., 0] < 0).all((1, 2)))
    if len(idle):
        raise ValueError(f"In tick {idle[0]} no stage does anything. Take the tick out.")
    for op, tick in done.items():
        for need, gap in needs(op, s.stages * s.chunks):
            if done[need] + gap > tick:
                raise ValueError(_early(s, op, need, done))


def _early(s: Schedule, op: Op, need: Op, done: dict[Op, int]) -> str:
    """The sentence for an operation that comes before what it needs."""
    tick, stage, other = done[op], op.part % s.stages, need.part % s.stages
    what, that = spell(op, s.stages, s.chunks), spell(need, s.stages, s.chunks)
    said = f"In tick {tick} stage {stage} does {what}, which needs {that} of stage {other} "
    said += "from an earlier tick" if op.part != need.part else "first"
    said += f", and that is in tick {done[need]}."
    if other == stage:
        return f"{said} Put {that} before it."
    orders: list[list[Op]] = [[] for _ in range(s.stages)]
    for _, at, each in s.each():
        orders[at].append(each)
    try:
        arrange(orders, s.chunks)
    except ValueError as circle:
        return f"{said} No other tick would do: {str(circle)[0].lower()}{str(circle)[1:]}"
    return f"{said} Put {what} of stage {stage} into a later tick, or {that} of stage {other} into an earlier one."


def rows(s: Schedule) -> list[list[str]]:
    """A table as text: a row a stage, a cell a tick, such as 'F4+B0'; '' where the stage is idle."""
    cells = [[""] * s.ticks for _ in range(s.stages)]
    for tick, stage, op in s.each():
        cells[stage][tick] += "+" * bool(cells[stage][tick]) + spell(op, s.stages, s.chunks)
    return cells


def write(s: Schedule, path: Path) -> None:
    """A table as a CSV file that `read` reads."""
    with explained(path):
        path.write_text("".join(",".join(row) + "\n" for row in rows(s)), encoding="utf-8")


def read(path: Path) -> Schedule:
    """A table from a CSV file: a row a stage, a cell a tick, such as 'F3', 'F4+B0' or, where a stage has several chunks, 'F4b+B0a'; '' for idle. Lines
    that begin with # say something.  Raises ValueError, naming the file, row and cell, for what cannot be read and what `check` refuses."""
    lines = [(n, line) for n, line in enumerate(read_lines(path), 1) if line.strip(", \t") and not line.startswith("#")]
    if not lines:
        raise ValueError(f"{path} has no row. Write one for each stage, with a cell for each tick, such as 'F0,F1,F2+B0,B1,B2'.")
    cells = [[cell.strip() for cell in line.split(",")] for _, line in lines]
    ticks = max(tick + 1 for row in cells for tick, cell in enumerate(row) if cell)
    ops = np.full((ticks, len(cells), 3, 2), -1, np.int32)
    for stage, (row, (number, _)) in enumerate(zip(cells, lines)):
        for tick, cell in enumerate(row):
            last = -1
            for word in cell.split("+") if cell else []:
                where = f"{path}, row {number} (stage {stage}), cell {tick + 1} (tick {tick}): '{cell}'"
                found = CELL.fullmatch(word.strip())
                if not found:
                    raise ValueError(
                        f"{where} is not work. Write F, B or W with its micro-batch, as in F3, F4+B0, or with a chunk F4b+B0a."
                    )
                kind = LETTERS.index(found[1])
                if kind == last:
                    raise ValueError(
                        f"{where} has two of the kind {found[1]}, and a tick has one slot for each. Move one into another tick."
                    )
                if kind < last:
                    raise ValueError(
                        f"{where} is not in the order in which a tick runs: F, then B, then W. Write it so, or use another tick."
                    )
                ops[tick, stage, kind], last = (int(found[2]), CHUNKS.index(found[3] or "a")), kind
    s = Schedule(path.stem, len(cells), 1 + int(ops[..., 0].max()), 1 + int(ops[..., 1].max()), ops)
    try:
        check(s)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return s
