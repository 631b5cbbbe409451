"""The picture of a plan: bars to scale, no text on another."""

import re

import pytest

from meshloom.plan.bars import compose, draw
from meshloom.plan.search import search
from meshloom.plan.space import Allowed
from meshloom.plan.why import terms
from plan.questions import GPU, question

Q = question("llama", GPU._replace(memory=2**21), 8, Allowed(strategies=("zero3", "tensor", "pipe", "context"), schedules=("1f1b",)))


def test_bars_are_to_scale_and_texts_apart(tmp_path) -> None:
    found = search(Q)
    assert found.best and found.others
    p, height = compose("tiny", Q, found)
    bars = {patch.get_gid(): patch for patch in p.ax.patches if patch.get_gid()}
    best = terms(found.best.time)
    kinds = [kind for kind in best if f"time-0-{kind}" in bars]
    scale = bars[f"time-0-{kinds[0]}"].get_width() / best[kinds[0]]
    for kind in kinds:
        assert bars[f"time-0-{kind}"].get_width() == pytest.approx(best[kind] * scale)
    assert len({gid.split("-")[1] for gid in bars}) == 1 + len(found.others) and height > 200
    for i, a in enumerate(p.texts):
        for b in p.texts[i + 1 :]:
            assert a.right <= b.left + 0.5 or b.right <= a.left + 0.5 or a.bottom <= b.top + 0.5 or b.bottom <= a.top + 0.5, (a, b)
    draw("tiny", Q, found, tmp_path / "plan.svg")
    assert re.search(r"time-0-compute", (tmp_path / "plan.svg").read_text())


def test_another_ending_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"plan.pdf ends in '.pdf', and a picture is written as .svg or .png"):
        draw("tiny", Q, search(Q), tmp_path / "plan.pdf")
