"""Which axes a rectangle shows, and where it is cut."""

import pytest

from meshloom.plan.draw import Cut, Held, Part
from meshloom.plan.page import OWN, colours, page
from meshloom.plan.shards import FLAT, HIGH, WIDE, draw_acts, draw_weights, faces
from plan.drawn import drawn


def cut(name: str, size: int, parts: int = 1, *over: str) -> Cut:
    return Cut(name, size, over, parts, 0)


def names(*cuts: Cut) -> tuple:
    held = Held(("a",), tuple(c.name for c in cuts), tuple(c.size for c in cuts), (Part("rest", cuts, 0, "float32", 1),))
    return tuple(face and face.name for face in faces(held)[0])


def test_what_is_split_is_shown() -> None:
    layer, embed, heads, head = cut("layer", 4), cut("embed", 64, 2, "zero3"), cut("heads", 8, 2, "tensor"), cut("head", 128)
    assert names(layer, embed, heads, head) == ("embed", "heads", None)
    assert names(layer, embed, cut("heads", 8), head) == ("embed", "heads", None), "then the first"
    assert names(layer, cut("embed", 64, 8, "zero3"), heads._replace(parts=1), head) == ("heads", "embed", None), (
        "many pieces lie beside each other"
    )
    assert names(layer, embed) == (None, "embed", None), "a vector lies"
    assert names() == (None, None, None)


def test_a_row_shows_the_same_axes_at_every_moment() -> None:
    for held in drawn("zero3=8").weights:
        assert len({tuple(face and face.name for face in one) for one in faces(held)}) == 1


def test_a_third_split_axis_is_sheets() -> None:
    batch, seq, heads = cut("batch", 8, 2, "data"), cut("whole_seq", 64, 2, "context"), cut("heads", 8, 2, "tensor")
    assert names(batch, seq, heads, cut("head", 32)) == ("whole_seq", "heads", "batch")


def test_marked_parts_are_as_large_as_shares() -> None:
    """The marker covers of each rectangle what the device holds of the array."""
    d = drawn("zero3=4 tensor=2")
    p = page(colours(d.sizes))
    draw_weights(p, d, 0)
    draw_acts(p, d, 1000)
    marked = [patch for patch in p.ax.patches if patch.get_facecolor()[:3] == tuple(int(OWN[i : i + 2], 16) / 255 for i in (1, 3, 5))]
    shown = [face for held in (*d.weights, *d.acts) for face in faces(held)]
    assert len(marked) == len(shown)
    for patch, face in zip(marked, shown):
        whole = WIDE * (HIGH if face.rows else FLAT)
        assert patch.get_width() * patch.get_height() / whole == pytest.approx(
            1 / ((face.rows.parts if face.rows else 1) * (face.columns.parts if face.columns else 1))
        )
