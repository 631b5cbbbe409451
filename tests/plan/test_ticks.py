"""The terminal's timeline: all work in its tick, fits the width, is readable when piped; numbers are the simulator's."""

import io
import re
from dataclasses import dataclass

import pytest
from rich.console import Console

from meshloom.parallel.schedules import make, rows
from meshloom.plan.ticks import compare, show, timeline
from meshloom.plan.timeline import Flight, Ring, study

CASES = [("gpipe", 4, 8), ("1f1b", 4, 16), ("zb", 3, 7), ("interleaved3", 4, 8), ("1f1b", 12, 100), ("zb", 1, 1)]


@dataclass
class Printed:
    text: str
    widest: int


def printed(what, *given, width: int = 100, colours: str | None = None) -> Printed:
    out = io.StringIO()
    what(*given, Console(file=out, width=width, highlight=False, force_terminal=bool(colours), color_system=colours))
    text = out.getvalue()
    return Printed(text, max(len(line.rstrip()) for line in re.sub("\x1b[^m]*m", "", text).splitlines()))


@pytest.mark.parametrize("width", [60, 100, 200])
@pytest.mark.parametrize("case", CASES)
def test_each_stage_shows_its_work_in_order_and_fits(case, width: int) -> None:
    s = study(make(*case))
    found = printed(timeline, s, width=width)
    assert found.widest <= width and "\x1b" not in found.text
    for stage, want in enumerate(rows(s.table.schedule)):
        lines = [line for line in found.text.splitlines() if line.startswith(f"stage {stage} ")]
        shown = [word for line in lines for word in line.split()[2:] if word != "\u00b7"]
        wanted = [word for cell in want if cell for word in cell.split("+")]
        if "\n..." in found.text:
            assert len(lines) == 7 and shown[0] == "F0" and shown == [w for w in wanted if w in shown]
        else:
            assert shown == wanted


def test_long_timelines_leave_out_the_middle() -> None:
    text = printed(timeline, study(make("1f1b", 2, 300))).text
    assert text.count("\n...\n") == 1 and "B299" in text and "F0" in text and "F150" not in text and len(text.splitlines()) < 40


def test_columns_stand_below_their_tick() -> None:
    lines = printed(timeline, study(make("1f1b", 2, 3))).text.splitlines()
    assert [line.rstrip() for line in lines[:3]] == [
        "tick     0  1     2     3     4",
        "stage 0  F0 F1 \u00b7  F2 B0 \u00b7  B1 B2",
        "stage 1  \u00b7  F0 B0 F1 B1 F2 B2 \u00b7",
    ]


def test_colours_on_a_terminal() -> None:
    s = study(make("zb", 2, 3))
    many, few = (printed(timeline, s, colours=system).text for system in ("truecolor", "standard"))
    assert "48;2;47;111;179mF0" in many  # COLOURS of F
    assert all(f"\x1b[{code}m{op}" in few for code, op in (("37;44", "F0"), ("30;42", "B0"), ("30;43", "W0")))


def test_numbers_of_one_schedule() -> None:
    text = printed(show, study(make("zb", 4, 16), what="in a phrase")).text
    assert "in a phrase" in text and re.search(r"One program in lockstep +73 +12.3%", text) and re.search(r"for each stage +70 +8.6%", text)
    assert re.search(r"inputs kept from F to B +7 +5 +3 +1\b", text) and re.search(r"left by B for W +1 +2 +3 +4\b", text)
    assert "for W" not in printed(show, study(make("1f1b", 4, 16))).text
    wide = printed(show, study(make("1f1b", 64, 64)))
    assert wide.widest <= 100 and re.search(r"inputs kept from F to B +64 +64 +64 +64 +3 +1\b", wide.text)


def test_bytes_of_one_schedule() -> None:
    held = Flight("a model", 2, {"kept": Ring("inputs", 8, 2**20)}, 3 * 2**20)
    assert held.bytes == 11 * 2**20
    text = printed(show, study(make("1f1b", 4, 16))._replace(flight=held)).text
    assert "a model, 2 layers a stage: 11.0 MiB in flight on each device" in text
    assert re.search(r"inputs +8 +1.0 MiB +8.0 MiB", text) and re.search(r"made again +1 +3.0 MiB", text)
    kept = printed(show, study(make("1f1b", 4, 16))._replace(flight=held._replace(chunk=0))).text
    assert "made again" not in kept and "8.0 MiB in flight" in kept


def test_schedules_side_by_side() -> None:
    names = ("gpipe", "1f1b", "interleaved2", "zb")
    found = printed(compare, [study(make(name, 4, 16)) for name in names], {"interleaved9": "it does not fit."})
    assert found.widest <= 100
    want = {
        "gpipe": "37 76 15.8% 15.8% 16 -",
        "1f1b": "22 76 15.8% 15.8% 7 -",
        "interleaved2": "42 70 8.6% 8.6% 11 -",
        "zb": "22 73 12.3% 8.6% 7 4",
    }
    for name, numbers in want.items():
        assert next(line.split()[1:] for line in found.text.splitlines() if line.split()[:1] == [name]) == numbers.split()
    assert "interleaved9: it does not fit." in found.text and "64 if no stage ever waited" in found.text
    held = Flight("a model", 2, {"kept": Ring("inputs", 8, 2**20)}, 0)
    text = printed(compare, [study(make("1f1b", 4, 16))._replace(flight=held)], {}).text
    assert "8.0 MiB" in text and "bytes in flight: on each device, of a model." in text
