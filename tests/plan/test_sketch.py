"""The terminal's picture: readable at 100 columns and when piped."""

import io

import pytest
from rich.console import Console

from meshloom.plan.draw import labels
from meshloom.plan.explain import size
from meshloom.plan.sketch import sketch
from plan.drawn import SPELLINGS, drawn


def printed(spelling: str, width: int = 100, **more) -> str:
    out = io.StringIO()
    sketch(drawn(spelling, **more), Console(file=out, width=width, highlight=False))
    return out.getvalue()


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_fits_a_hundred_columns_without_colours(spelling: str) -> None:
    text = printed(spelling)
    assert "\x1b" not in text and max(len(line.rstrip()) for line in text.splitlines()) <= 100
    d = drawn(spelling)
    for held in d.weights:
        assert "; ".join(labels(held.paths)) in text and f"[{' '.join(held.axes)}]" in text
        assert all(size(part.bytes) in text for part in held.parts)


def test_shows_mesh_shards_and_bytes() -> None:
    text = printed("zero3=4 tensor=2")
    assert "zero3 3" in text and "\u2503 0  \u2503" in text and "heads / 2 tensor" in text and "embed / 4 zero3" in text
    d = drawn("zero3=4 tensor=2")
    for m in (*d.traffic.layer, *d.traffic.micro, *d.traffic.once):
        assert m.kind in text and size(m.bytes) in text and size(m.sent) in text
    assert size(d.traffic.sent) in text


def test_the_marked_piece_moves_with_the_device() -> None:
    first, last = printed("tensor=2"), printed("tensor=2", device=1)
    assert "\u2588" * 8 + "\u2592" * 8 in first and "\u2591" * 8 + "\u2588" * 8 in last


def test_one_device() -> None:
    assert "Nothing: each device works alone." in printed("")


def test_large_meshes_are_summarised() -> None:
    text = printed("zero3=32 tensor=8")
    assert "255" in text and "..." in text and text.count("\u2502") < 2 * 64
