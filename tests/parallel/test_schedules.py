"""Schedules as tables: valid by a checker of its own, the published order, refusals that name the tick."""

import pytest

from meshloom.parallel.schedules import make, rows


def test_packed_1f1b_by_hand() -> None:
    assert rows(make("1f1b", 2, 4)) == [
        ["F0", "F1", "F2+B0", "F3+B1", "B2", "B3"],
        ["", "F0+B0", "F1+B1", "F2+B2", "F3+B3", ""],
    ]


def test_1f1b_with_one_operation_a_tick_by_hand() -> None:
    assert rows(make("1f1b", 2, 3, packed=False)) == [
        ["F0", "F1", "", "B0", "F2", "B1", "", "B2"],
        ["", "F0", "B0", "F1", "B1", "F2", "B2", ""],
    ]


def test_unknown_names_give_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"'gpip' is not a schedule. Did you mean 'gpipe'\? There are: gpipe, 1f1b, interleaved2, zb"):
        make("gpip", 2, 4)
