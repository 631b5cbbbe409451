"""The picture holds every mesh axis, every array and every number; no text lies on another or outside."""

import html
import re
from pathlib import Path

import pytest

from meshloom.parallel.table import STRATEGIES
from meshloom.plan.draw import labels
from meshloom.plan.page import WIDTH
from meshloom.plan.picture import compose, draw
from plan.drawn import SPELLINGS, drawn, example

CASES = dict.fromkeys(
    [
        *((spelling, "llama") for spelling in SPELLINGS),
        ("zero1=2 zero3=2 tensor=2 sequence", "gpt2"),
        *(example(name) for name in STRATEGIES),
    ]
)


@pytest.mark.parametrize("spelling, family", CASES)
def test_no_text_lies_on_another(spelling: str, family: str) -> None:
    p, height = compose(drawn(spelling, family))
    for i, a in enumerate(p.texts):
        assert a.left >= 0 and a.right <= WIDTH and a.top >= 0 and a.bottom <= height, a
        for b in p.texts[:i]:
            over = min(a.right, b.right) - max(a.left, b.left), min(a.bottom, b.bottom) - max(a.top, b.top)
            assert min(over) < 1, (a, b)


def test_svg_names_mesh_axes_arrays_and_collectives(tmp_path: Path) -> None:
    d = drawn("data=2 zero3=2 tensor=2 sequence")
    draw(d, tmp_path / "a.svg")
    said = [html.unescape(line) for line in re.findall(r"<text[^>]*>(.*?)</text>", (tmp_path / "a.svg").read_text(encoding="utf-8"))]
    for axis in d.axes:
        assert f"{axis.name} = {axis.size}" in said
    for held in d.weights:
        assert all(line in said for line in labels(held.paths)) and " ".join(held.axes) in said
    for held in d.acts:
        assert held.paths[0] in said
    for m in (*d.traffic.layer, *d.traffic.micro, *d.traffic.once):
        assert m.kind in said and any(line.startswith(m.why) for line in said)
    assert (tmp_path / "a.svg").read_text().count('id="device-') == 8


def test_one_device_is_drawn_too(tmp_path: Path) -> None:
    p, _ = compose(drawn(""))
    assert "Nothing: each device works alone." in [t.text for t in p.texts] and "The mesh: 1 device" in [t.text for t in p.texts]


def test_large_meshes_are_summarised() -> None:
    p, _ = compose(drawn("zero3=32 tensor=8", device=77))
    said = [t.text for t in p.texts]
    assert "77" in said and "255" in said and "\u22ef" in said and "100" not in said


def test_refuses_another_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a picture is written as .svg or .png"):
        draw(drawn("data=8"), tmp_path / "a.pdf")
