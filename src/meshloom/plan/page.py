"""A page to draw on: texts, boxes, lines and arrows in points from its upper left corner, and its colours.  Written as SVG or PNG by matplotlib,
which is imported inside the functions."""

import functools
import io
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

WIDTH = 860
"""Points: as wide as a page on the web, so that a picture is shown there at its own size."""
INK, SOFT, FAINT, PAPER, LINE = "#1f2933", "#66737f", "#9aa5b1", "#f6f8fa", "#d0d7de"
OWN, OTHER = "#ffdf80", "#eef2f6"
"""What the device holds, as with a marker; what others hold."""
PREFERRED = {
    "data": "#2e8b57", "zero": "#2f6fb3", "tensor": "#d9661f", "context": "#8a4fbf", "ulysses": "#c03a86", "expert": "#c0392b",
    "cols": "#d9661f", "rows": "#12868f", "depth": "#8a4fbf", "cube_heads": "#d9661f", "cube_rows": "#12868f", "cube_embed": "#8a4fbf",
}  # fmt: skip
"""How a mesh axis's name begins -> its colour, where no other axis of the mesh has it already."""
SPARE = ("#12868f", "#7a5c3e", "#c03a86", "#8a4fbf", "#2e8b57", "#c0392b", "#2f6fb3", "#d9661f", "#5b6470")
ENDINGS = (".svg", ".png")
SANS, MONO = "DejaVu Sans", "DejaVu Sans Mono"
FONTS = {f"'{MONO}'": f"'{MONO}', Menlo, monospace", f"'{SANS}'": f"'{SANS}', Verdana, sans-serif"}
"""Fonts of an SVG, and those of the same width for machines without them."""


def colours(axes: Iterable[str]) -> dict[str, str]:
    """A colour for each mesh axis, the same in every picture as far as names do not collide."""
    wishes = {axis: next((colour for start, colour in PREFERRED.items() if axis.startswith(start)), "") for axis in axes}
    found = {colour: axis for axis, colour in reversed(wishes.items()) if colour}  # of axes that wish the same, the first has it
    spare = [colour for colour in SPARE if colour not in found]
    return {axis: wish if found.get(wish) == axis else spare.pop(0) if spare else INK for axis, wish in wishes.items()}


class Box(NamedTuple):
    """Where a text stands: left, top, right, bottom."""

    left: float
    top: float
    right: float
    bottom: float
    text: str


class Page(NamedTuple):
    """ax: matplotlib's. texts: where every text stands, so that a test can see that none lies on another."""

    ax: Any
    texts: list[Box]
    colours: Mapping[str, str]


def page(colours: Mapping[str, str]) -> Page:
    """An empty page. Its height is given when it is written."""
    from matplotlib.figure import Figure

    figure = Figure(facecolor="white")
    ax = figure.add_axes((0, 0, 1, 1))
    ax.axis("off")
    return Page(ax, [], colours)


def write(p: Page, height: float, path: Path) -> None:
    """The page as a file, by its ending.  Raises ValueError for another than SVG or PNG."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    check(path)
    p.ax.set(xlim=(0, WIDTH), ylim=(height, 0))
    p.ax.figure.set_size_inches(WIDTH / 72, height / 72)
    with matplotlib.rc_context({"svg.hashsalt": "meshloom", "svg.fonttype": "none"}):
        if path.suffix.lower() == ".svg":
            text = io.StringIO()
            FigureCanvasSVG(p.ax.figure).print_svg(text, metadata={"Date": None})
            path.write_text(re.sub("|".join(FONTS), lambda font: FONTS[font[0]], text.getvalue()), encoding="utf-8")
        else:
            p.ax.figure.set_dpi(144)
            FigureCanvasAgg(p.ax.figure).print_png(str(path))


def check(path: Path) -> None:
    """Refuses a file that is neither SVG nor PNG."""
    if path.suffix.lower() not in ENDINGS:
        raise ValueError(
            f"{path.name} ends in '{path.suffix}', and a picture is written as {' or '.join(ENDINGS)}. Name it {path.stem}{ENDINGS[0]}."
        )


def width(text: str, size: float, mono: bool = False, bold: bool = False) -> float:
    """How wide a text is, points."""
    return _width(text, mono, bold) * size / 100


@functools.cache
def _width(text: str, mono: bool, bold: bool) -> float:
    """How wide a text is at 100 points."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(family=MONO if mono else SANS, size=100, weight="bold" if bold else "normal")
    return text_to_path.get_text_width_height_descent(text, font, False)[0]


def text(
    p: Page, x: float, y: float, said: str, size: float = 11, colour: str = INK, at: str = "left", mono: bool = False,
    bold: bool = False, turned: bool = False, room: float = 0,
) -> float:  # fmt: skip
    """One line of text; y: its middle.  at: which of its ends, or its middle, x is (y for a turned one).  room: points that it may take; it is
    made smaller to fit.  Returns where it ends."""
    if not said:
        return x
    wide = width(said, size, mono, bold)
    if room and wide > room:
        size, wide = size * room / wide, room
    before = wide * {"left": 0, "center": 0.5, "right": 1}[at]
    half = size * 0.55
    box = (x - half, y - before, x + half, y - before + wide) if turned else (x - before, y - half, x - before + wide, y + half)
    p.texts.append(Box(*box, said))
    p.ax.text(
        x, y, said, size=size, color=colour, ha="center" if turned else at, va=at if turned and at == "center" else "center_baseline",
        family=MONO if mono else SANS, weight="bold" if bold else "normal", rotation=90 if turned else 0, parse_math=False,
    )  # fmt: skip
    return x - before + wide


def words(
    p: Page, x: float, y: float, said: Iterable[tuple[str, str]], size: float = 11, at: str = "left", room: float = 0, turned: bool = False, **how: Any
) -> float:  # fmt: skip
    """Words of several colours on one line, as `text` sets one.  Returns where they end."""
    said = [(word, colour) for word, colour in said if word]
    gap = width("n", size, **how) * 0.6
    wide = sum(width(word, size, **how) for word, _ in said) + gap * (len(said) - 1)
    if room and wide > room:
        size, gap, wide = size * room / wide, gap * room / wide, room
    before = wide * {"left": 0, "center": 0.5, "right": 1}[at]
    x, y = (x, y + before) if turned else (x - before, y)
    for word, colour in said:
        long = width(word, size, **how)
        if turned:
            text(p, x, y - long / 2, word, size, colour, at="center", turned=True, **how)
            y -= long + gap
        else:
            x = text(p, x, y, word, size, colour, **how) + gap
    return y + gap if turned else x - gap


def box(p: Page, x: float, y: float, w: float, h: float, fill: str = "white", edge: str = INK, line: float = 0.8, name: str = "") -> None:
    """A rectangle.  name: the id of its group in an SVG."""
    from matplotlib.patches import Rectangle

    patch = Rectangle((x, y), w, h, facecolor=fill, edgecolor=edge, linewidth=line, joinstyle="miter")
    if name:
        patch.set_gid(name)
    p.ax.add_patch(patch)


def stroke(
    p: Page, start: tuple[float, float], end: tuple[float, float], colour: str = INK, line: float = 1.0, dashed: bool = False
) -> None:
    """A straight line."""
    from matplotlib.lines import Line2D

    p.ax.add_line(Line2D(*zip(start, end), color=colour, linewidth=line, linestyle=(0, (1, 1.6)) if dashed else "-", solid_capstyle="butt"))


def arrow(p: Page, start: tuple[float, float], end: tuple[float, float], colour: str = SOFT, line: float = 1.2) -> None:
    """An arrow."""
    from matplotlib.patches import FancyArrowPatch

    p.ax.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=9, color=colour, linewidth=line, shrinkA=0, shrinkB=0))


def heading(p: Page, y: float, said: str, more: str = "") -> float:
    """A heading with a line under it.  Returns where what it heads begins."""
    end = text(p, 20, y + 12, said, 14, bold=True)
    text(p, end + 10, y + 12.5, more, 10.5, SOFT, room=WIDTH - 30 - end)
    stroke(p, (20, y + 24), (WIDTH - 20, y + 24), LINE, 1)
    return y + 34
