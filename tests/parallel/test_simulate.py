"""Times of schedules against the published formulas, exactly: costs are fractions."""

from fractions import Fraction
from itertools import pairwise

import pytest

from meshloom.parallel.schedules import B, F, Op, W, make
from meshloom.parallel.simulate import RECOMPUTE, STASH, WAYS, simulate, times
from meshloom.parallel.slots import compile, forward_only

COSTS = [tuple(Fraction(n) for n in costs) for costs in (STASH, RECOMPUTE, (3, 5, 2))]
CHUNKS = {"gpipe": 1, "1f1b": 1, "interleaved2": 2, "interleaved3": 3, "interleaved4": 4}


@pytest.mark.parametrize("stages", range(1, 9))
@pytest.mark.parametrize("name", CHUNKS)
def test_bubble_of_gpipe_1f1b_and_interleaved(name: str, stages: int) -> None:
    """(p - 1) / v of a whole micro-batch's time on a stage: arXiv 2104.04473, sections 2.2.1 and 2.2.2; in the packed form in lockstep too."""
    v = CHUNKS[name]
    for micro in range(1, 33):
        if v > 1 and micro % stages:
            continue
        table = compile(make(name, stages, micro))
        for costs in COSTS[:2]:
            r, whole = simulate(table, costs), sum(costs)
            assert r.useful == micro * whole
            for way in WAYS:
                assert r.wall[way] == micro * whole + Fraction(stages - 1, v) * whole, (micro, way)
                assert r.bubble[way] == Fraction(stages - 1, v * micro + stages - 1)


@pytest.mark.parametrize("name, stages, micro", [("1f1b", 4, 2), ("1f1b", 8, 32), ("gpipe", 4, 8), ("interleaved2", 4, 8)])
def test_one_operation_a_tick_loses_time_in_lockstep_only(name: str, stages: int, micro: int) -> None:
    apart, packed = (simulate(compile(make(name, stages, micro, packed)), COSTS[1]) for packed in (False, True))
    assert apart.wall["asynchronous"] == packed.wall["asynchronous"]
    assert apart.bubble["uniform"] > packed.bubble["uniform"] or name == "gpipe"


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("stages", range(1, 9))
def test_bubble_of_zb(stages: int, packed: bool) -> None:
    """(p - 1) (F + B - W) where each stage has its own program, arXiv 2401.10241, section 2: a third of 1F1B's where F = B = W. With fewer micro-batches than
    stages there is less to fill the gap with: the last stage's first B waits for m - 1 others, not p - 1."""
    for micro in range(1, 33):
        table = compile(make("zb", stages, micro, packed))
        for f, b, w in COSTS:
            gap = simulate(table, (f, b, w)).wall["asynchronous"] - micro * (f + b + w)
            assert gap == (stages - 1) * (f + b) - (min(stages, micro) - 1) * w, micro
            if f == b == w and micro >= stages:
                assert 3 * gap == (stages - 1) * (f + b + w)


@pytest.mark.parametrize("stages, micro", [(2, 4), (4, 16), (8, 8)])
def test_bubble_of_zb_in_lockstep(stages: int, micro: int) -> None:
    """No stage can run ahead into the gap of others: only the W of the last p - 1 micro-batches comes off 1F1B's bubble."""
    for f, b, w in COSTS:
        assert simulate(compile(make("zb", stages, micro)), (f, b, w)).wall["uniform"] == micro * (f + b + w) + (stages - 1) * (f + b)


def test_what_is_in_flight() -> None:
    """One operation a tick: stage s of S keeps S - s inputs, arXiv 2104.04473, section 2.2.1; packed 2 (S - 1 - s) + 1."""
    assert simulate(compile(make("1f1b", 4, 16, packed=False))).kept == (4, 3, 2, 1)
    r = simulate(compile(make("1f1b", 4, 16)))
    assert (r.ticks, r.kept, r.late) == (22, (7, 5, 3, 1), (0, 0, 0, 0)) and r.slots["kept"] == 7
    assert simulate(compile(make("zb", 4, 16))).late == (1, 2, 3, 4)


def test_forward_only() -> None:
    r = simulate(forward_only(4, 16, 2), COSTS[0])
    assert r.wall["uniform"] == r.wall["asynchronous"] == Fraction(2 * 16 + 3, 2) and r.useful == 16


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved2", "zb"])
def test_times_overlap_on_no_stage_and_keep_what_they_need(name: str, way: str) -> None:
    table = compile(make(name, 3, 6))
    found, over = times(table, COSTS[1], way)
    parts = 3 * table.schedule.chunks
    for stage in range(3):
        mine = sorted(span for op, span in found.items() if op.part % 3 == stage)
        assert all(a[1] <= b[0] for a, b in pairwise(mine)) and mine[-1][1] <= over
    for (kind, m, part), (start, _) in found.items():
        before = {F: Op(F, m, part - 1), B: Op(B, m, part + 1), W: Op(B, m, part)}[kind]
        assert before.part in (-1, parts) or found[before][1] <= start


def test_times_by_hand() -> None:
    """Two stages, two micro-batches, F takes 1 and B 3: what stands in tick 1 of stage 0 waits for the longer slot of the other."""
    table = compile(make("1f1b", 2, 2))  # F0 F1 B0 B1 over - F0B0 F1B1 -
    uniform, over = times(table, (1, 2, 1), "uniform")
    assert (uniform[Op(F, 1, 0)], uniform[Op(B, 0, 1)], uniform[Op(F, 1, 1)], over) == ((1, 2), (2, 5), (5, 6), 12)
    free, over = times(table, (1, 2, 1), "asynchronous")
    assert (free[Op(F, 1, 0)], free[Op(B, 0, 0)], free[Op(F, 1, 1)], over) == ((1, 2), (5, 8), (5, 6), 12)
