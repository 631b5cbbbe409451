"""The collectives of a step, drawn: one layer's forward and backward, those outside the layers, those once a step, and the bytes on each mesh axis."""

from meshloom.parallel.base import STEP
from meshloom.plan.draw import Drawing
from meshloom.plan.explain import size
from meshloom.plan.page import FAINT, INK, LINE, OTHER, OWN, PAPER, SOFT, WIDTH, Page, arrow, box, heading, stroke, text, width, words
from meshloom.plan.traffic import WHEN, Moved

GLYPHS = {
    "all-gather": ("own", "all"),
    "reduce-scatter": ("sums", "own"),
    "all-reduce": ("sums", "all"),
    "all-to-all": ("row", "column"),
    "collective-permute": ("own", "next"),
}
"""What a device has before and after each kind of collective."""
HAVE = {"own": (1, 0, 0, 0), "all": (1, 1, 1, 1), "sums": (2, 2, 2, 2), "next": (0, 1, 0, 0), "row": (1, 1, 0, 0), "column": (1, 0, 1, 0)}
"""A device's four parts: 0 none, 1 there, 2 its share of a sum."""
FILL = ("white", OWN, OTHER)
GLYPH, KIND, OVER, WHY, BYTES, SENT, BAR = 104.0, 148.0, 250.0, 346.0, 660.0, 732.0, 742.0
"""Where the columns begin; bytes end at theirs."""
ROW = 21.0


def draw_traffic(p: Page, d: Drawing, y: float) -> float:
    """The collectives of a step.  Returns where it ends."""
    t = d.traffic
    more = "in order; bytes are of whole arrays, sent: by each device, in a ring" if t.sent else ""
    y = heading(p, y, "What moves between devices", more)
    if not t.sent:
        text(p, 20, y + 8, "Nothing: each device works alone.", 11.5, SOFT)
        return y + 22
    for x, said in ((KIND, "kind"), (OVER, "over"), (WHY, "why")):
        text(p, x, y + 2, said, 10.5, SOFT)
    for x, said in ((BYTES, "bytes"), (SENT, "sent")):
        text(p, x, y + 2, said, 10.5, SOFT, at="right")
    y += 14
    largest = max(m.sent for share in t.shares for m in share.moves)
    for share in t.shares:
        text(p, 20, y + 12, share.title[0].upper() + share.title[1:], 11.5, bold=True)
        y += 24
        for back, said in enumerate(WHEN[share.often == STEP]):
            y = _pass(p, [m for m in share.moves if m.back == bool(back)], said, y, largest)
        y += 8
    return _totals(p, d, y + 4)


def _pass(p: Page, moves: list[Moved], said: str, y: float, largest: float) -> float:
    """The collectives of one pass, in order, beside an arrow of time."""
    if not moves:
        return y
    end = y + ROW * len(moves)
    box(p, 20, y, WIDTH - 40, end - y, PAPER, PAPER, 0)
    arrow(p, (30, y + 3), (30, end - 3), SOFT)
    text(p, 40, y + ROW / 2, said, 10.5, SOFT)
    for m in moves:
        _glyph(p, m.kind, GLYPH, y + 5)
        text(p, KIND, y + ROW / 2, m.kind, 10.5, INK, room=OVER - KIND - 6)
        _over(p, m.axes, y)
        many = f" ({m.count} arrays)" if m.count > 1 else ""
        text(p, WHY, y + ROW / 2, m.why + many, 10.5, INK, room=BYTES - WHY - 62)
        text(p, BYTES, y + ROW / 2, size(m.bytes), 10.5, INK, at="right")
        text(p, SENT, y + ROW / 2, size(m.sent), 10.5, INK, at="right")
        _bar(p, [m.sent], m.axes, y + 6, ROW - 12, largest)
        y += ROW
    return y + 5


def over(p: Page, axes: tuple[str, ...]) -> list[tuple[str, str]]:
    """Mesh axes, each in its colour."""
    said: list[tuple[str, str]] = []
    for axis in axes:
        said += [("x", FAINT)] if said else []
        said.append((axis, p.colours[axis]))
    return said


def _over(p: Page, axes: tuple[str, ...], y: float) -> None:
    """Mesh axes in their column: on two lines where one has no room."""
    said, room = over(p, axes), WHY - OVER - 10
    if len(axes) == 1 or width(" ".join(word for word, _ in said), 9.5, mono=True) <= room:
        words(p, OVER, y + ROW / 2, said, 10.5, room=room, mono=True)
        return
    half = len(axes) // 2 * 2
    words(p, OVER, y + 6, said[:half], 8.5, room=room, mono=True)
    words(p, OVER, y + 15.5, said[half:], 8.5, room=room, mono=True)


def _bar(p: Page, parts: list[float], axes: tuple[str, ...], y: float, high: float, largest: float) -> None:
    """Bytes as lengths, one after another, paler and paler; the colour is the first mesh axis's."""
    x, room = BAR, WIDTH - 24 - BAR
    for i, n in enumerate(parts):
        long = room * n / largest
        if long > 0.3:
            box(p, x, y, long, high, p.colours[axes[0]] + ("", "aa", "55")[i], "none", 0)
        x += long


def _glyph(p: Page, kind: str, x: float, y: float) -> None:
    """What a device has before and after."""
    for have in GLYPHS.get(kind, ()):
        for i, state in enumerate(HAVE[have]):
            box(p, x + 3.6 * i, y, 3.6, 11, FILL[state], SOFT, 0.5)
            if state == 2:
                stroke(p, (x + 3.6 * i + 0.8, y + 9.5), (x + 3.6 * i + 2.8, y + 1.5), SOFT, 0.5)
        x += 20


def _totals(p: Page, d: Drawing, y: float) -> float:
    """Bytes that each device sends in a step over each set of mesh axes."""
    t = d.traffic
    text(p, 20, y + 12, "A step in all, sent by each device", 11.5, bold=True)
    columns = (("in the layers", 350.0), ("outside them", 450.0), ("once a step", 550.0), ("all", SENT))
    for said, x in columns:
        text(p, x, y + 12, said, 10.5, SOFT, at="right")
    y += 24
    largest = max(sum(shares) for shares in t.totals.values())
    for axes, shares in t.totals.items():
        words(p, 20, y + ROW / 2, over(p, axes), 10.5, room=240, mono=True)
        for (_, x), n in zip(columns, (*shares, sum(shares))):
            text(p, x, y + ROW / 2, size(n), 10.5, INK if n else FAINT, at="right")
        _bar(p, list(shares), axes, y + 5, ROW - 10, largest)
        y += ROW
    stroke(p, (20, y + 2), (SENT, y + 2), LINE)
    text(p, 20, y + 15, "all", 10.5, bold=True)
    text(p, SENT, y + 15, size(t.sent), 10.5, at="right", bold=True)
    return y + 26
