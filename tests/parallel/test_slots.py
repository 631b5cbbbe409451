"""Tables as a program reads them: a machine that does what the columns say finds in each place what belongs there."""

import numpy as np
import pytest

from meshloom.parallel.schedules import make
from meshloom.parallel.slots import COLUMNS, RINGS, Table, arrivals, compile, forward_only, segments

NAMES = {"gpipe": 1, "1f1b": 1, "zb": 1, "interleaved2": 2, "interleaved3": 3, "interleaved4": 4}
ALL = [(name, stages) for name in NAMES for stages in range(1, 9)]


def fitting(name: str, stages: int) -> list[int]:
    """Numbers of micro-batches up to 32."""
    return [m for m in (1, 2, 3, 5, 8, 13, 32) if m] if NAMES[name] == 1 else [m for m in (stages, 3 * stages) if m <= 32]


def run(table: Table) -> tuple[list, list]:
    """Does what the columns say, tick for tick, with words for arrays: the input of part p on micro-batch m is "x m p", its cotangent "g m p".  Returns
    what the head and the embedding's backward saw, and all work done.  Fails where a place holds something else than what is read from it."""
    s, c = table.schedule, table.columns
    stages, parts = s.stages, s.stages * s.chunks
    ring = {name: [["nothing"] * size for _ in range(stages)] for name, size in table.sizes.items()}
    seen, work, flying = [], [], {}
    for tick in range(s.ticks):
        at = {name: column[tick].tolist() for name, column in c.items()}
        b = any(m >= 0 for m in at["backward"])
        if b:  # what the last tick with a B made arrives before this one's
            for stage in range(stages):
                ring["grads"][stage][at["arrive_g"][stage]] = flying.get((stage + 1) % stages, "nothing")
            flying = {}
        out = {}
        for stage in range(stages):
            m, part = at["forward"][stage], at["forward_chunk"][stage] * stages + stage
            x = f"x {at['enter'][stage]} 0" if part == 0 else ring["inbox"][stage][at["forward_from"][stage]]
            if m >= 0:
                assert x == f"x {m} {part}", (tick, stage)
                out[stage] = f"x {m} {part + 1}"
                work.append(("F", m, part))
            ring["kept"][stage][at["forward_keep"][stage]] = x
        for stage in range(stages):
            ring["inbox"][stage][at["arrive_x"][stage]] = out.get((stage - 1) % stages, "nothing")
        if at["leave"][0] >= 0:
            assert out[stages - 1] == f"x {at['leave'][0]} {parts}"
            seen.append(("head", at["leave"][0], tick))
        for stage in range(stages):
            ring["grads"][stage][at["leave_to"][stage]] = f"g {at['leave'][stage]} {parts - 1}"
        for stage in range(stages) if b else ():
            m, part = at["backward"][stage], at["backward_chunk"][stage] * stages + stage
            if m >= 0:
                assert ring["kept"][stage][at["backward_kept"][stage]] == f"x {m} {part}", (tick, stage)
                assert ring["grads"][stage][at["backward_from"][stage]] == f"g {m} {part}", (tick, stage)
                flying[stage] = f"g {m} {part - 1}"
                work.append(("B", m, part))
            ring["late"][stage][at["backward_late"][stage]] = f"w {m} {part}"
        if at["exit"][0] >= 0:
            assert flying[0] == f"g {at['exit'][0]} -1"
            seen.append(("embed", at["exit"][0], tick))
        for stage in range(stages):
            m, part = at["weight"][stage], at["weight_chunk"][stage] * stages + stage
            if m >= 0:
                assert ring["late"][stage][at["weight_from"][stage]] == f"w {m} {part}", (tick, stage)
                work.append(("W", m, part))
    return seen, work


@pytest.mark.parametrize("name, stages", ALL)
def test_a_machine_that_follows_the_columns(name: str, stages: int) -> None:
    for micro in fitting(name, stages):
        for packed in (True, False):
            table = compile(make(name, stages, micro, packed))
            seen, work = run(table)
            parts, kinds = range(stages * NAMES[name]), "FBW" if name == "zb" else "FB"
            assert sorted(work) == sorted((kind, m, part) for kind in kinds for m in range(micro) for part in parts)
            assert sorted(said[:2] for said in seen) == sorted((who, m) for who in ("head", "embed") for m in range(micro))


@pytest.mark.parametrize("name", NAMES)
def test_columns_stay_in_their_rings(name: str) -> None:
    table = compile(make(name, 4, 8))
    assert list(table.columns) == list(COLUMNS) and set(table.slots) == set(RINGS)
    for column, values in table.columns.items():
        nothing = COLUMNS[column]
        most = table.sizes[nothing] - 1 if isinstance(nothing, str) else 7
        assert values.dtype == np.int32 and values.shape == (table.schedule.ticks, 4)
        assert values.min() >= (-1 if nothing == -1 else 0) and values.max() <= most, column
    for column in ("enter", "leave", "exit"):
        assert (table.columns[column] == table.columns[column][:, :1]).all()


@pytest.mark.parametrize("name, stages", ALL)
def test_places_of_each_ring(name: str, stages: int) -> None:
    """What lives at once, by hand: a stage keeps as many inputs as it runs forwards before their first backward is through."""
    v = NAMES[name]
    for micro in fitting(name, stages):
        for packed in (True, False):
            table, back = compile(make(name, stages, micro, packed)), 2 if packed or v > 1 else 1
            ahead = [micro if name == "gpipe" else back * (stages - 1 - s) + (v - 1) * stages + 1 for s in range(stages)]
            assert table.used["kept"] == tuple(min(n, micro * v) for n in ahead), (micro, packed)
            assert table.used["late"] == tuple(min(s + 1, micro) if name == "zb" else 0 for s in range(stages))
            if packed:
                assert table.slots["inbox"] == int(stages * v > 1)
                assert table.slots["grads"] == (micro if name == "gpipe" else 1)


def test_a_place_for_what_nobody_reads_is_made_only_where_none_is_free() -> None:
    """Packed, a stage of 1F1B always has a place free for an input; between two gradients that it needs, stages without the head get one of no use."""
    for micro in (16, 64):
        assert compile(make("1f1b", 4, micro)).sizes == {"inbox": 1, "kept": 7, "grads": 2, "late": 1}
        assert compile(make("zb", 4, micro)).sizes["late"] == 4


def test_places_do_not_grow_with_the_micro_batches() -> None:
    for name in ("1f1b", "zb", "interleaved2"):
        assert compile(make(name, 4, 16)).slots == compile(make(name, 4, 64)).slots


@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize("stages", [1, 2, 3, 8])
def test_forward_only(stages: int, chunks: int) -> None:
    for micro in (1, 2, 5, 8, 24):
        table = forward_only(stages, micro, chunks)
        seen, work = run(table)
        assert [said[:2] for said in sorted(seen)] == [("head", m) for m in range(micro)]
        assert sorted(work) == sorted(("F", m, part) for m in range(micro) for part in range(stages * chunks))
        assert [table.slots[ring] for ring in ("kept", "grads", "late")] == [0, 0, 0]
        assert segments(table) == [(0, table.schedule.ticks, (True, False, False))]
        if chunks == 1 or micro % stages == 0:
            assert table.schedule.ticks == micro * chunks + stages - 1


def test_segments() -> None:
    f, fb, b, fbw, bw, w = (
        (True, False, False),
        (True, True, False),
        (False, True, False),
        (True,) * 3,
        (False, True, True),
        (False, False, True),
    )
    assert segments(compile(make("1f1b", 4, 8))) == [(0, 3, f), (3, 11, fb), (11, 14, b)]
    assert segments(compile(make("zb", 4, 8))) == [(0, 3, f), (3, 6, fb), (6, 11, fbw), (11, 14, bw)]
    assert segments(compile(make("zb", 1, 1))) == [(0, 1, fbw)]
    assert segments(compile(make("zb", 2, 1, packed=False))) == [(0, 2, f), (2, 3, b), (3, 4, bw), (4, 5, w)]


def test_refuses_what_cannot_be_run() -> None:
    s = make("1f1b", 2, 4)
    with pytest.raises(
        ValueError, match="In tick 0 stage 0 does B3, which needs F3 of stage 0 first, and that is in tick 2. Put F3 before it."
    ):
        compile(s._replace(ops=s.ops[::-1].copy()))


def test_ticks_in_which_something_arrives() -> None:
    """Two stages, two micro-batches: F0 F1 - B0 B1 above, - F0 F1+B0 B1 - below. The last stage's output goes nowhere."""
    found = arrivals(make("gpipe", 2, 2))
    assert found["arrive_x"].tolist() == [True, True, False, False, False]
    assert found["arrive_g"].tolist() == [False, False, False, True, True]
