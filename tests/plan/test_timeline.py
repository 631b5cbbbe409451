"""The picture of a schedule: every piece of work once and to scale, the numbers of the simulator, no text on another."""

import html
import re
from pathlib import Path

import pytest
from matplotlib.patches import Rectangle

from meshloom.parallel.schedules import make
from meshloom.parallel.simulate import RECOMPUTE, STASH, WAYS
from meshloom.plan.page import WIDTH
from meshloom.plan.timeline import COLOURS, TITLES, Study, asked, compose, draw, shade, study

CASES = {
    "1f1b": [("1f1b", 4, 16)],
    "zb": [("zb", 4, 8)],
    "interleaved4": [("interleaved4", 2, 4)],
    "wide": [("1f1b", 16, 40)],
    "one": [("gpipe", 1, 1)],
    "several": [("gpipe", 4, 8), ("1f1b", 4, 8), ("interleaved2", 4, 8), ("zb", 4, 8)],
}


def studies(name: str) -> list[Study]:
    return [study(make(*case), what="a phrase") for case in CASES[name]]


@pytest.mark.parametrize("name", CASES)
def test_no_text_lies_on_another(name: str) -> None:
    p, height = compose(studies(name))
    for i, a in enumerate(p.texts):
        assert a.left >= 0 and a.right <= WIDTH and a.top >= 0 and a.bottom <= height, a
        for b in p.texts[:i]:
            over = min(a.right, b.right) - max(a.left, b.left), min(a.bottom, b.bottom) - max(a.top, b.top)
            assert min(over) < 1, (a, b)


@pytest.mark.parametrize("name", CASES)
def test_all_work_is_there_to_scale(name: str) -> None:
    """Boxes of one kind are as many as the schedule has operations, and as wide together as the time that they take."""
    found = studies(name)
    p, _ = compose(found)
    ways = 2 if len(found) == 1 else 1
    for kind in range(3):
        shades = {shade(kind, v, s.table.schedule.chunks)[0] for s in found for v in range(s.table.schedule.chunks)}
        boxes = [b for b in p.ax.patches if isinstance(b, Rectangle) and rgb(b) in shades and b.get_height() > 10]
        assert len(boxes) == ways * sum(int((s.table.schedule.ops[:, :, kind, 0] >= 0).sum()) for s in found), kind
    lanes = [b for b in p.ax.patches if b.get_gid()]
    assert len(lanes) == ways * sum(s.table.schedule.stages for s in found)
    longest = max(lane.get_width() for lane in lanes)
    for s in found:
        wide = next(lane.get_width() for lane in lanes if lane.get_gid() == f"{s.name}-uniform-0")
        assert wide / longest == pytest.approx(s.times.wall["uniform"] / max(t.times.wall["uniform"] for t in found))


def rgb(box: Rectangle) -> str:
    return "#" + "".join(f"{round(255 * n):02x}" for n in box.get_facecolor()[:3])


def test_svg_says_what_the_simulator_says(tmp_path: Path) -> None:
    draw(studies("zb"), tmp_path / "a.svg")
    said = [html.unescape(line) for line in re.findall(r"<text[^>]*>(.*?)</text>", (tmp_path / "a.svg").read_text(encoding="utf-8"))]
    assert {"zb", "a phrase", "stage 3", "7 / 1", "1 / 4", TITLES["uniform"], TITLES["asynchronous"]} <= set(said)
    assert any(line.startswith("22.0% idle, time 41;") for line in said) and any(line.startswith("15.8% idle, time 38;") for line in said)
    draw(studies("one"), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_asked_in_a_line() -> None:
    assert asked(studies("interleaved4")) == (
        "2 stages, 4 chunks on each, 4 micro-batches; a stage's F takes 1, B 3 (B runs the forward again)"
    )
    assert asked(studies("one")) == "1 stage, 1 micro-batch; a stage's F takes 1, B 3 (B runs the forward again)"
    assert asked(studies("several")).endswith("B 3, or 2 and W 1 (B runs the forward again)")
    assert asked([study(make("zb", 4, 8), stash=True)]) == "4 stages, 8 micro-batches; a stage's F takes 1, B 1 and W 1"
    assert study(make("zb", 4, 8)).costs == RECOMPUTE and study(make("zb", 4, 8), stash=True).costs == STASH


def test_chunks_differ_in_shade_and_every_way_has_a_title() -> None:
    assert shade(0, 0, 1)[0] == COLOURS[0] and len({shade(0, v, 4) for v in range(4)}) == 4
    assert set(TITLES) == set(WAYS)


def test_refuses_more_than_can_be_seen() -> None:
    with pytest.raises(
        ValueError, match="A picture of 16,000 pieces of work is more than can be seen; 12,000 is the most. Ask for fewer micro-batches"
    ):
        compose([study(make("1f1b", 2, 2000))])
