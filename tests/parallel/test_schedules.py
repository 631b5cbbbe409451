"""Schedules as tables: every one is valid by a checker written apart from the code; tables by hand; refusals that name the tick."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from meshloom.parallel.schedules import SCHEDULES, Schedule, check, chunks_of, make, read, rows, write

NAMES = ("gpipe", "1f1b", "zb", "interleaved2", "interleaved3", "interleaved4")
ALL = [(name, stages) for name in NAMES for stages in range(1, 9)]


def sizes(name: str, stages: int, most: int = 32) -> Iterator[int]:
    """Numbers of micro-batches that fit."""
    return (m for m in range(1, most + 1) if chunks_of(name) == 1 or m % stages == 0)


def wrong(ops: np.ndarray, micro: int, chunks: int, split: bool) -> list[str]:
    """What a table breaks, by walking each micro-batch through its layers: down all parts, then up again, then each part's weights.  Knows ticks and
    parts only, nothing of how a table is made or checked."""
    ticks, stages = ops.shape[:2]
    when: dict[tuple[str, int, int], list[int]] = {}
    for tick in range(ticks):
        for stage in range(stages):
            for kind, (m, v) in zip("FBW", ops[tick, stage].tolist()):
                if m >= 0:
                    when.setdefault((kind, m, v * stages + stage), []).append(tick)
    every = {(kind, m, part) for kind in ("FBW" if split else "FB") for m in range(micro) for part in range(stages * chunks)}
    found = [f"{op} is {len(at)} times" for op, at in when.items() if len(at) != 1]
    found += [f"{op} is missing" for op in every - set(when)] + [f"{op} is too much" for op in set(when) - every]
    if found:
        return found
    for m in range(micro):
        way = [when["F", m, part][0] for part in range(stages * chunks)]
        back = [when["B", m, part][0] for part in reversed(range(stages * chunks))]
        found += [f"{m}: {a} then {b}" for road in (way, back) for a, b in pairwise(road) if b <= a]
        found += [f"{m}: turns in {way[-1]}, {back[0]}"] if back[0] < way[-1] else []
        if split:
            found += [f"{m}: W of {p}" for p in range(stages * chunks) if when["W", m, p][0] < when["B", m, p][0]]
    return found


@pytest.mark.parametrize("name, stages", ALL)
def test_every_schedule_is_valid(name: str, stages: int) -> None:
    for micro in sizes(name, stages):
        for packed in (True, False):
            s = make(name, stages, micro, packed)
            assert not wrong(s.ops, micro, s.chunks, name == "zb"), (micro, packed)
            assert s.chunks == chunks_of(name) and s.splits == (name == "zb")
            if not packed:
                assert (s.ops[..., 0] >= 0).sum(-1).max() == 1
            if micro in (1, 2, 8, 24):
                check(s)


@pytest.mark.parametrize("name, stages", ALL)
def test_ticks_are_the_fewest_of_the_order(name: str, stages: int) -> None:
    """Packed: from the first forward to the last backward of the first stage, which is never idle between."""
    for micro in sizes(name, stages):
        v = chunks_of(name)
        want = 2 * (micro + stages) - 3 if name == "gpipe" else micro * v + (v - 1) * stages + 2 * (stages - 1)
        assert make(name, stages, micro).ticks == want, micro


def test_packed_1f1b_by_hand() -> None:
    assert rows(make("1f1b", 2, 4)) == [
        ["F0", "F1", "F2+B0", "F3+B1", "B2", "B3"],
        ["", "F0+B0", "F1+B1", "F2+B2", "F3+B3", ""],
    ]


def test_papers_draw_one_operation_a_tick() -> None:
    assert rows(make("1f1b", 2, 3, packed=False)) == [
        ["F0", "F1", "", "B0", "F2", "B1", "", "B2"],
        ["", "F0", "B0", "F1", "B1", "F2", "B2", ""],
    ]


def test_zb_by_hand() -> None:
    """The last stage puts its first W off by one backward, so that all stages do W in the same ticks."""
    assert rows(make("zb", 2, 3)) == [
        ["F0", "F1", "F2+B0+W0", "B1+W1", "B2+W2"],
        ["", "F0+B0", "F1+B1+W0", "F2+B2+W1", "W2"],
    ]


def test_interleaved_by_hand() -> None:
    assert rows(make("interleaved2", 2, 2)) == [
        ["F0a", "F1a", "F0b", "F1b", "B0b", "B1b", "B0a", "B1a"],
        ["", "F0a", "F1a", "F0b+B0b", "F1b+B1b", "B0a", "B1a", ""],
    ]


@pytest.mark.parametrize(
    "name, stages, micro, said",
    [
        ("gpip", 4, 8, r"'gpip' is not a schedule. Did you mean 'gpipe'\? There are: gpipe, 1f1b, interleaved2, zb \(or another number of chunks\)."),
        ("interleave4", 4, 8, r"Did you mean 'interleaved2'\?"),
        ("wave", 4, 8, r"'wave' is not a schedule. There are: gpipe"),
        ("interleaved", 4, 8, r"'interleaved' lacks the number of chunks on a stage. Write 'interleaved2'"),
        ("interleaved1", 4, 8, r"'interleaved1' leaves the layers of a stage in one piece. Write '1f1b'"),
        ("interleaved0", 4, 8, r"'interleaved0' leaves the layers of a stage in one piece"),
        ("interleaved27", 4, 8, r"more chunks than there are letters for them. Give 26 at most"),
        ("1f1b", 0, 8, r"A pipeline of 0 stages is none. Give 1 or more."),
        ("1f1b", 4, -1, r"A pipeline of -1 micro-batches is none. Give 1 or more."),
        ("interleaved2", 4, 10, r"in groups of 4, and 10 micro-batches do not fill them. The nearest that fit: 8 or 12."),
        ("interleaved2", 4, 3, r"in groups of 4, and 3 micro-batches do not fill them. The nearest that fit: 4."),
    ],
)  # fmt: skip
def test_refuses_names_and_numbers(name: str, stages: int, micro: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make(name, stages, micro)


def test_the_table_of_schedules_is_covered() -> None:
    assert {name.rstrip("0123456789") if name.startswith("inter") else name for name in NAMES} == set(SCHEDULES)


CIRCLE = "F0,B0,F1,,,B1\n,F0,,F1,B0,B1"
TABLES = {
    # what a user wrote: what is said of it
    "F0,,B0,F1,,\n,F0+B0,,,F1+B1": "The table ends after tick 4, and stage 0 never does B1. Every stage does F, B of each micro-batch",
    "F0,F1,B0,B1\n,F0+B0,F1+B1,F1": "In tick 3 stage 1 does F1, which it did in tick 2 already. Take one of them out.",
    "F0,F1,B0,B1\nF0,F1+B0,B1": "In tick 0 stage 1 does F0, which needs F0 of stage 0 from an earlier tick, and that is in tick 0. Put F0 of stage 1 into a later "
    "tick, or F0 of stage 0 into an earlier one.",
    "F0,F1+B0,B1\n,F0+B0,F1+B1": "In tick 1 stage 0 does B0, which needs B0 of stage 1 from an earlier tick, and that is in tick 1.",
    "F0,F1,,,B0,B1\n,,B0,F0,F1+B1": "In tick 2 stage 1 does B0, which needs F0 of stage 1 first, and that is in tick 3. Put F0 before it.",
    "F0,F1,W0,B0,B1+W1\n,F0+B0+W0,F1+B1+W1": "In tick 2 stage 0 does W0, which needs B0 of stage 0 first, and that is in tick 3.",
    "F0,F1,B0,B1+W1\n,F0+B0+W0,F1+B1+W1": "and stage 0 never does W0. Every stage does F, B, W of each micro-batch",
    "F0,F1,,,B0,B1\n,F0+B0,,F1+B1": "In tick 2 no stage does anything. Take the tick out.",
    "F0,F1,,,B0,B1\n,F0,B0,B1,F1": "In tick 3 stage 1 does B1, which needs F1 of stage 1 first, and that is in tick 4. Put F1 before it.",
    CIRCLE: "In tick 1 stage 0 does B0, which needs B0 of stage 1 from an earlier tick, and that is in tick 4. No other tick would do: stages wait for "
    "each other in a circle: B0 of stage 0 needs B0 of stage 1, which stands behind F1; F1 of stage 1 needs F1 of stage 0, which stands behind B0.",
}


@pytest.mark.parametrize("table", TABLES)
def test_refuses_tables_and_names_the_tick(table: str, tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text(table)
    with pytest.raises(ValueError) as refused:
        read(tmp_path / "mine.csv")
    assert TABLES[table] in str(refused.value) and str(refused.value).startswith(f"{tmp_path / 'mine.csv'}: ")


CELLS = {
    "F0,B0\nF0,X0": r"mine.csv, row 2 \(stage 1\), cell 2 \(tick 1\): 'X0' is not work. Write F, B or W with its micro-batch, as in F3, F4\+B0",
    "F0,F1+F2": r"row 1 \(stage 0\), cell 2 \(tick 1\): 'F1\+F2' has two of the kind F, and a tick has one slot for each. Move one into another tick.",
    "# mine\n\nF0,F1,B0+F2": r"row 3 \(stage 0\), cell 3 \(tick 2\): 'B0\+F2' is not in the order in which a tick runs: F, then B, then W.",
    "F0,F": r"'F' is not work",
    "# nothing\n": r"mine.csv has no row. Write one for each stage",
    "": r"mine.csv is empty",
    "F0,F0b": r"mine.csv: The table ends after tick 1, and stage 0 never does B0a. .* with each of its chunks",
}


@pytest.mark.parametrize("table", CELLS)
def test_refuses_cells_and_names_them(table: str, tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text(table)
    with pytest.raises(ValueError, match=CELLS[table]):
        read(tmp_path / "mine.csv")


@pytest.mark.parametrize("name, stages, micro", [("gpipe", 1, 1), ("1f1b", 4, 6), ("zb", 3, 5), ("interleaved3", 2, 4)])
def test_a_table_written_and_read_is_the_same(name: str, stages: int, micro: int, tmp_path: Path) -> None:
    s = make(name, stages, micro)
    write(s, tmp_path / f"{name}.csv")
    again = read(tmp_path / f"{name}.csv")
    assert again._replace(ops=0) == s._replace(ops=0) and np.array_equal(again.ops, s.ops)


def test_cells_may_have_spaces_and_rows_a_ragged_end(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text("# two stages\nF0 , F1, B0, B1,,\n, F0 + B0, F1+B1\n\n")
    assert rows(read(tmp_path / "mine.csv")) == [["F0", "F1", "B0", "B1"], ["", "F0+B0", "F1+B1", ""]]


def test_check_and_the_checker_of_this_file_agree_on_damaged_tables() -> None:
    """Two operations of a valid table change places: both refuse it, or neither does."""
    rng, refused = np.random.default_rng(0), 0
    for name in ("1f1b", "zb", "interleaved2"):
        s = make(name, 3, 6)
        for _ in range(150):
            ops = s.ops.copy()
            stage, kind = rng.integers(3), rng.integers(3 if name == "zb" else 2)
            a, b = rng.integers(s.ticks, size=2)
            ops[[a, b], stage, kind] = ops[[b, a], stage, kind]
            bad = bool(wrong(ops, 6, s.chunks, name == "zb"))
            refused += bad
            if (ops[..., 0] < 0).all((1, 2)).any():
                continue
            try:
                check(Schedule("mine", 3, 6, s.chunks, ops))
                assert not bad
            except ValueError as error:
                assert bad and "tick" in str(error)
    assert 100 < refused < 440


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda s: s._replace(ops=s.ops[:, :1]), r"The table of '1f1b' has the shape \[6, 1, 3, 2\]. Give \[ticks, 2, 3, 2\]"),
        (lambda s: s._replace(ops=s.ops[:0]), r"has the shape \[0, 2, 3, 2\]"),
        (
            lambda s: s._replace(micro=3),
            r"In tick 3 stage 0 does F3 of chunk 0, and there are 3 micro-batches and 1 chunks, counted from 0.",
        ),
    ],
)
def test_refuses_arrays_that_are_no_table(change, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check(change(make("1f1b", 2, 4)))


def test_what_the_page_shows(tmp_path: Path) -> None:
    """The table of docs/schedules.md can be run, and the refusal that it quotes is what is said."""
    page = (Path(__file__).parents[2] / "docs" / "schedules.md").read_text(encoding="utf-8")
    (tmp_path / "mine.csv").write_text(page.split("```\n# stage 0")[1].split("```")[0].partition("\n")[2])
    assert rows(read(tmp_path / "mine.csv")) == rows(make("1f1b", 2, 3, packed=False))
    assert TABLES[CIRCLE] in page.replace("\n> ", " ")
