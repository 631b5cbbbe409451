"""A layout as a picture: mesh, shards, traffic.  `draw` puts the parts below each other; this file draws the mesh and its legend."""

import math
from pathlib import Path

from meshloom.plan.draw import Drawing, shown
from meshloom.plan.page import FAINT, INK, LINE, OWN, SOFT, WIDTH, Page, box, colours, heading, page, text, width, words, write
from meshloom.plan.shards import draw_acts, draw_weights
from meshloom.plan.wires import draw_traffic

WIDE, WIDEST, HIGH, GAP, APART, LABEL = 46.0, 92.0, 38.0, 5.0, 16.0, 15.0
"""One device's box (as wide as its label, where few stand beside each other), what lies between two, and between two blocks; a line for labels."""
MORE = "\u22ef"


def draw(d: Drawing, path: Path) -> None:
    """Writes the picture of a layout.  path: .svg or .png; anything else is refused with a ValueError."""
    p, height = compose(d)
    write(p, height, path)


def compose(d: Drawing) -> tuple[Page, float]:
    """The page, and how high it is."""
    p = page(colours(d.sizes))
    text(p, 20, 22, d.spelling, 18, bold=True)
    text(p, 20, 44, d.title, 11.5, SOFT, room=WIDTH - 40)
    text(p, 20, 60, d.how, 11.5, SOFT, room=WIDTH - 40)
    y = draw_mesh(p, d, 78)
    y = draw_weights(p, d, y + 12)
    y = draw_acts(p, d, y + 12)
    return p, draw_traffic(p, d, y + 12) + 16


def draw_mesh(p: Page, d: Drawing, y: float) -> float:
    """The devices, with their coordinates, and what each mesh axis is for.  Returns where it ends."""
    place = ", ".join(f"{axis} {at}" for axis, at in d.place.items())
    own = f"marked: device {d.device} ({place}), whose part is shown below" if d.place else ""
    y = heading(p, y, f"The mesh: {d.devices} device{'s' * (d.devices > 1)}", own)
    axes = list(d.sizes)
    wide, high = _extent(d, axes)
    _block(p, d, axes, {}, 20, y)
    if wide > WIDTH / 2:
        return _legend(p, d, 20, y + high + 12)
    return max(y + high + 4, _legend(p, d, 20 + wide + 36, y + 10))


def _legend(p: Page, d: Drawing, x: float, y: float) -> float:
    """The mesh axes: size, what asked for them, which names they split.  Returns where it ends."""
    room = WIDTH - 20 - x
    for axis in d.axes:
        colour = p.colours[axis.name]
        box(p, x, y + 2, 10, 10, colour, colour)
        end = text(p, x + 16, y + 7, f"{axis.name} = {axis.size}", 11.5, colour, mono=True, bold=True)
        if axis.asked not in (f"{axis.name}={axis.size}", axis.name):
            text(p, end + 10, y + 7, f"by {axis.asked}", 10.5, SOFT, mono=True, room=room - end + x - 10)
        y += 17
        for line, colour in ((axis.what, INK), (axis.said, SOFT)):
            for part in _lines(line, room - 16, 10.5):
                text(p, x + 16, y + 6, part, 10.5, colour)
                y += 15
        y += 7
    return y


def _lines(said: str, room: float, size: float) -> list[str]:
    """A sentence on as many lines as it takes."""
    lines = [""]
    for word in said.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and width(longer, size) > room:
            lines.append(word)
        else:
            lines[-1] = longer
    return [line for line in lines if line]


def _wide(d: Drawing) -> float:
    """How wide a device's box is."""
    if not d.sizes:
        return WIDE
    *outer, last = d.sizes
    need = width(f"{last} {d.sizes[last] - 1}", 10.5, mono=True) + 2
    beside = math.prod(len(shown(d, axis)) for axis in (last, *outer[-2::-2]))
    return max(WIDE, min(need, WIDEST)) if beside <= 6 else WIDE


def _extent(d: Drawing, axes: list[str]) -> tuple[float, float]:
    """How wide and high a block of the mesh is, its labels included.  axes: its own, outermost first."""
    if not axes:
        return _wide(d), HIGH
    if len(axes) <= 2:
        counts = [len(shown(d, axis)) for axis in axes]
        rows, side = (counts[0], _side(axes[0])) if len(axes) == 2 else (1, 0)
        return side + counts[-1] * (_wide(d) + GAP) - GAP, LABEL + rows * (HIGH + GAP) - GAP
    w, h = _extent(d, axes[1:])
    n = len(shown(d, axes[0]))
    return (n * (w + APART) - APART, h + LABEL) if len(axes) % 2 else (w + _side(axes[0]), n * (h + APART) - APART)


def _side(axis: str) -> float:
    """Room for a row's label."""
    return width(f"{axis} 00", 10.5, mono=True) + 8


def _block(p: Page, d: Drawing, axes: list[str], place: dict[str, int | None], x: float, y: float) -> None:
    """A block of devices: those with these coordinates along the axes outside it. Two axes are a grid; blocks lie beside, then below each other."""
    if len(axes) <= 2:
        return _grid(p, d, axes, place, x, y)
    axis, (w, h) = axes[0], _extent(d, axes[1:])
    for at in shown(d, axis):
        said, colour = f"{axis} {at}" if at is not None else MORE, p.colours[axis] if at is not None else FAINT
        if len(axes) % 2:
            text(p, x + w / 2, y + 6, said, 10.5, colour, at="center", mono=True, bold=True, room=w)
            _block(p, d, axes[1:], {**place, axis: at}, x, y + LABEL)
            x += w + APART
        else:
            text(p, x, y + h / 2, said, 10.5, colour, mono=True, bold=True)
            _block(p, d, axes[1:], {**place, axis: at}, x + _side(axis), y)
            y += h + APART
    return None


def _grid(p: Page, d: Drawing, axes: list[str], place: dict[str, int | None], x: float, y: float) -> None:
    """The innermost one or two axes: columns, and rows. Dots for a block that is left out."""
    wide, columns, rows = _wide(d), ([axes[-1]] if axes else []), axes[:-1]
    side = _side(rows[0]) if rows else 0
    for j, column in enumerate(shown(d, columns[0]) if columns else [0]):
        left = x + side + j * (wide + GAP)
        if columns:
            said = f"{columns[0]} {column}" if column is not None else MORE
            text(p, left + wide / 2, y + 6, said, 10.5, p.colours[columns[0]], at="center", mono=True, room=wide)
        for i, row in enumerate(shown(d, rows[0]) if rows else [0]):
            top = y + LABEL * bool(columns) + i * (HIGH + GAP)
            if rows and j == 0:
                text(p, x, top + HIGH / 2, f"{rows[0]} {row}" if row is not None else MORE, 10.5, p.colours[rows[0]], mono=True)
            _device(p, d, {**place, **dict(zip((*rows, *columns), ((row, column) if rows else (column,)) if columns else ()))}, left, top)


def _device(p: Page, d: Drawing, place: dict[str, int | None], x: float, y: float) -> None:
    """One device, or dots for those that are left out."""
    wide = _wide(d)
    if any(at is None for at in place.values()):
        text(p, x + wide / 2, y + HIGH / 2, MORE, 10, FAINT, at="center")
        return
    number = 0
    for axis, size in d.sizes.items():
        number = number * size + (place[axis] or 0)
    box(p, x, y, wide, HIGH, OWN if number == d.device else "white", INK if number == d.device else LINE, 1.2, f"device-{number}")
    text(p, x + wide / 2, y + 14, str(number), 13, INK, at="center", bold=True)
    said = [(str(at), p.colours[axis]) for axis, at in place.items()]
    words(p, x + wide / 2, y + 28, said, 10, at="center", mono=True, room=wide - 4)
