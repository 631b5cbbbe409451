"""Arrays as rectangles cut into shards, with the device's own marked."""

from typing import NamedTuple

from meshloom.plan.draw import MOMENTS, Cut, Drawing, Held, Part, holders, labels, spans, visible
from meshloom.plan.explain import size
from meshloom.plan.page import FAINT, INK, LINE, OTHER, OWN, SOFT, WIDTH, Page, box, heading, stroke, text, width, words

LEFT, COLUMN = 20.0, 165.0
"""Where rows begin; how wide a cell of the table is. The first column says what is drawn."""
WIDE, HIGH, FLAT = 112.0, 64.0, 14.0
"""A rectangle; a vector's height."""
SIDE = 34.0
"""Room for names left of it."""
SHEET, SHEETS = 7.0, 2
"""How far the sheets of a third split axis stand behind each other, and how many are drawn behind the first."""


class Faces(NamedTuple):
    """The axes that a rectangle shows: of its height, its width, and the sheets behind it. None: it has none."""

    rows: Cut | None
    columns: Cut | None
    sheets: Cut | None


def faces(held: Held) -> list[Faces]:
    """Which axes to show, the same at every moment: those that are split at any, then the first ones. A vector is a row, and so is what is cut
    into many pieces along one axis alone."""
    most: dict[str, int] = {}
    for cut in (cut for part in held.parts for cut in part.cuts):
        most[cut.name] = max(most.get(cut.name, 1), cut.parts)
    split = [name for name, parts in most.items() if parts > 1]
    rest = [name for name in most if name not in split and name != "layer"]
    chosen = (split + rest)[: 3 if len(split) > 2 else 2]
    names = [name for name in held.axes if name in chosen]
    if len(names) == 2 and most[names[0]] > 4 and most[names[1]] == 1:
        names.reverse()
    names = [None] * (2 - len(names)) + names if len(names) < 3 else [names[1], names[2], names[0]]
    found = []
    for part in held.parts:
        cuts: dict[str | None, Cut] = {cut.name: cut for cut in part.cuts}
        found.append(Faces(*(cuts.get(name) for name in (*names, None)[:3])))
    return found


def draw_weights(p: Page, d: Drawing, y: float) -> float:
    """A row for each kind of parameter, a column for each moment.  Returns where it ends."""
    y = heading(p, y, "What the device holds of the parameters", "bytes are of all arrays that a row names")
    for i, moment in enumerate(("rest", "step", "live", "grad")):
        x = LEFT + COLUMN * (i + 1) + SIDE
        text(p, x, y + 4, moment, 11.5, bold=True, mono=True)
        text(p, x, y + 19, MOMENTS[moment], 10.5, SOFT, room=COLUMN - SIDE - 4)
    y += 34
    for held in (*d.weights, *d.kept):
        y = _row(p, d, held, y)
    return y - 8


def _row(p: Page, d: Drawing, held: Held, y: float) -> float:
    """One kind of array at each of its moments."""
    shown = faces(held)
    flat, deep = not any(face.rows for face in shown), any(face.sheets for face in shown)
    top = y + (4 + SHEET * SHEETS if deep else 0)
    line = top + 20
    for name in labels(held.paths):
        text(p, LEFT, line, name, 11.5, mono=True, bold=True, room=COLUMN - 12)
        line += 15
    text(p, LEFT, line, " ".join(held.axes), 10.5, SOFT, mono=True, room=COLUMN - 12)
    text(p, LEFT, line + 15, " x ".join(str(n) for n in held.shape), 10.5, SOFT, mono=True, room=COLUMN - 12)
    ends = [
        _cell(p, d, part, face, LEFT + COLUMN * (i + 1), top, FLAT if flat else HIGH)
        for i, (part, face) in enumerate(zip(held.parts, shown))
    ]
    return max(*ends, line + 24) + 12


def draw_acts(p: Page, d: Drawing, y: float) -> float:
    """The activations, as many on a line as there is room for.  Returns where it ends."""
    y = heading(p, y, "What the device holds of the activations", "of one micro-batch")
    room = (WIDTH - 2 * LEFT) / 4
    for start in range(0, len(d.acts), 4):
        line = d.acts[start : start + 4]
        deep = any(faces(held)[0].sheets for held in line)
        top, ends = y + 20 + (4 + SHEET * SHEETS if deep else 0), [y]
        for i, held in enumerate(line):
            x = LEFT + room * i
            text(p, x + SIDE, y + 6, held.paths[0], 11.5, bold=True, room=room - SIDE - 4)
            ends.append(_cell(p, d, held.parts[0], faces(held)[0], x, top, HIGH))
        y = max(ends) + 14
    return y - 8


def _cell(p: Page, d: Drawing, part: Part, shown: Faces, x: float, y: float, high: float) -> float:
    """One array at one moment: its rectangle with the axes' names, then shape and bytes.  Returns where it ends."""
    left, top = x + SIDE, y + 14
    behind = min(shown.sheets.parts - 1, SHEETS) * SHEET if shown.sheets else 0
    if shown.columns:
        _name(p, shown.columns, left + (WIDE + behind) / 2, y + 6 - behind, WIDE + 24, turned=False)
    if shown.rows:
        _name(p, shown.rows, left - 8, top + high / 2, high + 14, turned=True)
    _sheets(p, shown, left, top, WIDE, high)
    _grid(p, d, part, shown, (left, top, WIDE, high))
    y = top + high + 10
    words(p, left, y, _shape(p, part), 10.5, room=COLUMN - SIDE - 4, mono=True)
    copies = f", {part.copies} copies" if part.copies > 1 else ""
    text(p, left, y + 14, f"{size(part.bytes)}{copies}", 10.5, INK, room=COLUMN - SIDE - 4)
    text(p, left, y + 28, part.note, 10, SOFT, room=COLUMN - SIDE - 4)
    return y + (36 if part.note else 22)


def _shape(p: Page, part: Part) -> list[tuple[str, str]]:
    """The device's shape, sizes that are split in the colour of the (innermost) mesh axis that splits them."""
    said: list[tuple[str, str]] = []
    for cut, n in zip(part.cuts, part.shape):
        said += [("x", FAINT)] if said else []
        said.append((str(n), p.colours[cut.over[-1]] if cut.parts > 1 else INK))
    return said or [("1", INK)]


def _name(p: Page, cut: Cut, x: float, y: float, room: float, turned: bool) -> None:
    """An axis's name beside the rectangle, and in colour the mesh axes that split it."""
    said = [(cut.name, SOFT), *((axis, p.colours[axis]) for axis in cut.over)]
    if not turned:
        words(p, x, y, said, 10, at="center", room=room)
        return
    for i, (word, colour) in enumerate(reversed(said)):
        text(p, x - 11.5 * i, y, word, 10, colour, at="center", turned=True, room=room)


def _sheets(p: Page, shown: Faces, x: float, y: float, w: float, h: float) -> None:
    """The pieces of a third split axis behind the device's own."""
    if not shown.sheets:
        return
    behind = min(shown.sheets.parts - 1, SHEETS)
    for i in range(behind, 0, -1):
        box(p, x + SHEET * i, y - SHEET * i, w, h, OTHER, FAINT)
    cut, right = shown.sheets, x + w + SHEET * behind + 9
    said = [(cut.name, SOFT), *((axis, p.colours[axis]) for axis in cut.over), (f"{cut.own + 1}/{cut.parts}", SOFT)]
    words(p, right, y + h / 2 - 6, said, 10, at="center", turned=True, room=h + 16)


def _grid(p: Page, d: Drawing, part: Part, shown: Faces, at: tuple[float, float, float, float]) -> None:
    """The rectangle in its pieces: the device's own marked, each with the numbers of the devices that hold it where there is room."""
    x, y, w, h = at
    down, across = _steps(shown.rows, y, h), _steps(shown.columns, x, w)
    box(p, x, y, w, h, OTHER, INK, 0.8)
    for row, top, bottom in down:
        for column, left, right in across:
            if row is None or column is None:
                box(p, left, top, right - left, bottom - top, "white", "none", 0)
                continue
            mine = (shown.rows is None or row == shown.rows.own) and (shown.columns is None or column == shown.columns.own)
            if mine:
                box(p, left, top, right - left, bottom - top, OWN, OWN, 0)
            _numbers(p, d, part, shown, row, column, (left, top, right, bottom))
    for cut, steps, ends, upright in ((shown.rows, down, (x, x + w), False), (shown.columns, across, (y, y + h), True)):
        for number, start, _ in steps[1:]:
            colour = _border(p, d, cut, number)
            line = ((start, ends[0]), (start, ends[1])) if upright else ((ends[0], start), (ends[1], start))
            stroke(p, *line, colour, 1.3)
    for steps, upright in ((down, False), (across, True)):
        for number, start, end in steps:
            if number is None:
                middle = (start + end) / 2
                text(p, *((middle, y + h / 2) if upright else (x + w / 2, middle)), "\u22ef", 11, SOFT, at="center", turned=not upright)
    box(p, x, y, w, h, "none", INK, 1)


def _steps(cut: Cut | None, start: float, room: float) -> list[tuple[int | None, float, float]]:
    """The pieces drawn along one side: number (None for those left out), start, end."""
    shown = visible(cut.parts, cut.own) if cut else [0]
    one = room / len(shown)
    return [(number, start + one * i, start + one * (i + 1)) for i, number in enumerate(shown)]


def _border(p: Page, d: Drawing, cut: Cut | None, number: int | None) -> str:
    """The colour of the cut before a piece: that of the outermost mesh axis whose place changes there."""
    if cut is None or not cut.over:
        return LINE
    inner = cut.parts
    for axis in cut.over:
        inner //= d.sizes[axis]
        if number is None or number % inner == 0:
            return p.colours[axis]
    return p.colours[cut.over[-1]]


def _numbers(p: Page, d: Drawing, part: Part, shown: Faces, row: int, column: int, at: tuple[float, float, float, float]) -> None:
    """The devices that hold a piece, where they are few and there is room."""
    left, top, right, bottom = at
    if d.devices > 16 or d.devices == 1:
        return
    pieces = {cut.name: number for cut, number in ((shown.rows, row), (shown.columns, column)) if cut}
    pieces |= {shown.sheets.name: shown.sheets.own} if shown.sheets else {}
    said = spans(holders(d, part.cuts, pieces))
    high = min(9.0, (bottom - top) * 0.95)
    fits = width(said, high) <= right - left - 3
    if high >= 7 and fits:
        text(p, (left + right) / 2, (top + bottom) / 2, said, high, INK, at="center")
