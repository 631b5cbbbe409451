"""Every collective is drawn, with bars as long as its bytes."""

import pytest

from meshloom.plan.explain import size
from meshloom.plan.hlo import KINDS
from meshloom.plan.page import colours, page
from meshloom.plan.wires import GLYPHS, HAVE, draw_traffic, over
from plan.drawn import drawn


def test_every_kind_has_its_sign() -> None:
    assert set(GLYPHS) == set(KINDS) and {have for both in GLYPHS.values() for have in both} <= set(HAVE)


def words_of(m) -> str:
    return m.why + (f" ({m.count} arrays)" if m.count > 1 else "")


def found(d, said: list[str]) -> tuple[list, list[int]]:
    """The collectives and where their reasons stand, in order."""
    moves, places, at = [m for share in d.traffic.shares for m in share.moves], [], 0
    for m in moves:
        at = said.index(words_of(m), at) + 1
        places.append(at - 1)
    return moves, places


def test_numbers_are_those_of_the_formulas() -> None:
    d = drawn("zero3=4 tensor=2 sequence")
    p = page(colours(d.sizes))
    draw_traffic(p, d, 0)
    said = [t.text for t in p.texts]
    rows = [(said[i - len(m.axes) * 2], said[i : i + 3]) for m, i in zip(*found(d, said))]
    moves = [m for share in d.traffic.shares for m in share.moves]
    assert rows == [(m.kind, [words_of(m), size(m.bytes), size(m.sent)]) for m in moves]
    assert said[-1] == size(d.traffic.sent)


def test_bars_are_as_long_as_their_bytes() -> None:
    d = drawn("zero3=4 tensor=2")
    p = page(colours(d.sizes))
    draw_traffic(p, d, 0)
    bars = [patch.get_width() for patch in p.ax.patches if getattr(patch, "get_x", lambda: 0)() == 742.0]
    sent = [
        m.sent
        for share in d.traffic.shares
        for m in share.moves
        if m.sent / max(m.sent for s in d.traffic.shares for m in s.moves) * 94 > 0.3
    ]
    assert bars[: len(sent)] == pytest.approx([94 * n / max(sent) for n in sent])


def test_axes_have_their_colours() -> None:
    p = page({"a": "#111111", "b": "#222222"})
    assert [word for word in over(p, ("a", "b"))] == [("a", "#111111"), ("x", "#9aa5b1"), ("b", "#222222")]
