"""A plan as a picture: for the best layout and the next ones, a bar of the step's time and a bar of a device's memory, each by kind."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from meshloom.plan.explain import size
from meshloom.plan.page import FAINT, INK, LINE, SOFT, WIDTH, Page, box, heading, page, stroke, text, width, write
from meshloom.plan.search import Candidate, Found, Question
from meshloom.plan.told import cut, spelled
from meshloom.plan.why import seconds, terms

FIXED = {
    "compute": "#2f6fb3", "recompute": "#8fb4dc", "memory": "#5b6470", "optimizer": "#7a5c3e", "bubble": "#d0d7de",
    "parameters": "#2f6fb3", "gradients": "#d9661f", "activations": "#2e8b57", "weights": "#12868f", "in flight": "#8a4fbf",
}  # fmt: skip
"""Kinds whose colour is the same in every picture."""
SPARE = ("#d9661f", "#c0392b", "#c03a86", "#8a4fbf", "#2e8b57", "#12868f", "#e0a030", "#9aa5b1", "#4f8a8b", "#b56576")
MOST = 9
"""Kinds that have a colour of their own; the smallest of more are one."""
OTHER = "all else"
LEFT, ROW, BAR, RIGHT = 20.0, 46.0, 13.0, 92.0


def draw(title: str, q: Question, found: Found, path: Path) -> None:
    """Writes the picture.  title: of the model.  path: .svg or .png; anything else is refused with a ValueError."""
    p, height = compose(title, q, found)
    write(p, height, path)


def compose(title: str, q: Question, found: Found) -> tuple[Page, float]:
    """The page, and how high it is."""
    p, there = page({}), [one for one in (found.best, *found.others) if one]
    text(p, LEFT, 22, f"{title} on {q.cluster.label}", 18, bold=True)
    said = f"{q.sequences * q.seq:,} tokens a step, {q.seq:,} in a sequence, {q.dtype}; the best of {found.space:,} candidates"
    text(p, LEFT, 44, said, 11.5, SOFT, room=WIDTH - 40)
    y = _panel(p, 58, "Time of a step", "what nothing hides", there, [terms(one.time) for one in there], seconds, 0, q)
    limit = float(q.cluster.hardware.memory)
    memory = [{kind: float(n) for kind, n in one.memory.kinds.items()} for one in there]
    return p, _panel(p, y + 14, "Memory of a device", f"the line: {size(limit)}", there, memory, size, limit, q) + 10


def _panel(
    p: Page, y: float, said: str, more: str, there: Sequence[Candidate], rows: Sequence[Mapping[str, float]], tell: Callable, limit: float, q: Question,
) -> float:  # fmt: skip
    """One kind of bars for all candidates, with its legend.  limit: a line across them, 0 for none.  Returns where it ends."""
    y = heading(p, y, said, more)
    totals: dict[str, float] = {}
    for row in rows:
        for kind, n in row.items():
            totals[kind] = totals.get(kind, 0.0) + n
    shown = [kind for kind in sorted(totals, key=lambda kind: -totals[kind]) if totals[kind] > 0]
    kinds = shown if len(shown) <= MOST + 1 else [*shown[:MOST], OTHER]
    colours = _colours(kinds)
    y = _legend(p, y, kinds, colours)
    scale = (WIDTH - LEFT - 20 - RIGHT) / max(limit, *(sum(row.values()) for row in rows))
    for i, (one, row) in enumerate(zip(there, rows)):
        top, x = y + i * ROW, LEFT
        name = f"{'best' if i == 0 else i + 1}: {spelled(one)}"
        end = text(p, LEFT, top + 8, name, 11, INK, bold=i == 0, mono=True, room=WIDTH - 300)
        text(p, end + 10, top + 8, cut(q, one), 9.5, SOFT, room=WIDTH - 30 - end)
        for kind in kinds:
            n = row.get(kind, 0.0) if kind != OTHER else sum(v for k, v in row.items() if k not in kinds)
            if n * scale > 0.2:
                box(
                    p, x, top + 18, n * scale, BAR, colours[kind], "white", min(0.5, n * scale / 6), f"{said.split()[0].lower()}-{i}-{kind}"
                )
            x += n * scale
        text(p, x + 6, top + 18 + BAR / 2, tell(sum(row.values())), 10.5, INK)
    end = y + len(there) * ROW
    if limit:
        stroke(p, (LEFT + limit * scale, y + 12), (LEFT + limit * scale, end - 8), INK, 1.2, dashed=True)
    return end


def _colours(kinds: Sequence[str]) -> dict[str, str]:
    """A colour for each kind."""
    spare = [colour for colour in SPARE if colour not in {FIXED[kind] for kind in kinds if kind in FIXED}]
    return {kind: FIXED.get(kind) or (spare.pop(0) if spare and kind != OTHER else LINE if kind == OTHER else FAINT) for kind in kinds}


def _legend(p: Page, y: float, kinds: Sequence[str], colours: Mapping[str, str]) -> float:
    """What the colours say.  Returns where it ends."""
    x = LEFT
    for kind in kinds:
        wide = 19 + width(kind, 10.5) + 18
        if x + wide > WIDTH - 20:
            x, y = LEFT, y + 17
        box(p, x, y, 13, 10, colours[kind], colours[kind])
        text(p, x + 18, y + 5, kind, 10.5)
        x += wide
    return y + 22
